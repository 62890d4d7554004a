"""Trees while they are drawn, steps along them, and orders of their rows."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decoding.draft import Draft, RoundContext, depth_first
from decoding.draft_tree import DraftStep, DraftTree
from decoding.models.table_lm import TableLM, random_table
from decoding.picking import Draw
from decoding.sampling import Warp
from decoding.stopping.confidence import Confidence
from decoding.stopping.confidence_before import ConfidenceBefore
from decoding.stopping.fixed import Fixed
from decoding.trace import Stopwatch
from papers.dyspec.masks import breadth_first, dyspec_parents, filled, heavy_path, tree_mask

COMMITTED = torch.tensor([1, 0, 2])


def new_tree(warp: Warp | None = None, layers: Sequence[int] = ()) -> tuple[DraftTree, TableLM]:
    lm = TableLM(random_table(3, seed=4))
    lm.forward(COMMITTED[:1])
    return DraftTree(lm, RoundContext(COMMITTED, 9), warp or Warp(), Stopwatch(), layers), lm


def new_step(*given: Any, **named: Any) -> tuple[DraftStep, DraftTree, TableLM]:
    tree, lm = new_tree(*given, **named)
    return DraftStep(tree), tree, lm


def keep(tree: DraftTree, row: int, token: int) -> int:
    return tree.add(row, Draw(token, tree.q(row)[token].item()))


def push(step: DraftStep, tree: DraftTree, token: int) -> None:
    step.row = keep(tree, step.row, token)
    step.tokens.append(token)


def test_chain_and_tree_paths():
    chain = Draft([0, 1], [5, 6], torch.ones(3, 7))
    assert chain.is_chain and len(chain) == 2
    assert [chain.path(row) for row in range(3)] == [[], [5], [5, 6]]
    tree = Draft([0, 0, 1], [5, 6, 7], torch.ones(4, 8))
    assert not tree.is_chain
    assert tree.path(3) == [5, 7] and tree.path(2) == [6]


def test_draft_runs_on_what_it_missed_and_then_token_by_token():
    step, tree, lm = new_step()
    torch.testing.assert_close(step.q(), lm.distribution((1, 0, 2)))
    assert lm.length == 3
    push(step, tree, 1)
    assert lm.length == 3 and step.count == 1
    torch.testing.assert_close(step.q(), lm.distribution((2, 1)))
    assert lm.length == 4 and tree.forwards == 2


@pytest.mark.parametrize("stop", [Fixed(2), Confidence(0.0), ConfidenceBefore(0.0)])
def test_looking_costs_no_more_forwards_than_promised(stop):
    step, tree, _ = new_step()
    stop.begin_round(SimpleNamespace(round=0))
    while step.count < 3 and not step.stopped_by(stop):
        push(step, tree, 0)
    assert tree.forwards == (2 if isinstance(stop, Fixed) else 3)
    before = tree.forwards
    step.stopped_by(stop)
    assert tree.forwards == before + isinstance(stop, ConfidenceBefore)


def test_hidden_states_ahead_and_behind():
    step, tree, lm = new_step(layers=(-3, -2, -1))
    with pytest.raises(AssertionError, match="no token drawn yet"):
        step.drawn_unwarped_q()
    first = tree.hidden(0)
    assert first.shape == (3, 4) and tree.forwards == 1
    push(step, tree, 1)
    drawn = step.drawn()
    assert torch.equal(drawn.hidden_before(), first) and tree.forwards == 1
    ahead = drawn.hidden()
    assert tree.forwards == 2 and not torch.equal(ahead, first)
    parents = torch.tensor([2 - lm.length])
    again = lm.forward(torch.tensor([1]), parents, hidden=(-3, -2, -1)).hidden[:, 0]
    torch.testing.assert_close(ahead, again)


def test_belief_is_the_unwarped_draft_and_what_the_warp_leaves_out_is_not_drawn():
    step, tree, lm = new_step(Warp(0.0))
    distribution = lm.distribution((1, 0, 2))
    assert step.q().max() == 1
    torch.testing.assert_close(step.unwarped_q(), distribution)
    push(step, tree, int(distribution.argmax()))
    assert step.drawn_unwarped_q() == pytest.approx(distribution.max().item())
    step, tree, lm = new_step(Warp(0.0))
    with pytest.raises(AssertionError, match="q > 0"):
        push(step, tree, int(lm.distribution((1, 0, 2)).argmin()))


def test_tree_runs_a_layer_in_one_forward_and_sees_each_path():
    tree, lm = new_tree()
    first, second = (keep(tree, 0, token) for token in (1, 2))
    tree.run([first, second])
    distributions = [tree.q(first), tree.q(second)]
    assert tree.forwards == 2
    torch.testing.assert_close(distributions[0], lm.distribution((2, 1)))
    torch.testing.assert_close(distributions[1], lm.distribution((2, 2)))
    deep = keep(tree, second, 0)
    torch.testing.assert_close(tree.q(deep), lm.distribution((2, 0)))
    keep(tree, first, 2)
    draft = tree.draft()
    assert draft.parent == [0, 1, 0, 3] and draft.token == [1, 2, 2, 0]
    torch.testing.assert_close(draft.q[1], distributions[0])
    assert draft.q[2].eq(0).all() and draft.q[4].eq(0).all()
    assert draft.children() == [[1, 3], [2], [], [4], []]


def test_tree_settles_on_the_accepted_path_and_an_untouched_one_is_empty():
    """The cache keeps what the draft has run on; the rest is caught up by the next round."""
    for path, committed, length in [([3, 4], 6, 5), ([1, 2], 6, 4), ([1], 5, 4), ([], 4, 3)]:
        tree, lm = new_tree()
        first, second = keep(tree, 0, 1), keep(tree, 0, 2)
        tree.run([first, second])
        keep(tree, first, 2)
        tree.run([keep(tree, second, 0)])
        tree.draft()
        tree.settle(path, committed)
        assert lm.length == length
        kept = [1, 0, 2, *(tree.draft().token[row - 1] for row in path)][:length]
        following = lm.forward(torch.tensor([1])).logits[0].exp()
        torch.testing.assert_close(following, lm.distribution((*kept, 1)))
    tree, lm = new_tree()
    assert len(tree.draft()) == 0 and len(tree.draft().q) == 1
    tree.settle([], 4)
    assert lm.length == 1


def random_parents(nodes: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(row) for row in range(1, nodes + 1)]


def blocks(parents: list[int], order: Sequence[int], prefix: int, block: int = 32) -> int:
    return int(filled(tree_mask(parents, order, prefix), block).sum())


def counted(parents: list[int], order: Sequence[int], prefix: int, block: int) -> int:
    """Entry by entry."""
    position, pairs = {row: number for number, row in enumerate(order)}, set()
    for row in order:
        seen, above = [*range(prefix)], row
        while above >= 0:
            seen.append(prefix + position[above])
            above = parents[above - 1] if above else -1
        pairs |= {(position[row] // block, column // block) for column in seen}
    return len(pairs)


@pytest.mark.parametrize("sizes", [(0, 5, 4), (7, 0, 4), (20, 9, 4), (70, 33, 32), (40, 3, 1)])
def test_blocks_are_counted(sizes):
    nodes, prefix, block = sizes
    parents = random_parents(nodes, nodes)
    for order in (depth_first(parents), breadth_first(parents), heavy_path(parents)):
        found = blocks(parents, order, prefix, block)
        assert found == counted(parents, order, prefix, block)
        assert block > 1 or found == blocks(parents, range(nodes + 1), prefix, 1), "who sees whom"


def test_orders_of_a_small_tree():
    """1 and 2 below the root, 3 and 4 below 2, 5 below 1, 6 below 4."""
    parents = [0, 0, 2, 2, 1, 4]
    assert depth_first(parents) == [0, 1, 5, 2, 3, 4, 6] and depth_first([]) == [0]
    assert breadth_first(parents) == [0, 1, 2, 3, 4, 5, 6]
    assert breadth_first([0, 1, 0]) == [0, 1, 3, 2]
    assert heavy_path(parents) == [0, 2, 4, 6, 3, 1, 5], "the larger subtree first"
    assert heavy_path([0, 0, 0]) == [0, 1, 2, 3], "of equal ones the first that was added"


@pytest.mark.parametrize("parents", [random_parents(768, 0), dyspec_parents(768)], ids=len)
def test_depth_first_order_has_far_fewer_blocks(parents):
    """DySpec reports 366 -> 218 for 768 nodes with the prefix."""
    ordered = blocks(parents, depth_first(parents), prefix=128)
    assert ordered < 0.65 * blocks(parents, range(769), prefix=128)
