"""SpecDec++: stop when the learned probability that some draft token will be rejected exceeds a
threshold."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from decoding.draft import RoundContext, Verdict
from decoding.draft_tree import DraftStep
from predictors.base import Predictor, load_predictor
from predictors.inputs import extract
from runtime.errors import UserError

KEY = "stop.checkpoint"


class SpecDecPPStop:
    """Stop once 1 - prod f_i > `threshold`, f_i the head's acceptance probability of draft token i
    (2405.19715, 3.3).

    A checkpoint with calibrated prefix survival puts that in the product's place
    (`predictors.survival`). bounds: never stop before the first number of tokens, always at the
    second. order: "paper" runs the draft on the last drawn token before it decides, so k tokens
    cost k + 1 draft forwards where
        the head stops; "code" (the released program) decides from the token before it, so the last
        token is sent without a score and k tokens cost k forwards. Either way every drawn token is
        sent: both are lossless.
    """

    target_layers: Sequence[int] = ()

    def __init__(
        self,
        checkpoint: str | Path,
        threshold: float,
        bounds: Sequence[int],
        order: Literal["paper", "code"],
    ) -> None:
        self.threshold, self.order = threshold, order
        self.least, self.most = _checked(threshold, bounds, order)
        self.predictor = load_head(checkpoint)
        self.draft_layers = self.predictor.features.layers
        self.predicted: list[float] = []

    def begin_round(self, context: RoundContext) -> None:
        self.predicted = []
        self._all_accepted = 1.0  # P(all scored tokens are accepted)

    def should_stop(self, step: DraftStep) -> bool:
        if step.count >= self.most:
            return True
        if step.count > (1 if self.order == "code" else 0):
            self.predicted.append(self._acceptance(step))
            self._all_accepted = self.predictor.calibration.survival(torch.tensor(self.predicted))[
                -1
            ].item()
        return step.count >= self.least and 1 - self._all_accepted > self.threshold

    def end_round(self, verdict: Verdict) -> None:
        pass

    def _acceptance(self, step: DraftStep) -> float:
        """f of the last drawn token ("paper") or of the one before it ("code")."""
        hidden = step.hidden() if self.order == "paper" else step.previous_hidden()
        features = extract(hidden[:, None], self.predictor.features)
        return self.predictor.predict_proba(features).item()


def load_head(checkpoint: str | Path) -> Predictor:
    """A two-class predictor on the draft's hidden states, or UserError."""
    predictor = load_predictor(checkpoint, key=KEY)
    if (
        len(predictor.classes) != 2
        or predictor.features.side != "draft"
        or predictor.features.embedding
    ):
        raise UserError(
            f"{KEY}: {checkpoint} holds {predictor.name!r}, which does not score draft tokens. "
            "Train one that does: python train.py predictor=specdecpp"
        )
    return predictor


def _checked(threshold: float, bounds: Sequence[int], order: str) -> tuple[int, int]:
    if not 0 <= threshold <= 1:
        raise UserError(f"stop.threshold: {threshold} is no probability. The paper uses 0.7")
    if len(bounds) != 2 or not 1 <= bounds[0] <= bounds[1]:
        raise UserError(
            f"stop.bounds: {list(bounds)} must be two numbers 1 <= min <= max. The paper's code has"
            " [2, 20]"
        )
    if order not in ("paper", "code"):
        raise UserError(f"stop.order: {order!r} is unknown. Use paper or code")
    return bounds[0], bounds[1]
