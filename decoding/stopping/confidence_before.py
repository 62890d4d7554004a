"""Stop before a token the draft would be unsure of: decided by the prefix alone."""

from typing import Annotated

from decoding.draft import RoundContext
from decoding.draft_tree import DraftStep
from decoding.stopping.base import TunableRule
from decoding.stopping.policy import SOME, Policy, lowest
from decoding.stopping.rollout_table import RolloutTable
from runtime.settings.kinds import Probability


class ConfidenceBefore(TunableRule):
    """Stop before drawing where no token has probability `threshold` (the draft's at temperature 1,
    before filters)."""

    value_says = "draft's highest probability"
    keeps_unsure = False
    trained_gamma = None
    trained_age = 0

    def __init__(
        self,
        threshold: Annotated[Probability, "a draft ends where no token is as probable as this"],
    ) -> None:
        super().__init__()
        self.threshold = threshold

    def should_stop(self, step: DraftStep) -> bool:
        self.predicted.append(step.unwarped_q().max().item())
        return self.predicted[-1] < self.threshold

    def policy(self, table: RolloutTable) -> Policy:
        return Policy(lowest(table.max_q), ahead=True)

    # In an overlapped engine

    def classify(self, context: RoundContext) -> int:
        return SOME

    @property
    def confidence(self) -> "ConfidenceBefore":
        return self

    def before_drawing(self) -> "ConfidenceBefore":
        return ConfidenceBefore(self.threshold)
