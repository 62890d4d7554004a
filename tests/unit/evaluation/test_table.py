"""The table of measurements on traces whose sums and ratios are known by hand."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from decoding.cost import cost_table
from decoding.stopping.fixed import Fixed
from decoding.stopping.rollout_table import build
from decoding.trace import STAGES, RoundTrace, Span, StageTrace, Trace
from evaluation import table
from evaluation.replay.simulate import Replayer
from evaluation.table import accepted_lengths, compare, markdown, summary, timed
from runtime.intervals import Estimate
from tests.helpers.evaluation.evaluations import chain, plain, trace

ROOT = Path(__file__).parents[3]
# 3 + 0 of 4 + 2 accepted, then 2 of 2, then 1 of 3, and one token without a draft
FIRST = [chain(4, 3), chain(2, 0), chain(2, 2), chain(3, 1), chain(0, 0)]
FIRST[1].draft_forwards = 3
SECOND = [chain(1, 1), chain(1, 1)]
SHARED = StageTrace("draft", 1, 1, 1, 1, [], 0, 0, [])  # of draft and target side by side


def tree_round(row: int, accepted: int) -> RoundTrace:
    """Two children of the root, rows 1 and 3, and a child of the first, row 2."""
    committed, seconds = [7] * (accepted + 1), dict.fromkeys(STAGES, 0.0)
    return RoundTrace([4, 5, 6], [0, 1, 0], [0.5] * 3, row, accepted, committed, [], 2, seconds)


def with_prefill(rounds: list[RoundTrace]) -> Trace:
    """A response of a second, after half a second of prefill."""
    return replace(trace(rounds, 1.5), prefill_seconds=0.5)


def test_accepted_lengths():
    """A serial round is one by itself; with models side by side they span rounds, and end at
    rejections, or with the request."""
    assert accepted_lengths(trace(FIRST)) == [3, 0, 2, 1]
    assert accepted_lengths(plain(1)) == []
    assert accepted_lengths(trace([replace(r, overlap=SHARED) for r in FIRST])) == [3, 0, 3]
    assert accepted_lengths(trace([replace(r, overlap=SHARED) for r in SECOND])) == [2]
    trees = [tree_round(2, 2), tree_round(3, 1), tree_round(1, 1), tree_round(0, 0)]
    inner = [replace(r, overlap=SHARED) for r in [*trees, tree_round(2, 2)]]
    assert accepted_lengths(trace(inner)) == [2 + 1 + 1, 0, 2], "only inner rows of a tree reject"


def test_ratios_are_of_sums_over_requests():
    rows = timed({"m": [trace(FIRST, 2.0), trace(SECOND, 1.0, prompt="b")]})
    assert rows["kind"].tolist() == ["timed"] * 2 and set(rows) <= set(table.SCHEMA)
    assert rows[table.SIDE_BY_SIDE].isna().all(axis=None), "there, and nothing to say"
    assert rows["calls_by_drafted"][0].tolist() == [1, 0, 2, 1, 1]
    row = {name: estimate.value for name, estimate in summary(rows)["m"].items()}
    assert row["tokens/s"] == 5 and table.SPEEDUP not in row, "nothing to compare with"
    assert row["tokens/target call"] == pytest.approx(15 / 7)
    assert row["drafted/round"] == pytest.approx(13 / 7)
    assert row["draft forwards/round"] == pytest.approx(14 / 7)
    assert row["accepted length M"] == pytest.approx((3 + 0 + 2 + 1 + 1 + 1) / 6)
    assert row["rollback RB"] == pytest.approx(5 / 13)
    assert row["acceptance"] == pytest.approx(8 / 13)


def test_acceptance_length_and_acceptance_by_position():
    """Of FIRST and SECOND: 6 drafts, 5 accept their first token, 3 of those have a second one. A
    draft that ends with the response was judged no further."""
    rows = timed({"m": [trace(FIRST), trace(SECOND, prompt="b")]})
    accepted = [each.value for each in table.by_position(rows)]
    assert accepted == pytest.approx([5 / 6, 2 / 6, 1 / 6, 0])
    length = summary(rows)["m"]["acceptance length"]
    assert length.value == pytest.approx(1 + sum(accepted)) and length.low is not None
    judged = [each.value for each in table.by_position(rows, "judged_at")]
    assert judged == pytest.approx([5 / 6, 2 / 3, 1 / 1, 0 / 1])
    third = table.by_position(rows, "judged_at")[2]
    assert third == (1, None, None), "resamples may have no such draft"
    cut = timed({"m": [trace([chain(3, 2, emitted=2)])]})
    assert [each.value for each in table.by_position(cut, "judged_at")] == [1, 1]
    trees = timed({"m": [trace([tree_round(2, 2), tree_round(3, 1), tree_round(0, 0)])]})
    assert trees["judged_at"][0] == [3, 1] and trees["accepted_at"][0] == [2, 1]
    sides = timed({"m": [trace([replace(r, overlap=SHARED) for r in FIRST])]})
    assert table.by_position(sides) == [] and "acceptance length" not in summary(sides)["m"]
    assert table.by_position(timed({"m": [plain(3)]})) == []


def test_categories_are_those_of_sets_that_have_several():
    names = {"a": "qa", "b": "rag", "c": "qa"}
    some = [replace(plain(1, prompt=p), category=name) for p, name in names.items()]
    alone = [replace(plain(1, prompt="d", dataset="code"), category="code"), plain(1, dataset="z")]
    parts = table.by_category(timed({"m": [*some, *alone]}))
    assert {name: each["prompt"].tolist() for name, each in parts["toy"].items()} == {
        "qa": ["a", "c"],
        "rag": ["b"],
    }
    assert list(parts) == ["toy"]


def test_nothing_is_an_empty_table_and_plain_decoding_has_no_draft_figures():
    rows = table.table("timed", [])
    assert rows.empty and {"kind", "policy", "dataset", "prompt", "repeat"} <= set(rows)
    assert summary(rows) == compare(rows) == {} and table.count_prompts(rows) == 0
    row = summary(timed({"autoregressive": [plain(3)]}))["autoregressive"]
    assert row["tokens/target call"].value == row[table.SPEEDUP].value == 1
    assert all(row[name].value == 0 for name in ("acceptance", "rollback RB", "accepted length M"))


def test_rollback_counts_steps_in_time():
    trees = trace([tree_round(2, 2), tree_round(3, 1), tree_round(0, 0)])
    counted = chain(6, 1)
    counted.overlap = StageTrace("branch", 1, 2, 4, 0, [[1]], 3, 0, [])
    rows = summary(timed({"tree": [trees], "overlapped": [trace([counted])]}))
    assert rows["tree"]["rollback RB"].value == 3 / 6
    assert rows["overlapped"]["rollback RB"].value == 3 / 4
    assert rows["overlapped"]["class some"].value == 1 and "waste" not in rows["tree"]


def test_shares_of_decode_time():
    rounds = [chain(1, 1, draft=0.2, target=0.5, stop=0.1, verify=0.05)]
    row = summary(timed({"m": [with_prefill(rounds)]}))["m"]
    assert row["target"].value == 0.5 and row["other"].value == pytest.approx(0.15)
    assert row["overhead"].value == pytest.approx(0.3)
    assert row["stop rule time"].value == pytest.approx(0.1 / 1.5)


def test_overhead_is_the_time_in_which_no_model_has_a_job():
    first, second = chain(1, 1, draft=0.4, target=0.5), chain(1, 0, draft=0.1)
    spans = [Span("target", "verify", 0.5, 1.0, 2), Span("draft", "branch stage", 0.6, 0.9, 3)]
    first.overlap = StageTrace("pre_verify", None, 0, 3, 0, [[1]], 0, 0, spans)
    later = [Span("draft", "branch stage", 1.1, 1.3, 1)]
    second.overlap = StageTrace("branch", 2, 1, 3, 0, [[1]], 3, 0, later)
    row = summary(timed({"m": [with_prefill([first, second])]}))["m"]
    assert row["draft"].value + row["target"].value == pytest.approx(1)
    assert row["overhead"].value == pytest.approx(0.3)
    assert row["target idle"].value == row["draft idle"].value == pytest.approx(0.5)


def test_a_speed_up_is_a_ratio_of_sums_on_shared_prompts():
    """However different the prompts are, a method that is twice as fast on each is twice as fast;
    repeats of a prompt are added up."""
    seconds = {"a": 1.0, "b": 2.0, "c": 9.0}
    slow = [plain(8, 2 * s, p) for p, s in seconds.items() for _ in range(2)]
    fast = [plain(8, s, p) for p, s in seconds.items() for _ in range(2)]
    rows = timed({"autoregressive": slow, "m": [*fast, plain(8, 0.1, "elsewhere")]})
    assert rows["repeat"].tolist() == [0, 1] * 6 + [0]
    speeds = compare(rows)
    assert speeds["m"] == (2, 2, 2) and speeds["autoregressive"] == Estimate(1.0)
    assert compare(rows, "m")["autoregressive"].value == 0.5
    slow, fast = [plain(6, 6.0), plain(6, 2.0, "b")], [plain(6, 1.0), plain(6, 2.0, "b")]
    uneven = timed({"autoregressive": slow, "m": fast})
    speed = compare(uneven)["m"]
    assert speed.value == pytest.approx((12 / 3) / (12 / 8))
    assert (speed.low, speed.high) == (1, 6)
    assert compare(uneven[uneven["prompt"] == "a"])["m"] == (6, None, None), "one prompt"


def test_an_interval_covers_as_often_as_it_says():
    generator, inside = torch.Generator().manual_seed(0), 0
    for speeds in torch.rand(100, 40, generator=generator).exp().tolist():
        estimate = table.ratio_of(np.array(speeds), np.ones(40))
        assert estimate.low is not None and estimate.high is not None
        inside += estimate.low < math.e - 1 < estimate.high
    assert 88 <= inside <= 99


def test_a_replay_fills_the_same_columns_and_a_cost_table_prices_them():
    """Every second rollout is right to the end: rounds of 2 tokens at 0, 3, 4 and so on."""
    length, gamma = 6, 3
    right = np.array([[position % 2 == 0] * gamma for position in range(length)])
    facts = {"prompt_id": "a", "length": length, "max_new": length, "drawn": [gamma] * length}
    facts |= {name: np.full((length, gamma), 0.5) for name in ("confidence", "max_q", "entropy")}
    facts |= {"tokens": np.ones((length, gamma)), "accept": right, "accepted": right.sum(1)}
    replayer = Replayer(build([facts], greedy=True), 2)
    counts = replayer.replay(Fixed(1).policy(replayer.table), 2)
    rows = table.counted("counted", "fixed", counts, ["a"], 2.0)
    names = ("emitted", "rounds", "steps", "lost", "run_tokens", "runs")
    assert [rows[name][0] for name in names] == [6, 3, 5, 2, 3, 3]
    cost = cost_table(1.0, {1: 5.0, 3: 6.0}, 5.0)
    priced = table.price(rows, cost)
    assert priced["modelled"].tolist() == cost.price(counts).tolist() == [5 + 5.5 + 6 + 6]
    assert table.ratio(priced, "modelled_plain", "modelled").value == pytest.approx(30 / 22.5)


def test_a_table_is_read_as_it_was_saved(tmp_path):
    rows = timed({"m": [trace(FIRST, 2.0)], "n": [trace(SECOND)]})
    table.save(rows, tmp_path / table.FILE)
    again, lists = pd.read_parquet(tmp_path / table.FILE), ["calls_by_drafted", "accepted_at"]
    lists.append("judged_at")
    pd.testing.assert_frame_equal(again.drop(columns=lists), rows.drop(columns=lists))
    assert all(again[name][0].tolist() == list(rows[name][0]) for name in lists)


def test_the_docs_say_what_every_column_means():
    text = (ROOT / "docs/file-formats.md").read_text()
    section = text[text.index("measurements.parquet") :]
    assert set(table.SCHEMA) <= set(re.findall(r"`(\w+)`", section))
    for column in table.SCHEMA:
        cells = re.search(rf"^\| `{column}` \|(.*)\|$", section, re.MULTILINE)
        assert cells and "|" not in cells[1], f"{column}: a name and a meaning"


def test_no_name_of_a_dataset_hides_all_of_them():
    names = ["all", "pooled", '"all"', '""all""', "", "all "]
    rows = pd.DataFrame({"dataset": names, "prompt": range(len(names))})
    shown = table.by_dataset(rows)
    assert len(shown) == 1 + len(names), "each is called something else"
    assert len(shown["all"]) == len(names) and shown['"all"']["dataset"].tolist() == ["all"]
    assert [table.shown_as(name) for name in ("odd", "all", "All")] == ["odd", '"all"', "All"]
    assert list(table.by_dataset(rows[:1])) == ["all"], "one dataset is all of them"


def test_markdown_lines_up():
    assert markdown(["a", "long"], [["wide", "b"]]).splitlines() == [
        "| a    | long |",
        "| ---- | ---- |",
        "| wide | b    |",
    ]


def test_the_turns_of_a_conversation_are_one_observation() -> None:
    prompts = [f"{name}#turn{turn}" for name in "abcdefgh" for turn in (1, 2, 3)]
    speed = np.repeat(np.arange(1.0, 9.0), 3)  # differs between conversations, not within
    rows = [
        {"policy": "p", "prompt": prompt, "emitted": 10.0, "seconds": 10 / each}
        for prompt, each in zip(prompts, speed, strict=True)
    ]
    whole = [row for row in rows if row["prompt"].endswith("#turn1")]
    turns, alone = (
        table.ratio(table.table("timed", some), "emitted", "seconds") for some in (rows, whole)
    )
    assert turns == pytest.approx(alone)
