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
from evaluation.lossless import broken_invariants
from evaluation.replay.simulate import Replayer
from evaluation.table import accepted_lengths, compare, markdown, summary, timed
from runtime.intervals import Estimate

ROOT = Path(__file__).parents[3]


def round_(
    drafted: int, accepted: int, emitted: int, forwards: int = 0, **seconds: float
) -> RoundTrace:
    tokens = list(range(10, 10 + drafted))
    committed = [*tokens[:accepted], *[7] * (emitted - accepted)]
    times = {s: seconds.get(s, 0.0) for s in STAGES}
    parents, q = list(range(drafted)), [0.5] * drafted
    return RoundTrace(tokens, parents, q, accepted, accepted, committed, [], forwards, times)


def trace(
    rounds: list[RoundTrace], seconds: float = 1.0, prefill: float = 0.0, prompt: str = "a"
) -> Trace:
    tokens = [token for r in rounds for token in r.tokens]
    return Trace(5, tokens, rounds, prefill, seconds, prompt_id=prompt, dataset="toy")


# 3 + 0 of 4 + 2 accepted, then 2 of 2, then 1 of 3, and one token without a draft
FIRST = [
    round_(4, 3, 4, 4),
    round_(2, 0, 1, 3),
    round_(2, 2, 3, 2),
    round_(3, 1, 2, 3),
    round_(0, 0, 1),
]
SECOND = [round_(1, 1, 2, 1), round_(1, 1, 2, 1)]


def plain(tokens: int, seconds: float = 1.0, prompt: str = "a") -> Trace:
    return trace([round_(0, 0, 1) for _ in range(tokens)], seconds, prompt=prompt)


# Lengths that are accepted ------------------------------------------------------------------------


def test_a_serial_round_is_an_accepted_length_by_itself() -> None:
    assert accepted_lengths(trace(FIRST)) == [3, 0, 2, 1]
    assert accepted_lengths(plain(1)) == []


def test_accepted_lengths_of_models_side_by_side_span_rounds() -> None:
    """And end at rejections, or with the request."""
    shared = StageTrace("draft", 1, 1, 1, 1, [], 0, 0, [])
    assert accepted_lengths(trace([replace(r, overlap=shared) for r in FIRST])) == [3, 0, 3]
    assert accepted_lengths(trace([replace(r, overlap=shared) for r in SECOND])) == [2]
    trees = [tree_round(2, 2), tree_round(3, 1), tree_round(1, 1), tree_round(0, 0)]
    inner = [replace(r, overlap=shared) for r in [*trees, tree_round(2, 2)]]
    assert accepted_lengths(trace(inner)) == [2 + 1 + 1, 0, 2], "only inner rows of a tree reject"


def tree_round(row: int, accepted: int) -> RoundTrace:
    """Two children of the root, rows 1 and 3, and a child of the first, row 2."""
    committed, seconds = [7] * (accepted + 1), dict.fromkeys(STAGES, 0.0)
    return RoundTrace([4, 5, 6], [0, 1, 0], [0.5] * 3, row, accepted, committed, [], 2, seconds)


# Sums and ratios ----------------------------------------------------------------------------------


def test_ratios_are_of_sums_over_requests() -> None:
    rows = timed({"m": [trace(FIRST, 2.0), trace(SECOND, 1.0, prompt="b")]})
    assert rows["kind"].tolist() == ["timed"] * 2 and set(rows) <= set(table.SCHEMA)
    assert rows["calls_by_drafted"][0].tolist() == [1, 0, 2, 1, 1]
    row = {name: estimate.value for name, estimate in summary(rows)["m"].items()}
    assert row["tokens/s"] == 5 and table.SPEEDUP not in row, "nothing to compare with"
    assert row["tokens/target call"] == pytest.approx(15 / 7)
    assert row["drafted/round"] == pytest.approx(13 / 7)
    assert row["draft forwards/round"] == pytest.approx(14 / 7)
    assert row["accepted length M"] == pytest.approx((3 + 0 + 2 + 1 + 1 + 1) / 6)
    assert row["rollback RB"] == pytest.approx(5 / 13)
    assert row["acceptance"] == pytest.approx(8 / 13)


