"""Sequoia's acceptance vector against enumeration, its dynamic programme against every tree there
is, its artefact."""

import json
from collections.abc import Iterator
from functools import cache
from itertools import islice, product

import numpy as np
import pytest
import torch

from decoding.cost import MeasuredCost, measure_cost
from decoding.draft import Draft
from decoding.models.table_lm import TableLM, random_table
from decoding.sampling import Sampler, without_replacement
from decoding.structures.sequoia import Sequoia, write_artefact
from decoding.verifiers.rrsw import RrswVerifier
from evaluation.replay.tune_tree import (
    Plan,
    Programme,
    best_plans,
    expected_tokens,
    layer_rows,
    sibling_acceptance,
)
from runtime.errors import UserError
from tests.contract.enumeration import dirichlet, distribution_of
from tests.helpers.damage.refusals import refuses

VECTORS = [[0.7, 0.15, 0.05], [0.5, 0.3, 0.1, 0.05], [0.3, 0.6], [0.7, 0.0, 0.2], [0.5, 0.0, 0.0]]
Shape = tuple["Shape", ...]
"""A tree as the tuple of its root's subtrees."""


@cache
def forests(nodes: int) -> tuple[Shape, ...]:
    """Every ordered forest with so many nodes, which is every tree with one row more."""
    if nodes == 0:
        return ((),)
    pairs = (product(forests(size), forests(nodes - 1 - size)) for size in range(nodes))
    return tuple((first, *rest) for several in pairs for first, rest in several)


def parents_of(shape: Shape) -> list[int]:
    found = list[int]()

    def visit(shape: Shape, row: int) -> None:
        for child in shape:
            found.append(row)
            visit(child, len(found))

    visit(shape, 0)
    return found


def widest(parents: list[int]) -> int:
    return int(np.bincount(parents).max())


def deepest(parents: list[int]) -> int:
    return len(layer_rows(parents))


def direct_sum(shape: Shape, acceptance: list[float]) -> float:
    of_children = zip(acceptance, shape, strict=False)
    return 1 + sum(a * direct_sum(child, acceptance) for a, child in of_children)


@pytest.mark.parametrize("acceptance", VECTORS)
def test_programme_finds_the_best_of_all_trees(acceptance):
    programme, trees = Programme(acceptance, 8, 4), 0
    for rows in range(2, 9):
        found: dict[int, float] = {}
        for shape in forests(rows - 1):
            parents = parents_of(shape)
            if widest(parents) <= len(acceptance):
                trees += 1
                value = direct_sum(shape, acceptance)
                assert expected_tokens(parents, acceptance) == pytest.approx(value, abs=1e-12)
                for depth in range(deepest(parents), 5):
                    found[depth] = max(found.get(depth, 0.0), value)
        for depth in range(1, 5):
            best = found.get(depth, -np.inf)
            assert programme.value[rows, depth] == pytest.approx(best, abs=1e-12)
            if depth in found:
                tree = programme.tree(rows, depth)
                assert len(tree) == rows - 1 and deepest(tree) <= depth
                assert widest(tree) <= len(acceptance)
                assert expected_tokens(tree, acceptance) == pytest.approx(found[depth], abs=1e-12)
    print(f"{trees} trees")


def test_nodes_beyond_the_support_are_still_planned():
    """A greedy draft has one candidate: the others are worth nothing, but a tree of that size
    exists."""
    programme = Programme([0.5, 0.0, 0.0], 6, 2)
    assert programme.value[2:, 2].tolist() == pytest.approx([1.5, 1.75, 1.75, 1.75, 1.75])
    assert programme.value[4, 1] == 1.5 and programme.tree(4, 1) == [0, 0, 0]
    plans = best_plans(programme, lambda rows: 1.0, lambda rows: 1.0)
    assert [plan.nodes for plan in plans] == [1, 2, 3, 4, 5]


def test_trees_come_depth_first_and_have_layers():
    tree = Programme([0.6, 0.3, 0.1], 40, 8).tree(40, 8)
    assert all(parent < row for row, parent in enumerate(tree, 1))
    draft = Draft(tree, [0] * 39, torch.zeros(40, 1))
    order, waiting = [], [0]
    while waiting:
        order.append(waiting.pop())
        waiting += reversed(draft.children()[order[-1]])
    assert order == list(range(40))
    assert layer_rows([0, 1, 1, 0, 4, 5]) == [1, 2, 1]
    assert layer_rows([0, 0, 0]) == [1]


def test_plans_minimise_modelled_seconds_per_token():
    programme = Programme([0.6, 0.2], 12, 5)
    plans = best_plans(programme, lambda rows: 1.0, lambda rows: 3.0 + 0.5 * rows)
    assert [plan.nodes for plan in plans] == list(range(1, 12))
    for plan in plans:
        tokens, call = programme.value[plan.nodes + 1], 3.0 + 0.5 * (plan.nodes + 1)
        prices = [(depth + call) / tokens[depth] for depth in range(1, 6) if tokens[depth] > 0]
        assert plan.seconds_per_token == pytest.approx(min(prices))
        assert plan.expected_tokens == pytest.approx(programme.value[plan.nodes + 1, plan.depth])
    assert isinstance(plans[0], Plan) and plans[0].parents == [0]


