"""Stop once the draft as a whole is unlikely to be accepted, as far as the draft model knows."""

from collections.abc import Sequence
from typing import Annotated

import numpy as np

from decoding.draft_tree import DraftStep
from decoding.stopping.base import TunableRule
from decoding.stopping.policy import Policy, lowest, seen_later
from decoding.stopping.rollout_table import RolloutTable
from runtime.settings.kinds import Probability


class Product(TunableRule):
    """Stop after drawing a token where the probabilities of all tokens drawn so far, multiplied,
    are below `threshold`.

    They are the draft's at temperature 1, before filters, as those of the rule that looks at the
    last token alone. A token counts only if all before it are accepted, so their product is the
    better guess of what the next one is worth."""

    value_says = "product of the draft's confidence up to here"

    def __init__(
        self,
        threshold: Annotated[
            Probability, "a draft ends where its tokens together are less probable than this"
        ],
    ) -> None:
        super().__init__()
        self.threshold = threshold

    def should_stop(self, step: DraftStep) -> bool:
        if step.count == 0:
            return False
        before = self.predicted[-1] if step.count > 1 else 1.0
        self.predicted.append(before * step.drawn_unwarped_q())
        return self.predicted[-1] < self.threshold

    def policy(self, table: RolloutTable) -> Policy:
        """Return the policy: the rule reads the drawn tokens, so never before the first."""
        return Policy(lowest(seen_later(table.confidence.cumprod(-1), 1)), first=1)

    def grid(self, points: int, gamma_max: int) -> Sequence[float]:
        """Return thresholds, the closer together the smaller: a long draft has a small product."""
        return (np.linspace(0, 1, points + 1) ** 5).tolist()
