"""No stop rule: the structure's own size ends the draft."""

from decoding.draft import RoundContext
from decoding.draft_tree import DraftStep
from decoding.interfaces import StopRule
from decoding.stopping.confidence_before import ConfidenceBefore
from decoding.stopping.policy import ALL


class Never(StopRule):
    """Never stop. What structures that do not ask a rule (trees, lookup) go with."""

    trained_gamma: int | None = None
    trained_age = 0
    stops_never = True

    def __init__(self) -> None:
        self.predicted: list[float] = []

    def should_stop(self, step: DraftStep) -> bool:
        return False

    # In an overlapped engine

    def classify(self, context: RoundContext) -> int:
        return ALL

    @property
    def confidence(self) -> ConfidenceBefore:
        return ConfidenceBefore(0.0)