def test_each_layer_is_priced_by_the_rows_the_draft_runs_on():
    """A layer that is drawn from n rows costs 1 + n."""
    programme = Programme([0.6, 0.2], 7, 2)
    every = best_plans(programme, lambda rows: 1.0 + rows, lambda rows: 3.0)
    plans = {plan.nodes: plan for plan in every}
    by_hand = {
        1: ([0], 2 + 3, 1.6),
        2: ([0, 0], 2 + 3, 1.8),  # the chain: 2 + 2 + 3 for 1.96
        3: ([0, 1, 0], 2 + 2 + 3, 2.16),
        5: ([0, 1, 1, 0, 4], 2 + 3 + 3, 2.4),
        6: ([0, 1, 1, 0, 4, 4], 2 + 3 + 3, 2.44),
    }
    for nodes, (parents, seconds, tokens) in by_hand.items():
        assert plans[nodes].parents == parents
        assert plans[nodes].expected_tokens == pytest.approx(tokens)
        assert plans[nodes].seconds_per_token == pytest.approx(seconds / tokens)


def exact_acceptance(p: torch.Tensor, q: torch.Tensor, width: int) -> list[float]:
    """Every draw of siblings and every verdict of the rule they are verified by."""

    def accepted(sampler: Sampler) -> int:
        tokens = [each.token for each in islice(without_replacement(q, sampler), width)]
        rows = torch.stack([q, *torch.zeros(len(tokens), len(q)).double()])
        draft = Draft([0] * len(tokens), tokens, rows)
        return RrswVerifier().verify(draft, p.expand(len(tokens) + 1, -1), sampler).row

    distribution = distribution_of(accepted)
    return [distribution.get(row, 0.0) for row in range(1, width + 1)]


def instances() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    for vocab in (2, 3, 4):
        p, q = (dirichlet(vocab, generator) for _ in range(2))
        yield p, q
        yield p, p
        yield p, torch.eye(vocab, dtype=torch.float64)[0]
        yield torch.eye(vocab, dtype=torch.float64)[1], q


@pytest.mark.parametrize("case", range(12))
@pytest.mark.few(3)
def test_acceptance_of_each_sibling(case):
    (p, q), n = list(instances())[case], 20_000
    generator = torch.Generator().manual_seed(case)
    found = sibling_acceptance(p.expand(n, -1), q.expand(n, -1), 4, generator)
    exact = torch.tensor(exact_acceptance(p, q, 4), dtype=torch.float64)
    assert found[:, 0].max() - found[:, 0].min() < 1e-12
    noise = 4.5 * found.std(0) / n**0.5 + 1e-12
    assert ((found.mean(0) - exact).abs() <= noise).all(), (found.mean(0), exact)
    assert found.sum(1).max() <= 1 + 1e-9 and not found.isnan().any()


def test_cost_is_linear_between_measurements_and_beyond_them_the_mean_of_the_others():
    cost = MeasuredCost([1, 3, 9], [1.0, 2.0, 8.0])
    assert [cost(rows) for rows in (1, 2, 3, 6, 9)] == [1.0, 1.5, 2.0, 5.0, 8.0]
    assert [cost(rows) for rows in (9, 10, 20)] == pytest.approx([8.0, 8 + 7 / 8, 8 + 11 * 7 / 8])
    assert MeasuredCost([2, 4], [3.0, 2.0]).of(np.array([1, 4, 9])).tolist() == [3.0, 2.0, 2.0]
    assert MeasuredCost([1], [3.0])(20) == 3.0, "of one measurement, no slope"


def test_measuring_leaves_one_context_and_counts_every_forward():
    lm, turns = TableLM(random_table(3, seed=0)), []
    cost = measure_cost(lm, torch.tensor([0, 1, 2]), [1, 2, 5], 3, lambda: turns.append(1))
    assert lm.length == 3 and lm.forwards == 1 + 3 * 4 == 1 + len(turns)
    assert cost.rows == [1, 2, 5] and min(cost.seconds) > 0


def test_artefact_becomes_a_structure(tmp_path):
    path = tmp_path / "new" / "tree.json"
    write_artefact(path, {"parents": [0, 0, 0, 1]})
    assert Sequoia(path).max_siblings == 3
    assert json.loads(path.read_text())["format_version"] == 1
    assert len(list(path.parent.iterdir())) == 1


def test_missing_artefact_says_how_to_make_one(tmp_path):
    with pytest.raises(UserError, match=r"structure\.tree: .*is missing\. Make one: .*what=tree"):
        Sequoia(tmp_path / "tree.json")


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[]",
        "{}",
        '{"format_version": 1, "parents": []}',
        '{"format_version": 1, "parents": [1]}',
        '{"format_version": 1, "parents": [0, "x"]}',
        '{"format_version": 1, "parents": 3}',
        '{"format_version": 2, "parents": [0]}',
    ],
)
def test_malformed_artefact_is_refused_in_one_line(text, tmp_path):
    path = tmp_path / "tree.json"
    path.write_text(text)
    refuses(r"structure\.tree: .*tune\.py what=tree", Sequoia, path)
