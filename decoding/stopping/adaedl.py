"""AdaEDL: stop before drawing where the entropy of the draft bounds its acceptance too low."""

import math
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from decoding.draft import RoundContext, Verdict
from decoding.draft_tree import DraftStep
from decoding.stopping.base import TunableRule
from decoding.stopping.policy import Policy, lowest
from decoding.stopping.rollout_table import RolloutTable
from runtime.settings.kinds import Probability


class AdaEDL(TunableRule):
    """Stop when 1 - sqrt(kappa * H) < threshold, H the entropy of the draft in nats (from 1 - TV >=
    1 - sqrt(KL / 2)).

    The threshold follows the acceptance rate: up by `step` while its running mean is below
    `target_rate`, down otherwise (but not after a round that accepted everything), both through
    exponential averages with weights `rate_memory` and `threshold_memory`. It starts afresh with
    every request. Agrawal et al. 2024 (2410.18351)."""

    value_says = "entropy bound on acceptance"

    level: float  # the threshold in force
    rate: float  # running mean of the acceptance rate

    def __init__(
        self,
        threshold: Annotated[
            Probability, "a draft ends where the bound is below it, at the start of a request"
        ],
        kappa: Annotated[float, Field(gt=0, le=1000), "weight of the entropy, which is in nats"],
        target_rate: Annotated[Probability, "acceptance rate that the threshold is moved towards"],
        step: Annotated[Probability, "how far a round moves the threshold, before averaging"],
        rate_memory: Annotated[Probability, "weight of earlier rounds in the acceptance rate"],
        threshold_memory: Annotated[Probability, "weight of earlier rounds in the threshold"],
    ) -> None:
        super().__init__()
        self.threshold = threshold
        self.kappa = kappa
        self.target_rate = target_rate
        self.step = step
        self.rate_memory = rate_memory
        self.threshold_memory = threshold_memory
        self.level, self.rate = self.first_state(threshold)

    def begin_round(self, context: RoundContext) -> None:
        self.predicted = []
        if context.round == 0:
            self.level, self.rate = self.first_state(self.threshold)

    def should_stop(self, step: DraftStep) -> bool:
        self.predicted.append(1 - math.sqrt(self.kappa * entropy(step.unwarped_q())))
        return self.predicted[-1] < self.level

    def end_round(self, verdict: Verdict) -> None:
        state = self.next_state((self.level, self.rate), verdict.drafted, verdict.accepted)
        self.level, self.rate = map(float, state)

    def policy(self, table: RolloutTable) -> Policy:
        bound = 1 - np.sqrt(self.kappa * table.entropy)
        return Policy(lowest(bound), ahead=True, adaptive=self)

    def first_state(self, threshold: Any) -> tuple[Any, Any]:
        """Return threshold and acceptance rate at the start of a request."""
        return threshold, self.target_rate

    def next_state(self, state: tuple[Any, ...], drafted: Any, accepted: Any) -> tuple[Any, Any]:
        """Return threshold and acceptance rate after a round, or after a round of each of many
        requests ([B] each)."""
        level, rate = state
        tested = np.greater(drafted, 0)
        share = accepted / np.maximum(drafted, 1)
        rate = np.where(tested, rate + (1 - self.rate_memory) * (share - rate), rate)
        step = (1 - self.threshold_memory) * self.step
        up, down = tested & (rate < self.target_rate), tested & np.less(accepted, drafted)
        return np.where(up, level + step, np.where(down, level - step, level)), rate


def entropy(probs: Tensor) -> float:
    """Return the entropy of one distribution [V], in nats; 0 log 0 = 0."""
    smallest = torch.finfo(probs.dtype).tiny
    return max(0.0, -torch.dot(probs, probs.clamp(min=smallest).log()).item())
