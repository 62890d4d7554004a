"""H-RAD: one prediction per round, from verified target states, says how far to draft (SpecBranch without branches)."""

from pathlib import Path
from typing import Literal

from decoding.draft import RoundContext, Verdict
from decoding.growth import DraftStep, StopRule
from predictors.base import Predictor, load_predictor, read_config
from predictors.errors import UserError
from predictors.features import extract

KEY = "stop.checkpoint"
NONE, SOME, ALL = 0, 1, 2


class HRADStop:
    """The predicted class decides. none: no draft; some: draft until `confidence` stops; all: gamma tokens.

    Serial "without branch" form of SpecBranch (2506.01979, section 5). gamma is the draft length the checkpoint was
    trained for, and the limit in every class. While nothing has been verified yet the class is "some". It depends on
    the verified context alone, so any gamma, checkpoint and confidence rule is lossless.
    confidence: a stop rule that keeps what it has looked at.
    """

    reads_hidden: Literal["target"] = "target"

    def __init__(self, checkpoint: str | Path, confidence: StopRule) -> None:
        self.predictor = load_classifier(checkpoint)
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

    def classify(self, context: RoundContext) -> int:
        """The class of what is drafted after `context.committed`."""
        if context.target_hidden is None:
            return SOME
        assert context.next_embedding is not None
        features = extract(context.target_hidden[:, None], self.predictor.features, context.next_embedding[None])
        return int(self.predictor.predict_proba(features)[0].argmax())


def load_classifier(checkpoint: str | Path) -> Predictor:
    """A three-class predictor on the target's hidden states, or UserError."""
    predictor = load_predictor(checkpoint, key=KEY)
    if len(predictor.classes) != 3 or predictor.features.side != "target":
        raise UserError(
            f"{KEY}: {checkpoint} holds {predictor.name!r}, which does not predict a round's outcome. "
            "Train one that does: python train.py predictor=hrad"
        )
    return predictor
