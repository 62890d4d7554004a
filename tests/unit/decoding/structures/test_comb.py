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
        nodes = path + sum(leaves)
        reach = [prod(token[0] for token in here[:depth]) for depth in range(path + 1)]
        offers = []  # worth less the draft's time, the token that gets a leaf
        if path < limit:
            offers.append((reach[path] * here[path - 1][1] - rate * cost.draft, -1))
        for depth in range(path):
            first, _, second, third = here[depth]
            if leaves[depth] < 2:
                chance = [second, (1 - second) * third][leaves[depth]]
                offers.append((reach[depth] * (1 - first) * chance, depth))
        gain, place = max(offers, default=(-1.0, -1))
        if gain < rate * row_seconds(cost, budget)[nodes]:
            break
        if place < 0:
            path += 1
        else:
            leaves[place] += 1
    return path, leaves


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("budget", [1, 5, 18])
@pytest.mark.parametrize("rate", [0.1, 0.4])
def test_the_best_draw_goes_first(name: str, budget: int, rate: float) -> None:
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
    found = grow(worth.up_to(0), limit, cost, 0.4, 18)
    least = 0.4 * (cost.draft + row_seconds(cost, 1)[0])
    willing = np.logical_and.accumulate(worth.further > least, axis=-1).sum(-1).clip(min=1)
    assert np.array_equal(found.path, np.minimum(willing, limit)) and found.leaves.sum() == 0


def test_a_row_costs_what_it_does_on_the_way_to_a_larger_draft() -> None:
    steps = cost_table(1.0, {1: 5.0, 2: 6.0, 5: 6.0, 6: 8.0})
    assert row_seconds(steps, 5).tolist() == [0.25, 0.0, 0.0, 0.0, 2.0]


def test_rows_that_nobody_measured_are_not_free() -> None:
    measured = cost_table(1.0, {1: 5.0, 3: 7.0})
    assert row_seconds(measured, 6).tolist() == [1.0] * 6


def test_nodes_are_counted() -> None:
    comb = Comb(np.array([[2]]), np.array([[[2, 1, 0]]]))
    assert comb.nodes.tolist() == [[5]]