def test_rollback_counts_steps_in_time() -> None:
    """A tree has as many as its depth; where the models overlap the engine has counted them."""
    trees = trace([tree_round(2, 2), tree_round(3, 1), tree_round(0, 0)])
    counted = round_(6, 1, 2)
    counted.overlap = StageTrace("branch", 1, 2, 4, 0, [[1]], 3, 0, [])
    rows = summary(timed({"tree": [trees], "overlapped": [trace([counted])]}))
    assert rows["tree"]["rollback RB"].value == 3 / 6
    assert rows["overlapped"]["rollback RB"].value == 3 / 4
    assert rows["overlapped"]["class some"].value == 1 and "waste" not in rows["tree"]


def test_plain_decoding_has_no_draft_figures() -> None:
    row = summary(timed({"autoregressive": [plain(3)]}))["autoregressive"]
    assert row["tokens/target call"].value == row[table.SPEEDUP].value == 1
    assert (
        row["acceptance"].value == row["rollback RB"].value == row["accepted length M"].value == 0
    )


def test_shares_of_decode_time() -> None:
    rounds = [round_(1, 1, 2, 1, draft=0.2, target=0.5, stop=0.1, verify=0.05)]
    row = summary(timed({"m": [trace(rounds, 1.5, prefill=0.5)]}))["m"]
    assert row["target"].value == 0.5 and row["other"].value == pytest.approx(0.15)
    assert row["overhead"].value == pytest.approx(0.3)
    assert row["predictor time"].value == pytest.approx(0.1 / 1.5)


def test_overhead_is_the_time_in_which_no_model_has_a_job() -> None:
    first, second = round_(1, 1, 2, 1, draft=0.4, target=0.5), round_(1, 0, 1, 1, draft=0.1)
    spans = [Span("target", "verify", 0.5, 1.0, 2), Span("draft", "branch stage", 0.6, 0.9, 3)]
    first.overlap = StageTrace("pre_verify", None, 0, 3, 0, [[1]], 0, 0, spans)
    later = [Span("draft", "branch stage", 1.1, 1.3, 1)]
    second.overlap = StageTrace("branch", 2, 1, 3, 0, [[1]], 3, 0, later)
    row = summary(timed({"m": [trace([first, second], 1.5, prefill=0.5)]}))["m"]
    assert row["draft"].value + row["target"].value == pytest.approx(1)
    assert row["overhead"].value == pytest.approx(0.3)
    assert row["target idle"].value == row["draft idle"].value == pytest.approx(0.5)


# Comparing ----------------------------------------------------------------------------------------


def test_a_speed_up_is_a_ratio_of_sums_on_shared_prompts() -> None:
    """However different the prompts are, a method that is twice as fast on each is twice as fast;
    repeats of a prompt are added up."""
    seconds = {"a": 1.0, "b": 2.0, "c": 9.0}
    slow = [plain(8, 2 * s, p) for p, s in seconds.items() for _ in range(2)]
    fast = [plain(8, s, p) for p, s in seconds.items() for _ in range(2)]
    rows = timed({"autoregressive": slow, "m": [*fast, plain(8, 0.1, "elsewhere")]})
    assert rows["repeat"].tolist() == [0, 1] * 6 + [0]
    found = compare(rows)
    assert found["m"] == (2, 2, 2) and found["autoregressive"] == Estimate(1.0)
    assert compare(rows, "m")["autoregressive"].value == 0.5
    uneven = timed(
        {
            "autoregressive": [plain(6, 6.0), plain(6, 2.0, "b")],
            "m": [plain(6, 1.0), plain(6, 2.0, "b")],
        }
    )
    speed = compare(uneven)["m"]
    assert speed.value == pytest.approx((12 / 3) / (12 / 8))
    assert (speed.low, speed.high) == (1, 6)
    assert compare(uneven[uneven["prompt"] == "a"])["m"] == (6, None, None), "one prompt"


