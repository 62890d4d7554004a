"""Each structure builds what it says, with the forwards it says, and stops where the output
would."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decoding.draft import Draft, RoundContext
from decoding.draft_tree import DraftStep, DraftTree
from decoding.engines.serial import SerialEngine
from decoding.interfaces import DraftStructure, StopRule
from decoding.models.table_lm import Table, TableLM, random_table
from decoding.sampling import Sampler, Warp, hub_pair, iid, top_tokens, without_replacement
from decoding.stopping.fixed import Fixed
from decoding.stopping.never import Never
from decoding.structures.branch_point import BranchPoint
from decoding.structures.chain import Chain
from decoding.structures.dyspec import DySpecHeap, DySpecLayers
from decoding.structures.lookup import Copies, Lookup, following, longest_match
from decoding.structures.reranked import Reranked
from decoding.structures.sources import Sources
from decoding.structures.static_tree import ParallelPaths, SpecInfer, StaticTree, WidthTree
from decoding.trace import Stopwatch
from decoding.verifiers.token import TokenVerifier
from tests.helpers.damage.refusals import refuses
from tests.helpers.decoding.value_stub import Saying
from tests.helpers.decoding.value_stub import grown as grown_by_value

COMMITTED = torch.tensor([1, 0, 2, 1, 0])
TABLE = random_table(5, seed=3)
EOS = frozenset({4})


def grown(
    structure: DraftStructure,
    siblings: Any = without_replacement,
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
    drawing = {"stop": stop, "siblings": siblings, "sampler": Sampler.seeded(seed)}
    tree = DraftTree(lm, context, warp or Warp(), Stopwatch(), **drawing)
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
def test_no_path_is_too_long_and_nothing_follows_eos(name, max_new):
    structure, ended = TREES[name], 0
    distribution = iid if name == "specinfer" else without_replacement
    for seed in range(15):
        asked = {"max_new": max_new, "eos_ids": EOS, "seed": seed}
        tree, draft = grown(structure, distribution, Fixed(4), **asked)
        check_sound(draft, max_new - (name != "branch_point"), EOS)
        ended += bool(set(draft.token) & EOS)
        if max_new == 1 and name != "branch_point":
            assert len(draft) == tree.forwards == 0
    assert ended or max_new == 1 or name == "lookup"


def test_siblings_of_a_distribution_without_replacement_differ():
    for name in ("tree", "static", "heap", "layers", "branch_point"):
        _, draft = grown(TREES[name], without_replacement, Fixed(3))
        for rows in draft.children():
            tokens = [draft.token[row - 1] for row in rows]
            assert len(set(tokens)) == len(tokens)


def test_branch_point_is_a_chain_with_open_leaves():
    tree, draft = grown(BranchPoint(20, 3), without_replacement, Fixed(4))
    assert draft.parent == [0, 1, 2, 3, 4, 4, 4] and draft.open == 3 and draft.closed == 4
    assert tree.forwards == 5 and len(set(draft.token[4:])) == 3
    assert grown(BranchPoint(2, 2), iid, Fixed(4))[1].parent == [0, 1, 2, 2]
    last = grown(BranchPoint(9, 2), iid, Fixed(4), max_new=1)[1]
    assert last.parent == [0, 0] and last.open == 2, "where the bonus token would stand"
    everything = grown(BranchPoint(1, 9), without_replacement, Fixed(1))[1]
    assert everything.open == 5, "the distribution has no more candidates than tokens"
    for seed in range(20):  # no candidates after EOS
        _, draft = grown(BranchPoint(9, 2), iid, Fixed(4), eos_ids=EOS, seed=seed)
        closed = draft.token[: draft.closed]
        assert draft.open == (0 if set(closed) & EOS else 2)


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
def test_static_trees_cost_one_forward_per_layer(structure, distribution, nodes, layers):
    tree, draft = grown(structure, distribution)
    assert [depths(draft).count(layer + 1) for layer in range(len(nodes))] == nodes
    assert len(draft) == sum(nodes) and tree.forwards == layers


def test_the_bth_candidate_gets_the_bth_subtree():
    """Top tokens come in order, so every draw is known."""
    _, draft = grown(StaticTree([0, 0, 2, 2, 4]), top_tokens)
    lm = TableLM(TABLE)

    def ranked(*context: int) -> list[int]:
        return lm.distribution(context).argsort(descending=True).tolist()

    first, second = ranked(0)[:2] if lm.order == 1 else ranked(1, 0)[:2]
    assert draft.parent == [0, 0, 2, 2, 4]
    below = ranked(0, second)[:2]
    assert draft.token == [first, second, *below, ranked(second, below[1])[0]]


def test_paths_share_the_root_only_and_keep_duplicates():
    certain = TableLM(lambda context: torch.tensor([0.0, 1.0]).double()).table
    _, draft = grown(ParallelPaths(3, 2), iid, table=certain, committed=torch.tensor([1, 1]))
    assert draft.parent == [0, 1, 0, 3, 0, 5] and draft.token == [1] * 6


def test_an_exhausted_distribution_leaves_the_rest_of_the_plan_out():
    two = {"table": random_table(2, seed=1), "committed": torch.tensor([1, 0])}
    tree, draft = grown(WidthTree([3, 3]), without_replacement, **two)
    assert draft.parent == [0, 1, 1, 0, 4, 4] and tree.forwards == 2
    _, greedy = grown(WidthTree([3, 3]), without_replacement, warp=Warp(0.0))
    assert greedy.parent == [0, 1]
    _, pair = grown(WidthTree([3, 1]), hub_pair)
    assert pair.parent == [0, 1, 0, 3]


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
def test_heap_always_takes_the_most_valuable_draw(seed):
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


def test_a_heap_ends_with_what_can_be_drawn():
    tree, draft = grown(DySpecHeap(5), warp=Warp(0.0))
    assert draft.is_chain and len(draft) == tree.forwards == 5, "of a greedy draft"
    table = random_table(2, seed=1)
    _, draft = grown(DySpecHeap(100), table=table, committed=torch.tensor([1, 0]), max_new=3)
    assert sorted(depths(draft)) == [1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize("seed", range(5))
def test_layers_take_every_draw_above_the_threshold(seed):
    tree, draft = grown(DySpecLayers(0.05, 1000), seed=seed)
    worth, children = values(draft), draft.children()
    assert min(worth) > 0.05
    inner = [len(draft.rows_to(row)) for row, rows in enumerate(children) if rows]
    assert tree.forwards == 1 + max(inner)
    deeper, _ = grown(DySpecLayers(0.01, 1000), seed=seed)
    assert len(deeper.token) > len(draft)


def test_the_cap_refuses_draws_and_takes_none_back():
    sizes = [len(grown(DySpecLayers(0.01, cap))[1]) for cap in (1, 2, 5, 30)]
    assert sizes == [1, 2, 5, 30]
    tree, _ = grown(DySpecLayers(0.01, 1))
    assert tree.forwards == 1, "no forward where nothing may be drawn"
    full, _ = grown(DySpecLayers(0.01, 1000))
    capped, _ = grown(DySpecLayers(0.01, 4))
    assert capped.token == full.token[:4] and capped.parent == full.parent[:4]


def test_a_binding_cap_serves_the_more_valuable_row():
    """Room for one draw below two rows: it goes to the likelier token, drawn first or second."""
    likely = torch.tensor([0.3, 0.7], dtype=torch.float64)
    given = {"table": lambda context: likely, "committed": torch.tensor([1, 0])}
    firsts = set()
    for seed in range(20):
        tree, _ = grown(DySpecLayers(0.05, 3), **given, seed=seed)
        assert sorted(tree.token[:2]) == [0, 1] and len(tree.token) == 3
        assert tree.parent[2] == 1 + tree.token.index(1)
        firsts.add(tree.token[0])
    assert firsts == {0, 1}


@pytest.mark.parametrize("build", [lambda: Lookup(1, 2, 3), lambda: Sources(4, 1, 2, 4)])
def test_a_shortest_ending_longer_than_the_longest_is_refused(build):
    refuses(r"^structure\.ngram_min: expected at most .* = 1, got 2", build)


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 2, [3, 4]),  # two tokens match
        ([1, 2, 3, 4, 1, 2], 6, [3, 4, 1, 2, 3, 4]),  # beyond the end: what was copied goes on
        ([5, 2, 9, 1, 2, 3, 4, 1, 2], 1, [3]),  # the longer match before the later one
        ([1, 2, 7, 1, 2, 8, 0, 1, 2], 1, [8]),  # the latest of two
        ([0, 0, 0], 4, [0, 0, 0, 0]),
        ([1, 2, 3], 3, []),
        ([1], 3, []),
        ([1, 2, 1], 0, []),
    ],
)
def test_lookup_copies_what_followed(text, count, expected):
    match = longest_match(torch.tensor(text), range(3, 0, -1))
    assert (following(torch.tensor(text), match[0], count) if match else []) == expected


def test_lookup_looks_for_n_grams_of_the_lengths_asked_for():
    text = torch.tensor([5, 1, 2, 7, 0, 2])
    assert longest_match(text, range(3, 0, -1)) == (3, 1)
    assert longest_match(text, range(3, 1, -1)) is None


def test_lookup_is_a_chain_of_point_masses_without_forwards():
    tree, draft = grown(Lookup(3, 1, 4), committed=torch.tensor([1, 2, 3, 4, 1, 2]))
    assert draft.is_chain and draft.token == [3, 4, 1, 2] and tree.forwards == 0
    assert all(q[token] == 1 == q.sum() for q, token in zip(draft.q[:4], draft.token, strict=True))
    _, ended = grown(Lookup(3, 1, 4), committed=torch.tensor([1, 2, 3, 4, 1, 2]), eos_ids=EOS)
    assert ended.token == [3, 4]
    assert len(grown(Lookup(3, 2, 4))[1]) == 4 and len(grown(Lookup(3, 3, 4))[1]) == 0


@pytest.mark.filterwarnings("ignore:pair.draft. its context holds")
@pytest.mark.parametrize("structure", [Lookup(3, 1, 4), Chain(4)])
def test_no_draft_limits_the_output(structure):
    pair = SimpleNamespace(target=TableLM(TABLE, max_length=32), draft=TableLM(TABLE, max_length=8))
    engine = SerialEngine(pair, structure, Never(), TokenVerifier(), Warp(), Warp())
    assert len(engine.decode([1, 2, 1, 2], 99, Sampler.seeded(0)).tokens) == 28
    if isinstance(structure, Lookup):
        beyond = engine.decode([1, 2] * 8, 5, Sampler.seeded(0)).rounds[0]
        assert beyond.draft_tokens == [1, 2, 1, 2] and not pair.draft.forwards


class Counting(Fixed):
    """Notes what it was shown."""

    def __init__(self, gamma: int) -> None:
        super().__init__(gamma)
        self.seen: list[list[int]] = []

    def should_stop(self, step: DraftStep) -> bool:
        self.seen.append(list(step.tokens))
        return super().should_stop(step)


def test_a_match_is_copied_without_asking_or_running_anything():
    stop = Counting(3)
    tree, draft = grown(Sources(5, 3, 2, 2), stop=stop, committed=torch.tensor([1, 2, 3, 4, 1, 2]))
    assert draft.token == [3, 4, 1, 2] and draft.is_chain and tree.forwards == 0 and not stop.seen
    assert all(q[token] == 1 == q.sum() for q, token in zip(draft.q[:4], draft.token, strict=True))
    _, ended = grown(Sources(5, 3, 2, 2), committed=torch.tensor([1, 2, 3, 4, 1, 2]), eos_ids=EOS)
    assert ended.token == [3, 4]


def test_grown_drafts_copy_where_the_committed_text_repeats_itself():
    says, copies = Saying(lambda depth: (0.9, 0.8, 0.0, 0.0)), Copies(3, 2, 2)
    structure = grown_by_value(says, budget=4, copies=copies)
    text = torch.tensor([1, 2, 3, 4, 1, 2])
    tree, draft = grown(structure, committed=text)
    assert draft.token == [3, 4, 1, 2] and draft.is_chain and tree.forwards == 0
    _, draft = grown(grown_by_value(says, budget=2, copies=copies), committed=text)
    assert draft.token == [3, 4], "the budget is for copies, too"
    tree, draft = grown(structure, committed=text[:-1])
    assert tree.forwards and len(draft) <= 4
    assert not len(grown(structure, committed=text, max_new=1)[1])


@pytest.mark.parametrize("gamma", [1, 3])
def test_without_a_match_it_draws_as_a_chain_until_there_is_one(gamma):
    text, kinds = [0, 1, 2, 3, 1], set()
    for seed in range(40):
        stop = Counting(gamma)
        tree, draft = grown(Sources(9, 2, 2, 2), stop=stop, committed=torch.tensor(text), seed=seed)
        drawn = tree.forwards
        told = [*text, *draft.token[:drawn]]
        copied = len(draft) - drawn
        assert copied == (4 if longest_match(torch.tensor(told), [2]) else 0)
        assert 1 <= drawn <= gamma and max(map(len, stop.seen)) <= drawn
        for row, token in enumerate(draft.token):
            one_hot = draft.q[row].max() == 1
            assert one_hot == (row >= drawn) and draft.q[row][token] > 0
        kinds.add(copied)
    assert kinds == {0, 4}, "rounds of one source, and of both"


def test_the_draft_reads_accepted_copies_when_it_draws_again():
    pair = SimpleNamespace(target=TableLM(TABLE), draft=TableLM(TABLE))
    engine = SerialEngine(pair, Sources(4, 2, 2, 1), Fixed(2), TokenVerifier(), Warp(), Warp())
    copied_then_drawn = 0
    for seed in range(20):
        rounds = engine.decode([1, 2, 3, 1, 2], 24, Sampler.seeded(seed)).rounds
        for before, after in zip(rounds, rounds[1:], strict=False):
            copied = before.draft_forwards == 0 < before.accepted
            copied_then_drawn += copied and after.draft_forwards > 0
        drawn = [(q, p) for r in rounds for q, p in zip(r.draft_q, r.draft_p, strict=True) if q < 1]
        assert all(q == pytest.approx(p) for q, p in drawn), "the same model after the same text"
    assert copied_then_drawn > 0


def likeliest(width: int, depth: int, nodes: int) -> set[tuple[int, ...]]:
    """Of all paths, where every node may be expanded."""
    found = {}
    for length in range(1, depth + 1):
        for path in product(range(5), repeat=length):
            text, value = [*COMMITTED.tolist()], 1.0
            for token in path:
                value *= TABLE(tuple(text[-2:]))[token].item()
                text.append(token)
            found[path] = value
    return set(sorted(found, key=lambda path: -found[path])[:nodes])


@pytest.mark.parametrize("nodes", [1, 4, 9])
def test_the_likeliest_paths_are_kept(nodes):
    tree, draft = grown(Reranked(5, 3, nodes), top_tokens)
    assert {tuple(draft.path(row)) for row in range(1, len(draft) + 1)} == likeliest(5, 3, nodes)
    assert tree.forwards == 3 and len(draft) == nodes
    check_sound(draft, 19, EOS)


@pytest.mark.parametrize(("max_new", "longest"), [(1, 0), (2, 1), (3, 2)])
def test_ends_of_the_output_and_of_the_text(max_new, longest):
    _, draft = grown(Reranked(3, 4, 20), top_tokens, max_new=max_new, eos_ids=EOS)
    check_sound(draft, longest, EOS)
