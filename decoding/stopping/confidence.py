"""Stop where the draft is unsure: two exact forms of SpecBranch's rule. Dropping the unsure token
would be biased.

Confidence is the draft's probability at temperature 1 before filtering, so one threshold serves
every warp, and a greedy draft (whose sampling distribution is always certain) can still be unsure.
"""

from collections.abc import Sequence

from decoding.draft import RoundContext, Verdict
from decoding.draft_tree import DraftStep
from runtime.errors import UserError


class DrawnConfidence:
    """Stop after drawing a token whose probability is below `threshold`; the token stays in the
    draft."""

    draft_layers: Sequence[int] = ()
    target_layers: Sequence[int] = ()

    def __init__(self, threshold: float) -> None:
        self.threshold = _checked(threshold)
        self.predicted: list[float] = []

    def begin_round(self, context: RoundContext) -> None:
        self.predicted = []

    def should_stop(self, step: DraftStep) -> bool:
        if step.count == 0:
            return False
        self.predicted.append(step.drawn_unwarped_q())
        return self.predicted[-1] < self.threshold

    def end_round(self, verdict: Verdict) -> None:
        pass


class PredictableConfidence:
    """Stop before drawing where no token has probability `threshold`: decided by the prefix
    alone."""

    draft_layers: Sequence[int] = ()
    target_layers: Sequence[int] = ()

    def __init__(self, threshold: float) -> None:
        self.threshold = _checked(threshold)
        self.predicted: list[float] = []

    def begin_round(self, context: RoundContext) -> None:
        self.predicted = []

    def should_stop(self, step: DraftStep) -> bool:
        self.predicted.append(step.unwarped_q().max().item())
        return self.predicted[-1] < self.threshold

    def end_round(self, verdict: Verdict) -> None:
        pass


def _checked(threshold: float) -> float:
    if not 0 <= threshold <= 1:
        raise UserError(
            f"stop.threshold: {threshold} is no probability. Give a number from 0 (never stop) to 1"
        )
    return threshold
