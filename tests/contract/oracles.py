"""What rules are held against: HSD as printed (2601.05724), written literally with joint masses,
the exact rule and the published lossy ones; and what no engine can afford, the most that a lossless
rule can accept (naive HSD needs target calls beyond the one that verified the draft)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from decoding.draft import Draft
from decoding.verification import VerdictDistribution

TINY = 1e-300


def hsd_capped(draft: Draft, p: Tensor) -> VerdictDistribution:
    """Algorithm 2, Eqs. 16-20: capped branch resampling. Exact."""
    full = _capped_ratio(_ratios(draft, p), len(draft))
    return _distribution(draft, p, _capped_branches(draft, p), min(full, 1.0))


def hsd_released(draft: Draft, p: Tensor) -> VerdictDistribution:
    """The released code: the same branches, but the full draft accepted with the uncapped min(1,
    r(1:g)). Biased."""
    full = math.prod(_ratios(draft, p))
    return _distribution(draft, p, _capped_branches(draft, p), min(full, 1.0))


def hsd_naive_single(draft: Draft, p: Tensor) -> VerdictDistribution:
    """Algorithm 1 (Eqs. 11-12), one token resampled instead of all of tau+1..g. Biased; its E[tau]
    is naive HSD's."""
    ratios = _ratios(draft, p)
    branches = []
    for t in range(len(draft)):
        mass_p, mass_q = _masses(draft, p, t)
        branches.append((mass_p * p[t], mass_q * draft.q[t]))
    coins = [_naive_coin(*branch) for branch in branches]
    return _distribution(draft, p, branches, min(math.prod(ratios), 1.0), coins)


def _distribution(
    draft: Draft,
    p: Tensor,
    branches: list[tuple[Tensor, Tensor]],
    full: float,
    coins: list[float] | None = None,
) -> VerdictDistribution:
    """branches[t] = (target-side mass, draft-side mass) of x[1..t] v for every v; `full` = h_g."""
    coins = [*(coins or [_capped_coin(*branch) for branch in branches]), full]
    coins[0] = 1.0
    end, failed = torch.zeros(len(coins), dtype=torch.float64), 1.0
    for t in reversed(range(len(coins))):
        end[t] = failed * coins[t]
        failed *= 1 - coins[t]

    def residual(row: int) -> Tensor:
        if row == len(draft):
            return p[row]
        excess = (branches[row][0] - branches[row][1]).clamp(min=0)
        return excess / excess.sum() if excess.sum() > 0 else p[row]

    return VerdictDistribution(end, residual)


