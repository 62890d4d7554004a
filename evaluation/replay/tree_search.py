"""Which static tree pays best: Sequoia's acceptance vector, its dynamic programme, and the choice
of size and depth.

A tree is a list of parent rows, of rows 1, 2, ...; row 0 is the last committed token. It has `rows`
= nodes + 1 rows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from decoding.picking import draw

RowCost = Callable[[int], float]
"""Number of rows -> seconds of one forward."""


def sibling_acceptance(p: Tensor, q: Tensor, width: int, generator: torch.Generator) -> Tensor:
    """[n, width] float64: the probability that child b is the accepted one, children drawn without
    replacement.

    p, q: [n, V], target and draft distributions at n positions. Given the children before it, all
    rejected, child b is accepted with probability sum min(R, D), where R is the target's residual
    and D what is left of q. That factor is exact; the rejected children are drawn, from their
    distribution norm([D - R]+). So every entry is unbiased, and the first one exact."""
    residual, left = p.double(), q.double()
    reached = torch.ones(len(p), dtype=torch.float64)
    columns = []
    for _ in range(width):
        columns.append(reached * torch.minimum(residual, left).sum(-1))
        reached = reached - columns[-1]
        rejected = (left - residual).clamp_(min=0)
        token = draw(_unless_empty(rejected, left), generator)[:, None]
        residual = _normalised((residual - left).clamp_(min=0))
        left = _normalised(left.scatter(-1, token, 0.0))
    return torch.stack(columns, dim=-1).clamp_(min=0)


def _unless_empty(distribution: Tensor, other: Tensor) -> Tensor:
    """Rows of `other`, or of nothing but ones, where `distribution` is empty: what happens there
    has probability 0."""
    for instead in (other, torch.ones_like(distribution)):
        distribution = torch.where(distribution.sum(-1, keepdim=True) > 0, distribution, instead)
    return distribution


def _normalised(distribution: Tensor) -> Tensor:
    """Rows that sum to one; empty ones stay empty."""
    return distribution / distribution.sum(-1, keepdim=True).clamp(
        min=torch.finfo(distribution.dtype).tiny
    )


class Programme:
    """Most expected tokens of a tree, by dynamic programming over rows, depth and children
    (Sequoia, 2402.12374).

    acceptance: [B], a_b. `value[m, l]` is the largest expected number of tokens (accepted ones and
    the one after them) of a tree with exactly m rows and at most l layers below its root; -inf
    where there is none."""

    def __init__(self, acceptance: Sequence[float], most_rows: int, most_depth: int) -> None:
        self.acceptance = acceptance
        shape = (most_rows + 1, most_depth + 1, len(acceptance) + 1)
        self._table = np.full(shape, -np.inf)  # [m, l, b]: with b children at the root
        self._table[1, :, 0] = 1
        for depth, b, rows in product(range(1, shape[1]), range(1, shape[2]), range(2, shape[0])):
            self._table[rows, depth, b] = self._splits(rows, depth, b).max()

    @property
    def value(self) -> np.ndarray:
        return self._table.max(-1)

    def tree(self, rows: int, depth: int) -> list[int]:
        """Parents of a best tree, in depth-first order."""
        return list(self._parents(rows, depth, int(self._table[rows, depth].argmax()), 0))

    def _splits(self, rows: int, depth: int, b: int) -> np.ndarray:
        """[m - 1], the value for each number of rows y = 1 .. m - 1 left to the root and its first
        b - 1 children."""
        last = self._table[1:rows, depth - 1].max(-1)[::-1]
        gained = np.where(
            np.isneginf(last), -np.inf, self.acceptance[b - 1] * np.maximum(last, 0)
        )  # 0 * -inf is NaN
        return self._table[1:rows, depth, b - 1] + gained

    def _parents(self, rows: int, depth: int, b: int, root: int) -> Iterator[int]:
        if b == 0:
            return
        before = int(self._splits(rows, depth, b).argmax()) + 1
        yield from self._parents(before, depth, b - 1, root)
        yield root
        last = rows - before
        children = int(self._table[last, depth - 1].argmax())
        yield from self._parents(last, depth - 1, children, root + before)


def expected_tokens(parents: Sequence[int], acceptance: Sequence[float]) -> float:
    """Of a round with this tree: the sum over rows of the product of a_b along their paths."""
    reached, children = [1.0], [0] * (len(parents) + 1)
    for parent in parents:
        reached.append(reached[parent] * acceptance[children[parent]])
        children[parent] += 1
    return sum(reached)


def layer_rows(parents: Sequence[int]) -> list[int]:
    """Rows the draft runs on to draw each layer: those that have children, by depth."""
    depth = [0]
    for parent in parents:
        depth.append(depth[parent] + 1)
    inner = [depth[row] for row in set(parents)]
    return [inner.count(layer) for layer in range(max(depth))]


@dataclass(frozen=True)
class Plan:
    """A tree and what it promises. seconds_per_token: modelled, (draft calls + target call) /
    expected_tokens."""

    parents: list[int]
    depth: int
    expected_tokens: float
    seconds_per_token: float

    @property
    def nodes(self) -> int:
        return len(self.parents)


def best_plans(programme: Programme, draft_cost: RowCost, target_cost: RowCost) -> list[Plan]:
    """The fastest depth for every number of nodes that has a tree."""
    value = programme.value
    plans = []
    for rows in range(2, value.shape[0]):
        depths = [
            depth
            for depth in range(1, value.shape[1])
            if value[rows, depth] > value[rows, depth - 1]
        ]
        found = [
            _plan(programme.tree(rows, depth), programme.acceptance, draft_cost, target_cost)
            for depth in depths
        ]
        plans += [min(found, key=lambda plan: plan.seconds_per_token)] if found else []
    return plans


def _plan(
    parents: list[int], acceptance: Sequence[float], draft_cost: RowCost, target_cost: RowCost
) -> Plan:
    layers = layer_rows(parents)
    tokens = expected_tokens(parents, acceptance)
    seconds = sum(map(draft_cost, layers)) + target_cost(len(parents) + 1)
    return Plan(parents, len(layers), tokens, seconds / tokens)
