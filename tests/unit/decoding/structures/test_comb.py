"""Which draws a comb consists of, against drawing one at a time."""

from math import prod

import numpy as np
import pytest
import torch

from decoding.cost import CostTable, cost_table
from decoding.structures.comb import Comb, Worth, grow, row_seconds
from predictors.outcomes import Chances

SHAPE = 3, 10, 6  # prompts, positions, tokens
COSTS = {
    "flat": cost_table(1.0, 5.0),
    "linear": cost_table(1.0, {1: 5.0, 100: 15.0}),
    "steps": cost_table(1.0, {1: 5.0, 4: 5.2, 5: 7.0, 9: 7.0}),
}


def chances(seed: int = 0) -> Chances:
    logits = torch.randn(*SHAPE, 5, generator=torch.Generator().manual_seed(seed)) * 1.5
    return Chances.of((logits + torch.tensor([0, 0, 0, 1.0, 2.0])).softmax(-1).double())


def limits() -> np.ndarray:
    return np.random.default_rng(0).integers(0, SHAPE[-1] + 1, SHAPE[:-1])


def one_by_one(
    here: list[list[float]], limit: int, cost: CostTable, rate: float, budget: int
) -> tuple[int, list[int]]:
    """here: [G][4], first, following, second and third of each token. Path and leaves."""
    path, leaves = min(limit, 1), [0] * SHAPE[-1]
    while 0 < path < budget - sum(leaves):
        row = cost.target(path + sum(leaves) + 2) - cost.target(path + sum(leaves) + 1)
        reach = [prod(token[0] for token in here[:depth]) for depth in range(path + 1)]
        offers = [(0.0, 1.0, -1)]  # worth, seconds, the token that gets a leaf
        if path < limit:
            offers.append((reach[path] * here[path - 1][1], cost.draft + row, -1))
        for depth in range(path):
            first, _, second, third = here[depth]
            left = reach[depth] * (1 - first)
            if leaves[depth] < 2:
                offers.append((left * [second, (1 - second) * third][leaves[depth]], row, depth))
        worth, seconds, place = max(
            offers, key=lambda offer: (offer[0] / max(offer[1], 1e-12), -offer[2])
        )
        if worth <= rate * seconds:
            break
        if place < 0:
            path += 1
        else:
            leaves[place] += 1
    return path, leaves


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("budget", [1, 5, 18])
@pytest.mark.parametrize("rate", [0.1, 0.4])
def test_the_best_ratio_goes_first(name: str, budget: int, rate: float) -> None:
    said, cost = chances(), COSTS[name]
    rows = torch.stack([said.first, said.following, said.second, said.third], -1).tolist()
    found = grow(Worth.of(said), limits(), cost, rate, budget)
    for (batch, place), limit in np.ndenumerate(limits()):
        path, leaves = one_by_one(rows[batch][place], int(limit), cost, rate, budget)
        assert (found.path[batch, place], found.leaves[batch, place].tolist()) == (path, leaves)
    assert len(np.unique(found.nodes)) > 2 or budget == 1
    assert (found.nodes <= budget).all() and (found.path <= limits()).all()


def test_dear_rows_make_a_chain_and_free_ones_a_wide_tree() -> None:
    worth, limit = Worth.of(chances()), np.full(SHAPE[:2], SHAPE[-1])
    sizes = [
        grow(worth, limit, cost_table(1.0, {1: 5.0, 100: 5.0 + 99 * row}), 0.3, 18).leaves.sum()
        for row in (0.0, 0.1, 0.5, 3.0)
    ]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[1] > sizes[2] > sizes[3] == 0


def test_a_chain_ends_where_the_next_token_is_not_worth_its_time() -> None:
    worth, limit, cost = Worth.of(chances()), limits(), COSTS["linear"]
    found = grow(worth.chain(), limit, cost, 0.4, 18)
    least = 0.4 * (cost.draft + row_seconds(cost, 1)[0])
    willing = np.logical_and.accumulate(worth.further > least, axis=-1).sum(-1).clip(min=1)
    assert np.array_equal(found.path, np.minimum(willing, limit)) and found.leaves.sum() == 0


def test_nodes_are_counted() -> None:
    comb = Comb(np.array([[2]]), np.array([[[2, 1, 0]]]))
    assert comb.nodes.tolist() == [[5]]
