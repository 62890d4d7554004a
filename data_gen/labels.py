"""Labels: how likely, and how far, the target accepts what the draft proposes. Pure functions of
distributions and tokens."""

from collections.abc import Collection

import torch
from torch import Tensor


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p / q) for probabilities p, q (q > 0) of the same drawn tokens: SpecDec++'s soft label
    (2405.19715)."""
    return (p / q).clamp(max=1.0)


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """sum_v min(p, q) of distributions [..., V]: the probability that one draw from q is accepted,
    [...]."""
    return torch.minimum(p, q).sum(-1)


def greedy_acceptance(rollouts: Tensor, response: Tensor, anchors: Tensor) -> Tensor:
    """Acceptance of rollouts under a greedy target, whose verdicts the response itself contains.

    rollouts: [A, gamma], row a drafted from response position anchors[a]; response: [T]. Returns
    float32 [A, gamma]: 1 while the rollout agrees with the response, 0 from the first difference
    (or the end of the response) on."""
    gamma = rollouts.shape[1]
    padded = torch.cat([response, response.new_full((gamma,), -1)])
    agrees = rollouts == padded.unfold(0, gamma, 1)[anchors]
    return agrees.int().cumprod(1).float()


def drafted_length(rollouts: Tensor, eos_ids: Collection[int]) -> Tensor:
    """Tokens of each rollout [A, gamma] a decoder would draft: all, or up to and including the
    first end token. [A]"""
    ends = torch.isin(
        rollouts, torch.tensor(sorted(eos_ids), dtype=rollouts.dtype, device=rollouts.device)
    )
    before_end = (ends.cumsum(1) - ends.int()) == 0
    return before_end.sum(1)


def accepted_length(accept_prob: Tensor, uniform: Tensor, drafted: Tensor) -> Tensor:
    """Token-wise verdict (2211.17192): tokens accepted before the first u >= min(1, p / q), at most
    `drafted`.

    accept_prob, uniform: [A, gamma]; drafted: [A]. Returns int64 [A].
    """
    depth = torch.arange(accept_prob.shape[1], device=accept_prob.device)
    accepted = (uniform < accept_prob) & (depth < drafted[:, None])
    return accepted.int().cumprod(1).sum(1)


def known_depth(anchors: Tensor, length: int, gamma: int) -> Tensor:
    """Tokens of each rollout whose verdict a cut greedy response of `length` tokens contains, at
    most gamma. [A]"""
    return (length - anchors).clamp(max=gamma)
