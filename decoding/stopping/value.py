"""Stop when one more token is no longer worth its time: by the learned probability that it will be
reached and accepted."""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from decoding.asking import ask, load_value
from decoding.draft import RoundContext
from decoding.draft_tree import DraftStep
from decoding.stopping.base import TunableRule, probabilities
from decoding.stopping.policy import Policy, lowest, seen_later
from decoding.stopping.rollout_table import RolloutTable
from predictors.base import Records
from predictors.features.layers import RecordedLayers
from predictors.inputs import readable
from predictors.outcomes import survival
from runtime.settings.kinds import Path, Probability

LEAST = 0.005  # threshold worth trying, besides 0: that of a draft 200 times as fast


class ValueStop(TunableRule):
    """Go on while the next token is accepted with a probability of at least `threshold`, all
    before it included. The first token is always drawn.

    Nothing is asked that the draft has not run on already, but for a checkpoint that reads
    `draft_hidden`. Before anything has been verified, one that reads the target's states says
    nothing, and the draft has one token."""

    value_says = "predicted probability that the next one is accepted, too"
    training = "python train.py predictor=value"

    def __init__(
        self,
        checkpoint: Annotated[Path, "folder of a trained predictor (python train.py)"],
        threshold: Annotated[
            Probability,
            "a draft ends where its next token is less probably accepted than this; about the"
            " time of a draft forward over that of a token",
        ],
    ) -> None:
        super().__init__()
        self.threshold = threshold
        self.predictor = load_value(checkpoint, "stop.checkpoint")
        inputs = self.predictor.inputs
        self.draft_layers, self.target_layers = inputs.draft_layers, inputs.target_layers
        self.columns = inputs.columns("token")
        self.survival = f"value by {checkpoint}"  # column of a table

    @classmethod
    def of(cls, checkpoint: Path, threshold: float | None) -> "ValueStop":
        """Return the rule; None: with the threshold of its YAML."""
        return cls(checkpoint, 0.2 if threshold is None else threshold)

    def begin_round(self, context: RoundContext) -> None:
        self.predicted, self._context = [], context
        self._reach, self._products = 1.0, list[float]()

    def should_stop(self, step: DraftStep) -> bool:
        if step.count == 0:
            return False
        if not readable(self.predictor.inputs, self._context):
            return True
        *_, first, both = ask(self.predictor, self._context, step.drawn())[0].tolist()
        self._products.append(self._reach * both)
        self._reach *= first + both
        products = torch.tensor(self._products, dtype=torch.float64)
        self.predicted.append(self._calibrated(products)[-1].item())
        return self.predicted[-1] < self.threshold

    def policy(self, table: RolloutTable) -> Policy:
        """Return the policy: the rule reads the token drawn last, so never before the first."""
        reach = lowest(seen_later(table.of_predictor(self.survival), 1))
        return Policy(reach, ahead="draft_hidden" in self.predictor.inputs.names, first=1)

    def grid(self, points: int, gamma_max: int) -> Sequence[float]:
        """Return thresholds in equal ratios, since they are ratios of costs."""
        return [0.0, *np.geomspace(LEAST, 1, points).tolist()]

    def predictions(self, records: Records, layers: RecordedLayers) -> dict[str, Tensor]:
        """Return predicted survival up to the token after each one of each rollout, [n, G]."""
        outcomes = probabilities(self.predictor, records, layers)
        return {self.survival: self._calibrated(survival(outcomes))}

    def _calibrated(self, products: Tensor) -> Tensor:
        return self.predictor.calibration.survival.of_products(products)


RULE = ValueStop
