"""H-RAD: one prediction per round, from verified target states, says how far to draft (SpecBranch
without branches)."""

import math
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from decoding.draft import RoundContext, Verdict
from decoding.draft_tree import DraftStep, StopRule
from predictors.base import Predictor, load_predictor, read_config
from predictors.calibration import balanced
from predictors.inputs import extract
from runtime.errors import UserError

KEY = "stop.checkpoint"
NONE, SOME, ALL = 0, 1, 2


class HRADStop:
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
    """

    draft_layers: Sequence[int] = ()

    def __init__(self, checkpoint: str | Path, confidence: StopRule, balance: float = 1.0) -> None:
        self.predictor = load_classifier(checkpoint)
        self.target_layers = self.predictor.features.layers
        self.balance = self._checked(balance, checkpoint)
        self.gamma: int = read_config(Path(checkpoint), KEY)["gamma"]
        self.confidence = confidence
        self.predicted: list[float] = []

    def begin_round(self, context: RoundContext) -> None:
        self.confidence.begin_round(context)
        self.outcome = self.classify(context)
        self.predicted = [float(self.outcome)]

    def should_stop(self, step: DraftStep) -> bool:
        if self.outcome == NONE or step.count >= self.gamma:
            return True
        return self.outcome == SOME and self.confidence.should_stop(step)

    def end_round(self, verdict: Verdict) -> None:
        self.confidence.end_round(verdict)

    def _checked(self, balance: float, checkpoint: str | Path) -> float:
        if not math.isfinite(balance):
            raise UserError(
                f"stop.balance: {balance} is no finite number. 1 weighs classes equally, 0 by"
                " frequency"
            )
        if balance != 1 and not self.predictor.calibration.log_prior:
            raise UserError(
                f"stop.balance: {checkpoint} stores no class priors that {balance} could weigh."
                " Use 1"
            )
        return balance

    def classify(self, context: RoundContext) -> int:
        """The class of what is drafted after `context.committed`."""
        if context.target_hidden is None:
            return SOME
        assert context.next_embedding is not None
        features = extract(
            context.target_hidden[:, None], self.predictor.features, context.next_embedding[None]
        )
        return int(self.decide(features))

    def decide(self, features: Tensor) -> Tensor:
        """[n] classes of features [n, D]."""
        probs = self.predictor.predict_proba(features)
        return balanced(probs, self.predictor.calibration.log_prior, self.balance).argmax(-1)


def load_classifier(checkpoint: str | Path) -> Predictor:
    """A three-class predictor on the target's hidden states, or UserError."""
    predictor = load_predictor(checkpoint, key=KEY)
    if len(predictor.classes) != 3 or predictor.features.side != "target":
        raise UserError(
            f"{KEY}: {checkpoint} holds {predictor.name!r}, which does not predict a round's"
            " outcome. Train one that does: python train.py predictor=hrad"
        )
    return predictor
