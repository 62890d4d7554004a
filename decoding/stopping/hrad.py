"""H-RAD: one prediction per round, from verified target states, says how far to draft (SpecBranch
without branches)."""

import pathlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from decoding.asking import ask, load_asked
from decoding.draft import RoundContext, Verdict
from decoding.draft_tree import DraftStep
from decoding.stopping.base import TunableRule, probabilities, refuse_older
from decoding.stopping.confidence import Confidence
from decoding.stopping.policy import ALL, NEVER, NONE, SOME, Policy
from decoding.stopping.rollout_table import RolloutTable
from predictors.base import Records, read_config
from predictors.calibration import balanced
from predictors.features.layers import RecordedLayers
from predictors.inputs import readable
from runtime.errors import UserError
from runtime.settings.kinds import Path, Probability

KEY = "stop.checkpoint"


class HRADStop(TunableRule):
    """The predicted class decides. none: no draft; some: draft until `confidence` stops; all: gamma
    tokens.

    Serial "without branch" form of SpecBranch (2506.01979, section 5). gamma is the draft length
    the checkpoint was trained for, and the limit in every class. While nothing has been verified
    yet the class is "some". It depends on the verified context alone, so any gamma, checkpoint and
    confidence rule is lossless. confidence: a stop rule that keeps what it has looked at.
    balance: the class is the arg max of posterior / prior ** balance. 1 gives classes equal weight,
        as in training: the head's own arg max with calibration none or temperature, about that with
        platt or isotonic. At 0, the most probable class, one frequent class would decide nearly
        every round.
    trained_age: rounds between what the checkpoint was trained to read and the round it is about;
        one of 1 is for branches whose length is decided before they grow, and refused elsewhere.
    none: a number takes the place of the arg max: the class is "none" where its probability is
        above it, else "some".
    """

    picks_class = True
    training = "python train.py predictor=hrad"

    def __init__(
        self,
        checkpoint: Annotated[
            Path, "folder of a trained predictor (python train.py predictor=hrad); it fixes gamma"
        ],
        confidence: Annotated[TunableRule, "how long a draft of the class some gets"],
        balance: Annotated[
            float,
            Field(ge=-100, le=100),
            "arg max of posterior / prior ** balance decides; 1: every class weighs the same, 0:"
            " the most probable class",
        ] = 1.0,
        none: Annotated[
            Probability | None,
            "nothing is drafted where the class none is more probable than this, else as the class"
            " some; null: the three classes decide",
        ] = None,
    ) -> None:
        super().__init__()
        wanted = "predict a round's outcome as none, some or all", self.training
        self.predictor = load_asked(checkpoint, KEY, "round", 3, *wanted)
        if balance != 1 and not self.predictor.calibration.log_prior:
            raise UserError(
                f"stop.balance: {checkpoint} stores no class priors that {balance} could weigh."
                " Use 1"
            )
        self.balance, self.none = balance, none
        trained = read_config(pathlib.Path(checkpoint), KEY)
        self.gamma: int = trained["gamma"]
        self.trained_gamma = self.gamma
        self.trained_age: int = trained["settings"].get("age", 0)
        self.confidence = confidence
        self.draft_layers = confidence.draft_layers
        self.target_layers = self.predictor.inputs.target_layers
        self.setting = f"confidence.{confidence.setting}"
        self.columns = (*self.predictor.inputs.columns("round"), *confidence.columns)
        self.outcomes = f"outcome by {checkpoint}, balance {balance}, none {none}"  # of a table

    @classmethod
    def of(cls, checkpoint: Path, threshold: float | None) -> "HRADStop":
        """Return the rule with the draft's confidence; None: with the paper's threshold of it."""
        return cls(checkpoint, Confidence(0.2 if threshold is None else threshold))

    def begin_round(self, context: RoundContext) -> None:
        refuse_older(self.trained_age)
        self.confidence.begin_round(context)
        self.outcome = self.classify(context)
        self.predicted = [float(self.outcome)]

    def should_stop(self, step: DraftStep) -> bool:
        if self.outcome == NONE or step.count >= self.gamma:
            return True
        return self.outcome == SOME and self.confidence.should_stop(step)

    def end_round(self, verdict: Verdict) -> None:
        self.confidence.end_round(verdict)

    def policy(self, table: RolloutTable) -> Policy:
        """Return the policy, with one call a round. none: nothing is drawn; all: gamma tokens;
        some: until `confidence` stops, gamma at most."""
        refuse_older(self.trained_age)
        outcome, some = table.of_predictor(self.outcomes), self.confidence.policy(table)
        reach = np.where((outcome == ALL)[..., None], np.inf, some.reach)
        most = np.where(outcome == SOME, np.minimum(some.most, self.gamma), self.gamma)
        most = np.where(outcome == NONE, 0, most)
        return replace(some, reach=reach, most=most, first=NEVER, per_round=1)

    def grid(self, points: int, gamma_max: int) -> Sequence[float]:
        return self.confidence.grid(points, gamma_max)

    def predictions(self, records: Records, layers: RecordedLayers) -> dict[str, Tensor]:
        """Return the class of each round, [n]."""
        outcome = self.decide(probabilities(self.predictor, records, layers))
        return {self.outcomes: outcome, **self.confidence.predictions(records, layers)}

    def classify(self, context: RoundContext) -> int:
        if not readable(self.predictor.inputs, context):
            return SOME
        return int(self.decide(ask(self.predictor, context)))

    def decide(self, probs: Tensor) -> Tensor:
        """Return the classes [n] decided from the predictor's probabilities [n, C]."""
        if self.none is not None:
            return torch.where(probs[:, NONE] > self.none, NONE, SOME)
        return balanced(probs, self.predictor.calibration.log_prior, self.balance).argmax(-1)


RULE = HRADStop
