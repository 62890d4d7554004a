"""AdaEDL: stop before drawing where the entropy of the draft bounds its acceptance too low."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.draft import RoundContext, Verdict
from decoding.draft_tree import DraftStep
from runtime.errors import UserError


class AdaEDL:
    """Stop when 1 - sqrt(kappa * H) < threshold, H the entropy of the draft in nats (from 1 - TV >=
    1 - sqrt(KL / 2)).

    The threshold follows the acceptance rate: up by `step` while its running mean is below
    `target_rate`, down otherwise (but not after a round that accepted everything), both through
    exponential averages with weights `rate_memory` and `threshold_memory`. It starts afresh with
    every request. Agrawal et al. 2024 (2410.18351)."""

    draft_layers: Sequence[int] = ()
    target_layers: Sequence[int] = ()

    def __init__(
        self,
        threshold: float,
        kappa: float,
        target_rate: float,
        step: float,
        rate_memory: float,
        threshold_memory: float,
    ) -> None:
        if not kappa > 0:
            raise UserError(f"stop.kappa: {kappa} must be positive. The published value is 0.2")
        self.first_threshold = threshold
        self.kappa = kappa
        self.target_rate = target_rate
        self.step = step
        self.rate_memory = rate_memory
        self.threshold_memory = threshold_memory
        self.predicted: list[float] = []
        self._start()

    def begin_round(self, context: RoundContext) -> None:
        self.predicted = []
        if context.round == 0:
            self._start()

    def should_stop(self, step: DraftStep) -> bool:
        self.predicted.append(1 - math.sqrt(self.kappa * entropy(step.unwarped_q())))
        return self.predicted[-1] < self.threshold

    def end_round(self, verdict: Verdict) -> None:
        if verdict.drafted == 0:
            return
        self.rate += (1 - self.rate_memory) * (verdict.accepted / verdict.drafted - self.rate)
        if self.rate < self.target_rate:
            self.threshold += (1 - self.threshold_memory) * self.step
        elif verdict.accepted < verdict.drafted:
            self.threshold -= (1 - self.threshold_memory) * self.step

    def _start(self) -> None:
        self.threshold = self.first_threshold
        self.rate = self.target_rate


def entropy(probs: Tensor) -> float:
    """Of one distribution [V], in nats; 0 log 0 = 0."""
    smallest = torch.finfo(probs.dtype).tiny
    return max(0.0, -torch.dot(probs, probs.clamp(min=smallest).log()).item())
