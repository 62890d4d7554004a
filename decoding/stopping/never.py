"""No stop rule: the structure's own size ends the draft."""

from collections.abc import Sequence

from decoding.draft import RoundContext, Verdict
from decoding.draft_tree import DraftStep
from decoding.stopping.confidence_before import ConfidenceBefore
from decoding.stopping.policy import ALL


class Never:
    """Never stop. What structures that do not ask a rule (trees, lookup) go with."""

    draft_layers: Sequence[int] = ()
    target_layers: Sequence[int] = ()
    trained_gamma: int | None = None
    trained_age = 0
    stops_never = True

    def __init__(self) -> None:
        self.predicted: list[float] = []

    def begin_round(self, context: RoundContext) -> None:
        pass

    def should_stop(self, step: DraftStep) -> bool:
        return False

    def end_round(self, verdict: Verdict) -> None:
        pass

    # In an overlapped engine

    def classify(self, context: RoundContext) -> int:
        return ALL

    @property
    def confidence(self) -> ConfidenceBefore:
        return ConfidenceBefore(0.0)
