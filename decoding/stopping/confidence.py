"""Stop where the draft is unsure: two exact forms of SpecBranch's rule. Dropping the unsure token would be biased.

Confidence is the draft's probability at temperature 1 before filtering, so one threshold serves every warp, and a
greedy draft (whose sampling law is always certain) can still be unsure.
"""

from decoding.draft import RoundContext, Verdict
from decoding.growth import DraftStep
from predictors.errors import UserError


class DrawnConfidence:
    """Stop after drawing a token whose probability is below `eps`; the token stays in the draft."""

    reads_hidden = None

    def __init__(self, eps: float) -> None:
        self.eps = _checked(eps)
        self.predicted: list[float] = []

    def begin_round(self, context: RoundContext) -> None:
        self.predicted = []

    def should_stop(self, step: DraftStep) -> bool:
        if step.count == 0:
            return False
        self.predicted.append(step.drawn_belief())
        return self.predicted[-1] < self.eps

    def end_round(self, verdict: Verdict) -> None:
        pass


class PredictableConfidence:
    """Stop before drawing where no token has probability `eps`: decided by the prefix alone."""

    reads_hidden = None

    def __init__(self, eps: float) -> None:
        self.eps = _checked(eps)
        self.predicted: list[float] = []

    def begin_round(self, context: RoundContext) -> None:
        self.predicted = []

    def should_stop(self, step: DraftStep) -> bool:
        self.predicted.append(step.belief().max().item())
        return self.predicted[-1] < self.eps

    def end_round(self, verdict: Verdict) -> None:
        pass


def _checked(eps: float) -> float:
    if not 0 <= eps <= 1:
        raise UserError(f"stop.eps: {eps} is no probability. Give a number from 0 (never stop) to 1")
    return eps
