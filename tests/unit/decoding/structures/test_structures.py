"""Each structure builds what it says, with the forwards it says, and stops where the output
would."""

import pytest
import torch

from decoding.draft import Draft, RoundContext
from decoding.draft_tree import DraftTree
from decoding.interfaces import DraftStructure, StopRule
from decoding.models.table_lm import Table, TableLM, random_table
from decoding.sampling import (
    Sampler,
    SiblingSampler,
    Warp,
    hub_pair,
    iid,
    top_tokens,
    without_replacement,
)
from decoding.stopping.fixed import Fixed
from decoding.structures.branch_point import BranchPoint
from decoding.structures.chain import Chain
from decoding.structures.dyspec import DySpecHeap, DySpecLayers
from decoding.structures.lookup import Lookup
from decoding.structures.sources import Sources
from decoding.structures.static_tree import (
    ParallelPaths,
    SpecInfer,
    StaticTree,
    WidthTree,
    width_parents,
)
from decoding.trace import Stopwatch
from runtime.errors import UserError

COMMITTED = torch.tensor([1, 0, 2, 1, 0])
TABLE = random_table(5, seed=3)
EOS = frozenset({4})


def grown(
    structure: DraftStructure,
    siblings: SiblingSampler = without_replacement,
    stop: StopRule | None = None,
    *,
    table: Table = TABLE,
    committed: torch.Tensor = COMMITTED,
    max_new: int = 20,
    eos_ids: frozenset[int] = frozenset(),
    warp: Warp | None = None,
    seed: int = 0,
) -> tuple[DraftTree, Draft]:
    lm = TableLM(table)
    lm.forward(committed[:-1])
    context = RoundContext(committed, max_new, eos_ids=eos_ids)
    tree = DraftTree(
        lm,
        context,
        warp or Warp(),
        Stopwatch(),
        stop=stop,
        siblings=siblings,
        sampler=Sampler.seeded(seed),
    )
    structure.grow(tree)
    return tree, tree.draft()


def depths(draft: Draft) -> list[int]:
    return [len(draft.rows_to(row)) for row in range(1, len(draft) + 1)]


def check_sound(draft: Draft, max_depth: int, eos_ids: frozenset[int]) -> None:
    """Depth-first with q where there are children; no path too long, nothing after EOS."""
    children = draft.children()
    assert max(depths(draft), default=0) <= max_depth
    for row in range(1, len(draft) + 1):
        assert draft.q[draft.parent[row - 1]][draft.token[row - 1]] > 0
        assert not children[row] or draft.token[row - 1] not in eos_ids
        torch.testing.assert_close(draft.q[row].sum().item(), float(bool(children[row])))


TREES = {
    "branch_point": BranchPoint(6, 3),
    "parallel_paths": ParallelPaths(3, 4),
    "tree": WidthTree([2, 3, 1]),
    "specinfer": SpecInfer([3, 2, 2]),
    "static": StaticTree([0, 0, 1, 1, 3, 2, 6]),
    "heap": DySpecHeap(12),
    "layers": DySpecLayers(0.03, 20),
    "lookup": Lookup(3, 1, 6),
    "chain": Chain(6),
    "sources": Sources(6, 3, 3, 2),
}


@pytest.mark.parametrize("max_new", [1, 2, 3, 20])
@pytest.mark.parametrize("name", TREES)
@pytest.mark.few(16)
def test_no_path_is_too_long_and_nothing_follows_eos(name: str, max_new: int) -> None:
    structure, ended = TREES[name], 0
    distribution = iid if name == "specinfer" else without_replacement
    for seed in range(15):
        tree, draft = grown(
            structure, distribution, Fixed(4), max_new=max_new, eos_ids=EOS, seed=seed
        )
        check_sound(draft, max_new - (name != "branch_point"), EOS)
        ended += bool(set(draft.token) & EOS)
        if max_new == 1 and name != "branch_point":
            assert len(draft) == tree.forwards == 0
    assert ended or max_new == 1 or name == "lookup"


def test_siblings_of_a_distribution_without_replacement_differ() -> None:
    for name in ("tree", "static", "heap", "layers", "branch_point"):
        _, draft = grown(TREES[name], without_replacement, Fixed(3))
        for rows in draft.children():
            tokens = [draft.token[row - 1] for row in rows]
            assert len(set(tokens)) == len(tokens)


