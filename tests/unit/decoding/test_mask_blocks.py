import random

import pytest
import torch

from decoding.draft import RoundContext, depth_first
from decoding.draft_tree import DraftTree
from decoding.models.table_lm import TableLM, random_table
from decoding.sampling import Warp, without_replacement
from decoding.structures.dyspec import DySpecHeap
from decoding.structures.mask_blocks import breadth_first, heavy_path, mask_blocks
from decoding.trace import Stopwatch


def counted(parents: list[int], order: list[int], prefix: int, block: int) -> int:
    """Entry by entry."""
    place = {row: number for number, row in enumerate(order)}
    found = set()
    for row in order:
        seen = [*range(prefix)]
        above = row
        while above >= 0:
            seen.append(prefix + place[above])
            above = parents[above - 1] if above else -1
        found |= {(place[row] // block, column // block) for column in seen}
    return len(found)


def random_parents(nodes: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(row) for row in range(1, nodes + 1)]


@pytest.mark.parametrize(
    ("nodes", "prefix", "block"), [(0, 5, 4), (7, 0, 4), (20, 9, 4), (70, 33, 32), (31, 0, 32)]
)
def test_blocks_are_counted(nodes: int, prefix: int, block: int) -> None:
    parents = random_parents(nodes, nodes)
    orders = (order(parents) for order in (depth_first, breadth_first, heavy_path))
    for order in (list(range(nodes + 1)), *orders):
        assert mask_blocks(parents, order, prefix, block) == counted(parents, order, prefix, block)


def test_orders_of_a_small_tree() -> None:
    """1 and 2 below the root, 3 and 4 below 2, 5 below 1, 6 below 4."""
    parents = [0, 0, 2, 2, 1, 4]
    assert depth_first(parents) == [0, 1, 5, 2, 3, 4, 6]
    assert breadth_first(parents) == [0, 1, 2, 3, 4, 5, 6]
    assert breadth_first([0, 1, 0]) == [0, 1, 3, 2]
    assert heavy_path(parents) == [0, 2, 4, 6, 3, 1, 5], "the larger subtree first"
    assert heavy_path([0, 0, 0]) == [0, 1, 2, 3], "of equal ones the first that was added"
    assert breadth_first([]) == heavy_path([]) == [0]


@pytest.mark.parametrize("seed", range(3))
def test_a_heavy_path_goes_on_into_the_largest_subtree(seed: int) -> None:
    parents = random_parents(60, seed)
    order, size = heavy_path(parents), [1] * 61
    for row in range(60, 0, -1):
        size[parents[row - 1]] += size[row]
    assert sorted(order) == list(range(61))
    for place, row in enumerate(order):
        below = [child for child, parent in enumerate(parents, 1) if parent == row]
        assert {*order[place : place + size[row]]} >= {row, *below}, "a subtree is a run of rows"
        if below:
            assert size[order[place + 1]] == max(size[child] for child in below)


def test_a_chain_is_a_triangle() -> None:
    assert mask_blocks(list(range(63)), range(64), 0) == 3
    assert mask_blocks(list(range(63)), range(64), 128) == 3 + 2 * 4
    assert mask_blocks([], [0], 0) == 1


def dyspec_parents(nodes: int) -> list[int]:
    """In the order they were drawn."""
    committed = torch.tensor([0, 1])
    lm = TableLM(random_table(30, seed=0, concentration=0.1))
    lm.forward(committed[:-1])
    context = RoundContext(committed, max_new=100)
    tree = DraftTree(lm, context, Warp(), Stopwatch(), siblings=without_replacement)
    DySpecHeap(nodes).grow(tree)
    return tree.parent


@pytest.mark.parametrize(
    "parents", [random_parents(768, 0), dyspec_parents(768)], ids=["random", "dyspec"]
)
def test_depth_first_order_has_far_fewer_blocks(parents: list[int]) -> None:
    """DySpec reports 366 -> 218 for 768 nodes with the prefix."""
    drawn = mask_blocks(parents, range(769), prefix=128)
    ordered = mask_blocks(parents, depth_first(parents), prefix=128)
    print(f"{drawn} -> {ordered} blocks")
    assert ordered < 0.65 * drawn


def test_the_order_does_not_change_who_sees_whom() -> None:
    parents = random_parents(40, 2)
    assert mask_blocks(parents, torch.randperm(41).tolist(), 3, 1) == mask_blocks(
        parents, range(41), 3, 1
    )