def test_an_interval_covers_as_often_as_it_says() -> None:
    generator, inside = torch.Generator().manual_seed(0), 0
    for speeds in torch.rand(100, 40, generator=generator).exp().tolist():
        above, below = np.array(speeds), np.ones(40)
        found = table.ratio_of(above, below)
        assert found.low is not None and found.high is not None
        inside += found.low < math.e - 1 < found.high
    assert 88 <= inside <= 99


# Other producers ----------------------------------------------------------------------------------


def half_right(length: int = 6, gamma: int = 3) -> Replayer:
    """Every second rollout is right to the end: rounds of 2 tokens at 0, 3, 4 and so on."""
    right = np.array([[position % 2 == 0] * gamma for position in range(length)])
    facts = {"prompt_id": "a", "length": length, "max_new": length, "drawn": [gamma] * length}
    some = {name: np.full((length, gamma), 0.5) for name in ("confidence", "max_q", "entropy")}
    tokens = {"tokens": np.ones((length, gamma)), "accept": right, "accepted": right.sum(1)}
    return Replayer(build([facts | some | tokens], greedy=True), 2)


def test_a_replay_fills_the_same_columns_and_a_cost_table_prices_them() -> None:
    replayer = half_right()
    counts = replayer.replay(Fixed(1).policy(replayer.table), 2)
    rows = table.counted("counted", "fixed", counts, ["a"], 2.0)
    names = ("emitted", "rounds", "steps", "lost", "run_tokens", "runs")
    assert [rows[name][0] for name in names] == [6, 3, 5, 2, 3, 3]
    cost = cost_table(1.0, {1: 5.0, 3: 6.0}, 5.0)
    priced = table.price(rows, cost)
    assert priced["modelled"].tolist() == cost.price(counts).tolist() == [5 + 5.5 + 6 + 6]
    assert table.ratio(priced, "modelled_plain", "modelled").value == pytest.approx(30 / 22.5)


def test_a_table_is_read_as_it_was_saved(tmp_path: Path) -> None:
    rows = timed({"m": [trace(FIRST, 2.0)], "n": [trace(SECOND)]})
    table.save(rows, tmp_path / table.FILE)
    again = table.read(tmp_path / table.FILE)
    pd.testing.assert_frame_equal(
        again.drop(columns="calls_by_drafted"), rows.drop(columns="calls_by_drafted")
    )
    assert again["calls_by_drafted"][0].tolist() == rows["calls_by_drafted"][0].tolist()


def test_the_docs_say_what_every_column_means() -> None:
    text = (ROOT / "docs/file-formats.md").read_text()
    section = text[text.index("measurements.parquet") :]
    named = set(re.findall(r"`(\w+)`", section))
    assert {column for column in table.SCHEMA if column not in named} == set()


# By dataset, and in words -------------------------------------------------------------------------

NAMES = ["all", "pooled", '"all"', '""all""', "", "all "]


def test_no_name_of_a_dataset_hides_all_of_them() -> None:
    rows = pd.DataFrame({"dataset": NAMES, "prompt": range(len(NAMES))})
    shown = table.by_dataset(rows)
    assert len(shown) == 1 + len(NAMES), "each is called something else"
    assert len(shown["all"]) == len(NAMES) and shown['"all"']["dataset"].tolist() == ["all"]
    assert [table.shown_as(name) for name in ("odd", "all", "All")] == ["odd", '"all"', "All"]
    assert list(table.by_dataset(rows[:1])) == ["all"], "one dataset is all of them"


def test_markdown_lines_up() -> None:
    assert markdown(["a", "long"], [["wide", "b"]]).splitlines() == [
        "| a    | long |",
        "| ---- | ---- |",
        "| wide | b    |",
    ]


def test_invariants() -> None:
    sound = trace(FIRST)
    assert broken_invariants(sound, 11, frozenset({99})) == []
    assert broken_invariants(sound, 10, frozenset({99})) == ["longer than max_new_tokens"]
    assert broken_invariants(sound, 11, frozenset({7})) == ["goes on after EOS"]
    withdrawn = trace([round_(4, 3, 4)])
    withdrawn.rounds[0].draft_tokens[1] = 3
    fact = "a round commits other tokens than it accepted"
    assert broken_invariants(withdrawn, 9, frozenset()) == [fact]
