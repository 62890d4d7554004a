"""Stop after a token the draft is unsure of: SpecBranch's rule in a form that is exact.

The unsure token stays in the draft; to drop it would be biased."""

from typing import Annotated

from decoding.draft import RoundContext
from decoding.draft_tree import DraftStep
from decoding.stopping.base import TunableRule
from decoding.stopping.confidence_before import ConfidenceBefore
from decoding.stopping.policy import SOME, Policy, lowest, seen_later
from decoding.stopping.rollout_table import RolloutTable
from runtime.settings.kinds import Probability


class Confidence(TunableRule):
    """Stop after drawing a token whose probability is below `threshold`.

    The probability is the draft's at temperature 1, before filters: so one threshold serves every
    warp, and a greedy draft (whose sampling distribution is always certain) can still be unsure."""

    value_says = "draft's confidence"
    keeps_unsure = True
    trained_gamma = None
    trained_age = 0

    def __init__(
        self,
        threshold: Annotated[Probability, "a draft ends after a token less probable than this"],
    ) -> None:
        super().__init__()
        self.threshold = threshold

    def should_stop(self, step: DraftStep) -> bool:
        if step.count == 0:
            return False
        self.predicted.append(step.drawn_unwarped_q())
        return self.predicted[-1] < self.threshold

    def policy(self, table: RolloutTable) -> Policy:
        """Return the policy: the rule reads the token drawn last, so never before the first."""
        return Policy(lowest(seen_later(table.confidence, 1)), first=1)

    # In an overlapped engine

    def classify(self, context: RoundContext) -> int:
        return SOME

    @property
    def confidence(self) -> "Confidence":
        return self

    def before_drawing(self) -> ConfidenceBefore:
        return ConfidenceBefore(self.threshold)
