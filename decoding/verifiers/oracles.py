"""What no engine can afford: the most a lossless rule can accept. For tests and documentation.

Naive HSD needs target calls beyond the one that verified the draft; optimal transport costs V^2 and
a linear program."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from scipy.optimize import linprog
from scipy.sparse import coo_matrix
from torch import Tensor

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
    coins.append(
        min(1.0, math.prod(float(p(draft[:t])[x] / q(draft[:t])[x]) for t, x in enumerate(draft)))
    )
    coins[0] = 1.0
    end_prob, distribution, failed = (
        torch.zeros(len(coins), dtype=torch.float64),
        dict[Tokens, float](),
        1.0,
    )
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


def _naive_coin(mass_p: Tensor, mass_q: Tensor) -> float:
    up, down = ((a - b).clamp(min=0).sum().item() for a, b in ((mass_p, mass_q), (mass_q, mass_p)))
    return up / max(up, down) if max(up, down) > 0 else 1.0


def transport_optimum(p: Tensor, pairs: Tensor) -> float:
    """Largest acceptance of any lossless rule for two candidates with joint distribution `pairs`
    [V, V], by linear programming.

    Optimal transport with membership cost (SpecTr, 2310.15141): pi(i, j, y) is the mass of the pair
    (i, j) answered with y, y = i or j. Maximise the total with sum_y pi(i, j, y) <= pairs[i, j] and
    sum_ij pi(i, j, y) <= p[y]; what is left of p makes the residual distribution."""
    drawn = [(i, j) for i, j in product(range(len(p)), repeat=2) if pairs[i, j] > 0]
    columns = [(n, len(drawn) + y) for n, pair in enumerate(drawn) for y in sorted(set(pair))]
    limits = np.array([*(pairs[i, j].item() for i, j in drawn), *p.tolist()])
    rows = np.array(columns).T.ravel()
    places = np.tile(np.arange(len(columns)), 2)
    uses = coo_matrix((np.ones(len(rows)), (rows, places)), shape=(len(limits), len(columns)))
    return float(
        -linprog(-np.ones(len(columns)), A_ub=uses.tocsr(), b_ub=limits, method="highs").fun
    )


def transport_minimum_cut(p: Tensor, pairs: Tensor) -> float:
    """The same value as min over sets S of p(S) + pairs(not inside S), by trying all 2^V sets."""
    best = math.inf
    for members in product((0.0, 1.0), repeat=len(p)):
        inside = p.new_tensor(members)
        best = min(best, float(inside @ p + pairs.sum() - inside @ pairs @ inside))
    return best
