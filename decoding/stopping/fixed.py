"""A fixed number of draft tokens per round."""

from collections.abc import Sequence
from typing import Annotated

import numpy as np

from decoding.draft_tree import DraftStep
from decoding.stopping.base import TunableRule
from decoding.stopping.policy import NEVER, Policy
from decoding.stopping.rollout_table import RolloutTable
from runtime.settings.kinds import DraftLength


class Fixed(TunableRule):
    """Stop after `gamma` tokens (Leviathan et al. 2023)."""

    setting = "gamma"
    calls_cost = False

    def __init__(self, gamma: Annotated[DraftLength, "tokens of a draft"]) -> None:
        super().__init__()
        self.gamma = gamma

    def should_stop(self, step: DraftStep) -> bool:
        return step.count >= self.gamma

    def policy(self, table: RolloutTable) -> Policy:
        """Return the policy: with c tokens drawn, the rule stops if c + 1 exceeds gamma."""
        return Policy(-np.arange(1.0, table.gamma + 1)[None, None], sign=-1, first=NEVER)

    def grid(self, points: int, gamma_max: int) -> Sequence[float]:
        return range(1, gamma_max + 1)
