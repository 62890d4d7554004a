"""Trees, siblings and blocks, and what a round takes, from hand-made rounds."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from decoding.trace import STAGES, RoundTrace
from papers.dyspec.acceptance import TARGET, target_by_probability
from papers.dyspec.trees import tree_sizes, tree_table, tree_times
from papers.hsd.blocks import block_gain, parallel_drafts
from papers.spechub.siblings import sibling_rules
from reports.artifacts import Evaluation
from tests.helpers.evaluation.evaluations import (
    chain,
    drawn,
    evaluation,
    interval,
    labels,
    lacks,
    method,
    plain,
    records_by,
    trace,
)

CALL = "target call"
CALLS = f"tokens/{CALL}"
PLAIN = [plain(4, 4.0, "a"), plain(4, 4.0, "b")]


def tree(nodes: int, accepted: int, **seconds: float) -> RoundTrace:
    """The first `accepted` nodes are a path, the others children of the root."""
    times = {stage: seconds.get(stage, 0.0) for stage in STAGES}
    parents = [*range(accepted), *[0] * (nodes - accepted)]
    counts = (accepted, accepted, [5] * (accepted + 1), [], 2)
    return RoundTrace([5] * nodes, parents, [0.5] * nodes, *counts, times)


LAYERS = method("serial", "layers", "rrs", "never")
SPECINFER = method("serial", "specinfer", "rrs", "never", structure={"widths": [2, 1]})
WIDE = [
    trace([tree(4, 2, draft=0.5, target=1.0), tree(2, 0)], 2.0, "a"),
    trace([tree(3, 1, draft=0.5, target=1.0, stop=0.25)], 2.0, "b"),
]


def wide(temperature: float = 1.0) -> list[Evaluation]:
    traces = {"autoregressive": PLAIN, "dyspec_layers": WIDE, "specinfer": WIDE[:1]}
    return [evaluation({"dyspec_layers": LAYERS, "specinfer": SPECINFER}, traces, temperature)]


def binary(*depths: int) -> list[Evaluation]:
    def of_widths(rule: str, *widths: int) -> dict:
        return method("serial", "tree", rule, "never", structure={"widths": [*widths]})

    made = {"unbalanced": of_widths("rrs", 3, 1)}
    for rule, depth in product(("rrs", "spechub"), depths):
        made[f"{rule}_{depth}"] = of_widths(rule, *[2] * depth)
    return [evaluation(made, {"autoregressive": PLAIN, **dict.fromkeys(made, WIDE)})]


def test_tokens_per_call_of_trees_and_growth_where_sizes_differ_most():
    figure = tree_table(wide())
    rows = records_by(figure, "method")
    layers = rows["dyspec layers"]
    assert layers["nodes/round"] == 3 and interval(layers, CALLS) == [2, 2, 2]
    assert layers["speed-up"] == pytest.approx((6 / 4) / 1)
    assert rows["specinfer"][f"{CALLS} low"] is None, "one prompt"
    assert (figure.kind, figure.n) == ("measured", "2 prompts, 13 rounds")
    figure = tree_sizes([*wide(), *wide(0.0)])
    assert figure.rows == [
        [temperature, "toy", "dyspec layers", "a", *numbers]
        for temperature in (0.0, 1.0)
        for numbers in ([1, 4, 2], [2, 2, 0])
    ]
    assert figure.n == "1 prompt at each of 2 temperatures, 4 rounds"
    assert "single rounds" in figure.interval


def test_the_target_is_binned_by_what_it_was_asked_about():
    rounds = [replace(chain(2, 1), draft_p=[0.25, None]), replace(chain(1, 1), draft_p=[0.75])]
    traces = [trace(rounds, 1.0, "a"), trace(rounds[:1], 1.0, "b")]
    token = method("serial", "chain", "token", "fixed", stop={"gamma": 2})
    found = evaluation({"fixed": token}, {"autoregressive": PLAIN, "fixed": traces})
    (row,) = target_by_probability([found]).records
    assert (row["q from"], row["mean q"], row["tokens"]) == (0.5, 0.5, 3)
    value, low, high = interval(row, TARGET)
    assert value == pytest.approx(1.25 / 3) and low < value < high
    lacks("needs drafts in one path", target_by_probability, wide())


def test_rules_by_depth():
    figure = sibling_rules(binary(2, 3))
    rows = {(row["rule"], row["depth"]) for row in figure.records}
    assert rows == {(rule, depth) for rule in ("RRS", "SpecHub") for depth in (2, 3)}
    assert len(figure.records) == 4 and set(figure.column(CALLS)) == {2}


def test_time_of_a_round_by_component():
    figure = tree_times(wide())
    row = records_by(figure, "method")["dyspec layers"]
    assert interval(row, "round, ms") == [pytest.approx(4000 / 3), 1000, 2000], "4 s for 3 rounds"
    parts = {"draft": 1000 / 3, "target": 2000 / 3, "stop": 250 / 3}
    parts["other"] = (4 - 3.25) * 1000 / 3  # the rest of the wall time
    assert {name: row[f"{name}, ms"] for name in parts} == pytest.approx(parts)
    assert figure.kind == "measured" and "whole round" in figure.interval


# Blocks: tokens per call are token-wise 2 and 1, block 3 and 1.
TOKEN = [trace([chain(4, 1)], 1.0, "a"), trace([chain(4, 0)], 1.0, "b")]
BLOCK = [trace([chain(4, 2)], 1.0, "a"), trace([chain(4, 0)], 1.0, "b")]


def fixed(verifier: str, gamma: int) -> dict:
    return method("serial", "chain", verifier, "fixed", stop={"gamma": gamma})


def one_draft() -> Evaluation:
    kinds = ("token", 4), ("block", 4), ("token", 8)
    made = {f"{verifier}_{gamma}": fixed(verifier, gamma) for verifier, gamma in kinds}
    traces = {"token_4": TOKEN, "block_4": BLOCK, "token_8": TOKEN}
    return evaluation(made, {"autoregressive": PLAIN, **traces})


def test_gain_on_the_same_prompts():
    figure = block_gain([one_draft()])
    rows, gain = records_by(figure, "rule"), "tokens/call over token-wise"
    assert figure.column("gamma") == [4, 4], "8 has no block verification beside it"
    assert (rows["token"][CALLS], rows["block"][CALLS]) == (1.5, 2)
    assert interval(rows["block"], gain) == [0.5, 0, 1] and rows["token"][gain] is None
    assert (figure.kind, figure.n) == ("measured", "2 prompts, 4 rounds")


def test_each_length_once_and_rules_on_the_same_prompts():
    best = evaluation({"fixed": fixed("token", 4)}, {"autoregressive": PLAIN, "fixed": TOKEN})
    other = evaluation(
        {"block_8": fixed("block", 8)},
        {"autoregressive": [plain(4, 4.0, "z")], "block_8": [trace([chain(8, 2)], 1.0, "z")]},
    )
    alone = replace(other, folder=Path("runs/other"))
    assert block_gain([one_draft(), best, alone]).rows == block_gain([one_draft()]).rows


def test_several_drafts():
    made, traces = {}, {"autoregressive": PLAIN}
    for rule, decoded in (("token", TOKEN), ("block", BLOCK)):
        for count in (1, 2):
            parts = {"structure": {"paths": count, "gamma": 4}, "verifier": {"rule": rule}}
            made[f"{rule}_{count}"] = method("serial", "paths", "parallel", "never", **parts)
            traces[f"{rule}_{count}"] = decoded
    found = [one_draft(), evaluation(made, traces)]
    figure = parallel_drafts(found)
    assert figure.column("drafts") == [1, 1, 2, 2]
    assert figure.column("rule") == ["token", "block"] * 2
    assert figure.column("speed-up") == pytest.approx([1.5, 2, 1.5, 2])
    assert set(block_gain(found).column("gamma")) == {4}, "several drafts are no draft length"


@pytest.mark.parametrize(
    ("build", "experiment"),
    [
        (tree_table, "wide_trees"),
        (tree_times, "wide_trees"),
        (tree_sizes, "wide_trees"),
        (sibling_rules, "binary_trees"),
        (block_gain, "draft_lengths"),
        (parallel_drafts, "parallel_drafts"),
    ],
)
def test_what_is_missing_is_named(build, experiment):  # type: ignore[no-untyped-def]
    one = evaluation({"token_4": fixed("token", 4)}, {"autoregressive": PLAIN, "token_4": TOKEN})
    for found in (one, evaluation({}, {"autoregressive": PLAIN})):
        lacks(f"python scripts/evaluate.py experiment={experiment}", build, [found])


@pytest.mark.slow
def test_they_draw_with_units(tmp_path):
    for figure, axes in (
        (tree_table(wide()), {(CALLS, "")}),
        (tree_sizes(wide()), {("", "nodes of the tree"), (f"step ({CALL})", "accepted tokens")}),
        (sibling_rules(binary(2, 3)), {("depth of the binary tree, tokens", CALLS)}),
        (tree_times(wide()), {("time per round, ms", "")}),
        (block_gain([one_draft()]), {("gamma, tokens of a draft", CALLS)}),
    ):
        drawn(figure, tmp_path)
        assert labels(figure) == axes
