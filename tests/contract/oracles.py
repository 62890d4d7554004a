"""HSD as printed (2601.05724), written literally with joint masses: the exact rule, and the
published lossy ones."""

import math

import torch
from torch import Tensor

from decoding.draft import Draft
from decoding.verification import VerdictDistribution

TINY = 1e-300


def hsd_capped(draft: Draft, p: Tensor) -> VerdictDistribution:
    """Algorithm 2, Eqs. 16-20: capped branch resampling. Exact."""
    return _distribution(
        draft, p, _capped_branches(draft, p), min(_capped_ratio(_ratios(draft, p), len(draft)), 1.0)
    )


def hsd_released(draft: Draft, p: Tensor) -> VerdictDistribution:
    """The released code: the same branches, but the full draft accepted with the uncapped min(1,
    r(1:g)). Biased."""
    return _distribution(
        draft, p, _capped_branches(draft, p), min(math.prod(_ratios(draft, p)), 1.0)
    )


def hsd_naive_single(draft: Draft, p: Tensor) -> VerdictDistribution:
    """Algorithm 1 (Eqs. 11-12), one token resampled instead of all of tau+1..g. Biased; its E[tau]
    is naive HSD's."""
    ratios = _ratios(draft, p)
    branches = []
    for t in range(len(draft)):
        mass_p, mass_q = _joint(draft, p, t)
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
        _, mass_q = _joint(draft, p, t)
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
    up, down = (
        (mass_p - mass_q).clamp(min=0).sum().item(),
        (mass_q - mass_p).clamp(min=0).sum().item(),
    )
    return up / down if down > TINY else 1.0


def _naive_coin(mass_p: Tensor, mass_q: Tensor) -> float:
    up, down = (
        (mass_p - mass_q).clamp(min=0).sum().item(),
        (mass_q - mass_p).clamp(min=0).sum().item(),
    )
    return up / max(up, down) if max(up, down) > TINY else 1.0


def _joint(draft: Draft, p: Tensor, t: int) -> tuple[float, float]:
    """P(x[1..t]), Q(x[1..t])."""
    tokens = draft.token
    return (
        math.prod(p[i][tokens[i]].item() for i in range(t)),
        math.prod(draft.q[i][tokens[i]].item() for i in range(t)),
    )


def _ratios(draft: Draft, p: Tensor) -> list[float]:
    return [(p[t][x] / draft.q[t][x]).item() for t, x in enumerate(draft.token)]
