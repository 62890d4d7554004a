"""Draft as many tokens as a predictor of the accepted length says: the explicit predictor that
SpecBranch compares H-RAD with."""

import pathlib
from typing import Annotated

import numpy as np
from torch import Tensor

from decoding.asking import ask, load_asked
from decoding.draft import RoundContext
from decoding.draft_tree import DraftStep
from decoding.stopping.base import TunableRule, probabilities, refuse_older
from decoding.stopping.policy import NEVER, Policy
from decoding.stopping.rollout_table import RolloutTable
from predictors.base import Records, read_config
from predictors.features.layers import RecordedLayers
from predictors.inputs import readable
from runtime.settings.kinds import Path, Probability

KEY = "stop.checkpoint"


class PredictedLength(TunableRule):
    """Draft the longest length that is accepted whole with probability `threshold`; with 0.5 it is
    the median of the accepted length (a predictor as in AdaEAGLE, 2412.18910).

    The head says once a round, before any draw, how probable each length up to gamma is. While
    nothing has been verified yet a draft has gamma tokens. The length depends on the verified
    context alone, so any checkpoint and threshold is lossless."""

    training = "python train.py predictor=hrad predictor.predicts=lengths"

    def __init__(
        self,
        checkpoint: Annotated[
            Path,
            "folder of a trained predictor (python train.py predictor=hrad"
            " predictor.predicts=lengths); it fixes the longest draft",
        ],
        threshold: Annotated[
            Probability, "a draft is as long as this probability of being accepted whole allows"
        ],
    ) -> None:
        super().__init__()
        trained = read_config(pathlib.Path(checkpoint), KEY)
        self.gamma: int = trained["gamma"] or 0
        wanted = "predict a round's accepted length", self.training
        self.predictor = load_asked(checkpoint, KEY, "round", self.gamma + 1, *wanted)
        self.trained_age: int = trained["settings"].get("age", 0)
        self.threshold = threshold
        self.target_layers = self.predictor.inputs.target_layers
        self.columns = self.predictor.inputs.columns("round")
        self.lengths = f"lengths by {checkpoint}"  # of a table

    def begin_round(self, context: RoundContext) -> None:
        refuse_older(self.trained_age)
        self.length = self.gamma
        if readable(self.predictor.inputs, context):
            reached = at_least(ask(self.predictor, context))
            self.length = int((reached >= self.threshold).sum())
        self.predicted = [float(self.length)]

    def should_stop(self, step: DraftStep) -> bool:
        return step.count >= self.length

    def policy(self, table: RolloutTable) -> Policy:
        """Return the policy, with one call a round."""
        refuse_older(self.trained_age)
        reach = np.full(table.accept.shape, -np.inf)
        reach[..., : self.gamma] = table.of_predictor(self.lengths)
        return Policy(reach, most=self.gamma, first=NEVER, per_round=1)

    def predictions(self, records: Records, layers: RecordedLayers) -> dict[str, Tensor]:
        """Return P(at least 1, 2, ..., gamma tokens are accepted) of each round, [n, gamma]."""
        return {self.lengths: at_least(probabilities(self.predictor, records, layers))}


def at_least(probs: Tensor) -> Tensor:
    """Return the probability of 1, 2, ... or more, [n, C - 1], from those of 0, 1, ..., [n, C]."""
    return probs.double().flip(-1).cumsum(-1).flip(-1)[..., 1:]
