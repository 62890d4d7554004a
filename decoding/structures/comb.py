"""Growth of combs by value against cost, for all recorded rollouts at once.

A comb is a path with leaves beside its tokens: the second and third candidate of a position. One
more token of the path costs a draft forward and a row of the target's; a leaf costs a row. The
value of a draw is the probability that it is reached and accepted, i.e. the tokens it adds to the
round; its price is the tokens that its seconds give elsewhere: seconds times `rate`, tokens per
second. The draw of largest gain comes first, and the draft ends when no value exceeds its price."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from decoding.cost import CostTable
from predictors.outcomes import Chances
from predictors.survival import Survival

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
UNCALIBRATED = Survival()
LEAVES = 2  # most beside one token: `Chances` covers no more


@dataclass(frozen=True)
class Comb:
    """The combs drawn from [B, T] positions. path: [B, T], tokens of the path; leaves: [B, T, G],
    number of leaves beside each of them; 0 beyond the path."""

    path: Ints
    leaves: Ints

    @property
    def nodes(self) -> Ints:
        """Number of nodes of each comb, [B, T]."""
        return self.path + self.leaves.sum(-1)


@dataclass(frozen=True)
class Worth:
    """The value of every draw, as known when it may be made. further: [..., G], that of the path's
    token after d drawn ones; 1 for the first, which is always drawn; leaf: [..., G, 2], those of
    the leaves beside each token."""

    further: Array
    leaf: Array

    @classmethod
    def of(cls, chances: Chances, survival: Survival = UNCALIBRATED) -> "Worth":
        """Return the values. chances: [..., G], of each token of the path once it is drawn;
        survival: the map from their products to survival."""
        first, following, second, third = (
            part.double().numpy()
            for part in (chances.first, chances.following, chances.second, chances.third)
        )
        reached = np.cumprod(first, -1)
        before = np.concatenate([np.ones_like(first[..., :1]), reached[..., :-1]], -1)
        further = np.ones_like(first)
        products = torch.from_numpy(reached * following)
        further[..., 1:] = survival.of_products(products).numpy()[..., :-1]
        rejected = before * (1 - first)
        return cls(further, np.stack([rejected * second, rejected * (1 - second) * third], -1))

    def up_to(self, leaves: int) -> "Worth":
        """Return the values with those of more than `leaves` leaves beside a token set to 0."""
        return Worth(self.further, np.where(np.arange(LEAVES) < leaves, self.leaf, 0.0))


def row_seconds(cost: CostTable, budget: int) -> Array:
    """Return the seconds of one more row of the target's forward for a draft of 0, 1, ... nodes,
    [budget]: the lowest mean price of the rows up to any larger draft, since the time of a call may
    rise in steps; never below 0."""
    seconds = cost.target.of(np.arange(1, budget + 2))
    prices = np.zeros(budget)
    for nodes in range(budget):
        more = np.arange(nodes + 1, budget + 1)
        prices[nodes] = ((seconds[more] - seconds[nodes]) / (more - nodes)).min()
    return prices.clip(min=0)


def grow(worth: Worth, limit: Ints, cost: CostTable, rate: float, budget: int) -> Comb:
    """Grow a comb from each position.

    limit: [B, T], most tokens of the path; rate: tokens per second (the unit of `cost`) that a draw
    must beat; budget: most nodes"""
    depth = worth.further.shape[-1]
    further, longest = worth.further.reshape(-1, depth), np.minimum(limit, budget).ravel()
    leaf = np.zeros((len(further), depth, LEAVES + 1))  # none after the last one
    leaf[..., :LEAVES] = worth.leaf.reshape(-1, depth, LEAVES)
    forward, row = rate * cost.draft, rate * row_seconds(cost, budget)
    path, leaves = np.minimum(longest, 1), np.zeros((len(further), depth), np.int64)
    live = np.flatnonzero((path > 0) & (path < budget))
    while len(live):
        drawn = path[live]
        beside = np.take_along_axis(leaf[live], leaves[live][..., None], -1)[..., 0]
        beside *= np.arange(depth) < drawn[:, None]
        place = beside.argmax(-1)
        deep = np.where(drawn < longest[live], further[live, np.minimum(drawn, depth - 1)], 0)
        wide = beside[np.arange(len(live)), place]
        gain = np.maximum(deep - forward, wide)
        deepens = (deep > 0) & (deep - forward == gain)
        worthy = (gain >= row[drawn + leaves[live].sum(-1)]) & (deepens | (wide > 0))
        live, deepens, place = live[worthy], deepens[worthy], place[worthy]
        path[live[deepens]] += 1
        leaves[live[~deepens], place[~deepens]] += 1
        live = live[path[live] + leaves[live].sum(-1) < budget]
    return Comb(path.reshape(limit.shape), leaves.reshape(*limit.shape, depth))
