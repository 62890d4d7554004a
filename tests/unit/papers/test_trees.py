"""Tables of trees and what a round takes, from hand-made rounds."""

from pathlib import Path

import pytest

from decoding.trace import STAGES, RoundTrace
from papers.dyspec.trees import tree_sizes, tree_table, tree_times
from papers.specbranch.speed import specbranch_times
from papers.spechub.siblings import sibling_rules
from reports.figure import Missing, save
from tests.helpers.evaluation.evaluations import (
    chain,
    evaluation,
    labels,
    method,
    overlapped,
    plain,
    trace,
)


def tree(nodes: int, accepted: int, **seconds: float) -> RoundTrace:
    """The first `accepted` nodes are a path, the others children of the root."""
    times = {stage: seconds.get(stage, 0.0) for stage in STAGES}
    parents = [*range(accepted), *[0] * (nodes - accepted)]
    return RoundTrace(
        [5] * nodes, parents, [0.5] * nodes, accepted, accepted, [5] * (accepted + 1), [], 2, times
    )


LAYERS = method("serial", "layers", "rrs", "never")
SPECINFER = method("serial", "specinfer", "rrs", "never", structure={"widths": [2, 1]})
PLAIN = [plain(4, 4.0, "a"), plain(4, 4.0, "b")]
WIDE = [
    trace([tree(4, 2, draft=0.5, target=1.0), tree(2, 0)], 2.0, "a"),
    trace([tree(3, 1, draft=0.5, target=1.0, stop=0.25)], 2.0, "b"),
]


def wide(temperature: float = 1.0) -> list:
    traces = {"autoregressive": PLAIN, "dyspec_layers": WIDE, "specinfer": WIDE[:1]}
    return [evaluation({"dyspec_layers": LAYERS, "specinfer": SPECINFER}, traces, temperature)]


def binary(*depths: int) -> list:
    made = {
        f"{rule}_{depth}": method(
            "serial", "tree", rule, "never", structure={"widths": [2] * depth}
        )
        for rule in ("rrs", "spechub")
        for depth in depths
    }
    made["unbalanced"] = method("serial", "tree", "rrs", "never", structure={"widths": [3, 1]})
    return [evaluation(made, {"autoregressive": PLAIN, **{name: WIDE for name in made}})]


def test_tokens_per_call_of_trees() -> None:
    figure = tree_table(wide())
    rows = {row[2]: dict(zip(figure.columns, row, strict=True)) for row in figure.rows}
    layers = rows["dyspec layers"]
    assert layers["nodes/round"] == 3
    assert [
        layers[name]
        for name in ("tokens/target call", "tokens/target call low", "tokens/target call high")
    ] == [2, 2, 2]
    assert layers["speed-up"] == pytest.approx((6 / 4) / 1)
    assert rows["specinfer"]["tokens/target call low"] is None, "one prompt"
    assert (figure.kind, figure.n) == ("measured", "2 prompts, 13 rounds")


def test_growth_where_sizes_differ_most_at_each_temperature() -> None:
    figure = tree_sizes([*wide(), *wide(0.0)])
    assert figure.rows == [
        [0.0, "toy", "dyspec layers", "a", 1, 4, 2],
        [0.0, "toy", "dyspec layers", "a", 2, 2, 0],
        [1.0, "toy", "dyspec layers", "a", 1, 4, 2],
        [1.0, "toy", "dyspec layers", "a", 2, 2, 0],
    ]
    assert (
        "single rounds" in figure.interval
        and figure.n == "1 prompt at each of 2 temperatures, 4 rounds"
    )


def test_rules_by_depth() -> None:
    figure = sibling_rules(binary(2, 3))
    assert sorted((row[2], row[3]) for row in figure.rows) == [
        ("RRS", 2),
        ("RRS", 3),
        ("SpecHub", 2),
        ("SpecHub", 3),
    ]
    assert set(figure.column("tokens/target call")) == {2}


def test_time_of_a_round_by_component() -> None:
    figure = tree_times(wide())
    row = next(
        dict(zip(figure.columns, row, strict=True))
        for row in figure.rows
        if row[1] == "dyspec layers"
    )
    assert row["round, ms"] == pytest.approx(4000 / 3), "4 s for 3 rounds"
    assert (row["round, ms low"], row["round, ms high"]) == (1000, 2000)
    assert row["draft, ms"] == pytest.approx(1000 / 3) and row["target, ms"] == pytest.approx(
        2000 / 3
    )
    assert row["stop, ms"] == pytest.approx(250 / 3)
    assert row["other, ms"] == pytest.approx((4 - 3.25) * 1000 / 3), "the rest of the wall time"
    assert figure.kind == "measured" and "whole round" in figure.interval


def test_times_of_specbranch_are_of_its_comparison() -> None:
    parts = {
        "specbranch": method("overlapped", "branch_point", "token", "hrad"),
        "fixed": method("serial", "chain", "token", "fixed"),
    }
    traces = {
        "specbranch": [trace([overlapped(1, 1, 2, 0)])],
        "fixed": [trace([chain(1, 1)])],
        "autoregressive": PLAIN,
    }
    figure = specbranch_times([evaluation(parts, traces), *wide()])
    assert figure.column("method") == ["specbranch", "fixed", "autoregressive"]


def test_what_is_missing_is_named() -> None:
    for build, experiment in (
        (tree_table, "wide_trees"),
        (tree_times, "wide_trees"),
        (tree_sizes, "wide_trees"),
        (sibling_rules, "binary_trees"),
        (specbranch_times, "specbranch"),
    ):
        with pytest.raises(Missing, match=f"python scripts/evaluate.py experiment={experiment}"):
            build([evaluation({}, {"autoregressive": PLAIN})])


@pytest.mark.slow
def test_they_draw_with_units(tmp_path: Path) -> None:
    figures = [
        tree_table(wide()),
        tree_sizes(wide()),
        sibling_rules(binary(2, 3)),
        tree_times(wide()),
    ]
    assert all(path.stat().st_size for figure in figures for path in save(figure, tmp_path))
    assert [labels(figure) for figure in figures] == [
        {("tokens/target call", "")},
        {("", "nodes of the tree"), ("step (target call)", "accepted tokens")},
        {("depth of the binary tree, tokens", "tokens/target call")},
        {("time per round, ms", "")},
    ]