# Branch point -------------------------------------------------------------------------------------


def test_branch_point_is_a_chain_with_open_leaves() -> None:
    tree, draft = grown(BranchPoint(20, 3), without_replacement, Fixed(4))
    assert draft.parent == [0, 1, 2, 3, 4, 4, 4] and draft.open == 3 and draft.closed == 4
    assert tree.forwards == 5
    assert len(set(draft.token[4:])) == 3


def test_branch_point_at_the_limits() -> None:
    assert grown(BranchPoint(2, 2), iid, Fixed(4))[1].parent == [0, 1, 2, 2]
    last = grown(BranchPoint(9, 2), iid, Fixed(4), max_new=1)[
        1
    ]  # candidates stand where the bonus token would
    assert last.parent == [0, 0] and last.open == 2
    everything = grown(BranchPoint(1, 9), without_replacement, Fixed(1))[1]
    assert everything.open == 5, "the distribution has no more candidates than tokens"


def test_branch_point_has_no_candidates_after_eos() -> None:
    for seed in range(20):
        _, draft = grown(BranchPoint(9, 2), iid, Fixed(4), eos_ids=EOS, seed=seed)
        closed = draft.token[: draft.closed]
        assert draft.open == (0 if set(closed) & EOS else 2)


# Static trees -------------------------------------------------------------------------------------


def test_widths_and_parents() -> None:
    assert width_parents([3]) == [0, 0, 0]
    assert width_parents([2, 2, 1]) == [0, 0, 1, 1, 2, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("structure", "distribution", "nodes", "layers"),
    [
        (WidthTree([2, 2, 1]), hub_pair, [2, 4, 4], 3),
        (WidthTree([3, 2]), top_tokens, [3, 6], 2),
        (SpecInfer([4, 1, 1]), iid, [4, 4, 4], 3),
        (ParallelPaths(3, 4), iid, [3, 3, 3, 3], 4),
        (ParallelPaths(1, 2), iid, [1, 1], 2),
        (StaticTree([0, 1, 2, 0]), without_replacement, [2, 1, 1], 3),
    ],
)
def test_static_trees_cost_one_forward_per_layer(
    structure: StaticTree, distribution: SiblingSampler, nodes: list[int], layers: int
) -> None:
    tree, draft = grown(structure, distribution)
    assert [depths(draft).count(layer + 1) for layer in range(len(nodes))] == nodes and len(
        draft
    ) == sum(nodes)
    assert tree.forwards == layers


def test_the_bth_candidate_gets_the_bth_subtree() -> None:
    """Top tokens come in order, so every draw is known."""
    _, draft = grown(StaticTree([0, 0, 2, 2, 4]), top_tokens)
    lm = TableLM(TABLE)

    def ranked(*context: int) -> list[int]:
        return lm.distribution(context).argsort(descending=True).tolist()

    first, second = ranked(0)[:2] if lm.order == 1 else ranked(1, 0)[:2]
    assert draft.parent == [0, 0, 2, 2, 4]
    below = ranked(0, second)[:2]
    assert draft.token == [first, second, *below, ranked(second, below[1])[0]]


def test_paths_share_the_root_only_and_keep_duplicates() -> None:
    certain = TableLM(lambda context: torch.tensor([0.0, 1.0]).double()).table
    _, draft = grown(ParallelPaths(3, 2), iid, table=certain, committed=torch.tensor([1, 1]))
    assert draft.parent == [0, 1, 0, 3, 0, 5] and draft.token == [1] * 6


def test_an_exhausted_distribution_leaves_the_rest_of_the_plan_out() -> None:
    table = random_table(2, seed=1)
    tree, draft = grown(
        WidthTree([3, 3]), without_replacement, table=table, committed=torch.tensor([1, 0])
    )
    assert draft.parent == [0, 1, 1, 0, 4, 4] and tree.forwards == 2
    _, greedy = grown(WidthTree([3, 3]), without_replacement, warp=Warp(0.0))
    assert greedy.parent == [0, 1]
    _, pair = grown(WidthTree([3, 1]), hub_pair)
    assert pair.parent == [0, 1, 0, 3]


# DySpec -------------------------------------------------------------------------------------------