def _capped_branches(draft: Draft, p: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(r*(x[1..t] v) Q(x[1..t] v), Q(x[1..t] v)) for every t < g and v; the cap includes index t
    itself."""
    ratios = _ratios(draft, p)
    branches = []
    for t in range(len(draft)):
        best = _best(ratios, t + 1)
        prefix = min(math.prod(ratios[:best]), 1.0) * math.prod(ratios[best:t])
        _, mass_q = _masses(draft, p, t)
        branches.append((prefix * mass_q * p[t], mass_q * draft.q[t]))
    return branches


def _capped_ratio(ratios: list[float], t: int) -> float:
    """r*(t)."""
    best = _best(ratios, t)
    return min(math.prod(ratios[:best]), 1.0) * math.prod(ratios[best:t])


def _best(ratios: list[float], t: int) -> int:
    """m(t) = argmax over 1 <= i < t of r(1:i), or 0 if that maximum is <= 1."""
    joint = [math.prod(ratios[:i]) for i in range(1, t)]
    return joint.index(max(joint)) + 1 if joint and max(joint) > 1 else 0


def _capped_coin(mass_p: Tensor, mass_q: Tensor) -> float:
    up, down = _divergences(mass_p, mass_q)
    return up / down if down > TINY else 1.0


def _naive_coin(mass_p: Tensor, mass_q: Tensor) -> float:
    up, down = _divergences(mass_p, mass_q)
    return up / max(up, down) if max(up, down) > TINY else 1.0


def _divergences(mass_p: Tensor, mass_q: Tensor) -> tuple[float, float]:
    difference = mass_p - mass_q
    return difference.clamp(min=0).sum().item(), (-difference).clamp(min=0).sum().item()


def _masses(draft: Draft, p: Tensor, t: int) -> tuple[float, float]:
    """P(x[1..t]), Q(x[1..t])."""
    tokens = draft.token
    return (
        math.prod(p[i][tokens[i]].item() for i in range(t)),
        math.prod(draft.q[i][tokens[i]].item() for i in range(t)),
    )


def _ratios(draft: Draft, p: Tensor) -> list[float]:
    return [(p[t][x] / draft.q[t][x]).item() for t, x in enumerate(draft.token)]


Tokens = tuple[int, ...]
Conditional = Callable[[Tokens], Tensor]
"""Tokens since the last committed one -> [V] float64, the distribution of the next token."""


@dataclass(frozen=True)
class NaiveHSD:
    """end_prob: [g + 1] float64, probability of each accepted length; distribution: of the g tokens
    of the round, resampled after the accepted ones."""

    end_prob: Tensor
    distribution: dict[Tokens, float]


def naive_hsd(draft: Sequence[int], p: Conditional, q: Conditional) -> NaiveHSD:
    """HSD without capping (2601.05724, Algorithm 1, Eqs. 11-12), with all of its recursive
    resampling.

    Scan backward, h_g = min(1, r(1:g)), h_t = D+ / max(D+, D-) with the branch divergences D+- of
    the joint masses below the prefix, h_0 = 1; then every position after the accepted ones is drawn
    from norm([P(c v) - Q(c v)]+). Its expected length is the largest of all rules here, paid for by
    target calls on prefixes no draft contained."""
    draft = tuple(draft)
    coins = [_naive_coin(*_joint(draft[:t], p, q)) for t in range(len(draft))]
    ratios = [float(p(draft[:t])[x] / q(draft[:t])[x]) for t, x in enumerate(draft)]
    coins.append(min(1.0, math.prod(ratios)))
    coins[0] = 1.0
    end_prob = torch.zeros(len(coins), dtype=torch.float64)
    distribution, failed = dict[Tokens, float](), 1.0
    for t in reversed(range(len(coins))):
        end_prob[t] = failed * coins[t]
        failed *= 1 - coins[t]
        _resample(distribution, draft[:t], float(end_prob[t]), len(draft), p, q)
    return NaiveHSD(end_prob, distribution)


def _resample(
    distribution: dict[Tokens, float],
    prefix: Tokens,
    weight: float,
    length: int,
    p: Conditional,
    q: Conditional,
) -> None:
    if weight <= 0:
        return
    if len(prefix) == length:
        distribution[prefix] = distribution.get(prefix, 0.0) + weight
        return
    mass_p, mass_q = _joint(prefix, p, q)
    excess = (mass_p - mass_q).clamp(min=0)
    residual = excess / excess.sum() if excess.sum() > 0 else p(prefix)
    for token, share in enumerate(residual.tolist()):
        _resample(distribution, (*prefix, token), weight * share, length, p, q)


def _joint(prefix: Tokens, p: Conditional, q: Conditional) -> tuple[Tensor, Tensor]:
    """P(prefix v) and Q(prefix v) for every v, [V] each."""
    mass_p, mass_q = (
        math.prod(float(distribution(prefix[:t])[x]) for t, x in enumerate(prefix))
        * distribution(prefix)
        for distribution in (p, q)
    )
    return mass_p, mass_q


def transport_minimum_cut(p: Tensor, pairs: Tensor) -> float:
    """The same value as min over sets S of p(S) + pairs(not inside S), by trying all 2^V sets."""
    best = math.inf
    for members in product((0.0, 1.0), repeat=len(p)):
        inside = p.new_tensor(members)
        best = min(best, float(inside @ p + pairs.sum() - inside @ pairs @ inside))
    return best