def values(draft: Draft) -> list[float]:
    """The value each node's draw had, literally: v R[y] for a child, v (1 - R[y]) for a sibling, R
    renormalised."""
    worth = [0.0] * (len(draft) + 1)
    first = [1.0] + [0.0] * len(draft)  # of the first draw below each row
    for row, children in enumerate(draft.children()):
        left, value = draft.q[row].double(), first[row]
        for child in children:
            worth[child] = value
            share = (left / left.sum())[draft.token[child - 1]].item()
            first[child], value = value * share, value * (1 - share)
            left = left.clone()
            left[draft.token[child - 1]] = 0
    return worth[1:]


@pytest.mark.parametrize("seed", range(5))
def test_heap_always_takes_the_most_valuable_draw(seed: int) -> None:
    """So no draw it left out is worth more than one it took: neither a next sibling nor a first
    child."""
    sizes = [len(grown(DySpecHeap(budget), seed=seed)[1]) for budget in (1, 2, 7, 12)]
    assert sizes == [1, 2, 7, 12]
    tree, draft = grown(DySpecHeap(12), seed=seed)
    worth, children = values(draft), draft.children()
    left_out = []
    for row in range(len(draft) + 1):
        reach = 1.0
        for step in draft.rows_to(row):
            reach *= draft.q[draft.parent[step - 1]][draft.token[step - 1]].item()
        taken = sum(draft.q[row][draft.token[child - 1]].item() for child in children[row])
        left_out.append(reach * (1 - taken))
    assert max(left_out) <= min(worth) + 1e-12
    assert tree.forwards == sum(bool(rows) for rows in children), "one for each node with children"


def test_heap_of_a_greedy_draft_is_a_chain() -> None:
    tree, draft = grown(DySpecHeap(5), warp=Warp(0.0))
    assert draft.is_chain and len(draft) == tree.forwards == 5


def test_heap_ends_with_what_can_be_drawn() -> None:
    table = random_table(2, seed=1)
    _, draft = grown(DySpecHeap(100), table=table, committed=torch.tensor([1, 0]), max_new=3)
    assert sorted(depths(draft)) == [1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize("seed", range(5))
def test_layers_take_every_draw_above_the_threshold(seed: int) -> None:
    tree, draft = grown(DySpecLayers(0.05, 1000), seed=seed)
    worth, children = values(draft), draft.children()
    assert min(worth) > 0.05
    assert tree.forwards == 1 + max(
        len(draft.rows_to(row)) for row, rows in enumerate(children) if rows
    )
    deeper, _ = grown(DySpecLayers(0.01, 1000), seed=seed)
    assert len(deeper.token) > len(draft)


def test_the_cap_refuses_draws_and_takes_none_back() -> None:
    sizes = [len(grown(DySpecLayers(0.01, cap))[1]) for cap in (1, 2, 5, 30)]
    assert sizes == [1, 2, 5, 30]
    tree, _ = grown(DySpecLayers(0.01, 1))
    assert tree.forwards == 1, "no forward where nothing may be drawn"
    full, _ = grown(DySpecLayers(0.01, 1000))
    capped, _ = grown(DySpecLayers(0.01, 4))
    assert capped.token == full.token[:4] and capped.parent == full.parent[:4]


def test_a_binding_cap_serves_the_more_valuable_row() -> None:
    """Room for one draw below two rows: it goes to the likelier token, drawn first or second."""
    likely = torch.tensor([0.3, 0.7], dtype=torch.float64)
    firsts = set()
    for seed in range(20):
        tree, _ = grown(
            DySpecLayers(0.05, 3),
            table=lambda context: likely,
            committed=torch.tensor([1, 0]),
            seed=seed,
        )
        assert sorted(tree.token[:2]) == [0, 1] and len(tree.token) == 3
        assert tree.parent[2] == 1 + tree.token.index(1)
        firsts.add(tree.token[0])
    assert firsts == {0, 1}


# Settings that do not go together -----------------------------------------------------------------


@pytest.mark.parametrize("build", [lambda: Lookup(1, 2, 3), lambda: Sources(4, 1, 2, 4)])
def test_a_shortest_ending_longer_than_the_longest_is_refused(build) -> None:
    with pytest.raises(UserError, match=r"^structure\.ngram_min: expected at most .* = 1, got 2"):
        build()
