"""Latency curves, forward times and frontiers, on numbers one can check by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch

from data_gen.storage.dataset import Harvest
from papers.specbranch.latency import (
    CURVES,
    LATENCY,
    acceptance,
    expected,
    latency,
    sequential,
    theorem_1,
)
from papers.specdecpp.forward_times import forward_times
from reports.artifacts import Evaluation
from reports.figure import Missing, save
from reports.figures.thresholds import DISCARD, VERIFICATION, frontier, tuned
from reports.harvest_data import Rounds
from tests.helpers.data.harvests import write_harvest
from tests.helpers.evaluation.evaluations import evaluation as made
from tests.helpers.evaluation.evaluations import method, plain

MACHINE = {
    "hardware": {"target": "cpu", "draft": "cpu"},
    "dtypes": {"target": "f32", "draft": "f32"},
    "threads": 2,
}
COST: dict[str, Any] = {
    "seconds": {
        "draft": 0.01,
        "target": {"1": 0.05, "3": 0.06},
        "autoregressive": 0.04,
        "calls": {},
    },
    "regression": {"draft": 0.011, "target": 0.045, "r2": 0.99, "rows": 44},
    "measured_on": MACHINE,
    "pair": {"name": "toy"},
}
ROUNDS = Rounds(
    1.0, torch.tensor([0, 1, 3, 2]), torch.tensor([3, 3, 3, 2]), torch.tensor([0, 0, 1, 1])
)


def point(figure: Any, curve: str, g: int) -> list[Any]:
    return next(row[2:] for row in figure.rows if row[:2] == [curve, g])


def test_curves_are_the_formulas() -> None:
    assert expected(3, 0.5) == pytest.approx(0.5 * (1 - 0.5**3) / 0.5)
    assert sequential(3, 4, 0.5) == pytest.approx((3 + 4) * (1 - 0.5) / (1 - 0.5**4) / 4)
    assert theorem_1(2, 4, 0.5) == pytest.approx(2 * 4 / ((1 + 0.25) * 0.75) / 4)
    assert [CURVES[name](8, 4, 0.5) for name in list(CURVES)[::2]] == pytest.approx(
        [12 / 9 / 4, 1 / 4]
    )


def test_acceptance_is_accepted_over_tested() -> None:
    assert acceptance([ROUNDS]).value == pytest.approx(6 / (6 + 2))  # two rounds end in a rejection


def test_latency_counts_rounds_that_are_long_enough() -> None:
    figure = latency([ROUNDS], COST)
    assert "a = 0.750" in figure.title and "c = 4.00" in figure.title
    assert point(figure, "one after the other", 2)[0] == pytest.approx(sequential(2, 4, 0.75))
    # accepted of 1: 0 1 1 1, of 3: 0 1 3, and the fourth round ends after 2 tokens
    assert point(figure, "one after the other, counted", 1)[0] == pytest.approx(
        (1 + 4) / (3 / 4 + 1) / 4
    )
    value, low, high = point(figure, "one after the other, counted", 3)
    assert value == pytest.approx((3 + 4) / (4 / 3 + 1) / 4) and low <= value <= high
    # of 4 tokens only rejections are known, which would make acceptance look worse than it is
    counted = [row[1] for row in figure.rows if row[0] == "one after the other, counted"]
    assert counted == [1, 2, 3]
    assert (figure.kind, figure.n) == (
        "modelled",
        "2 prompts, 4 rounds of toy; c on cpu, f32, 2 threads",
    )


def evaluation(**other: Any) -> Evaluation:
    lengths = {
        f"token_{g}": method("serial", "chain", "token", "fixed", stop={"gamma": g}) for g in (1, 2)
    }
    traces = {
        "autoregressive": [plain(4, 4.0)],
        "token_1": [plain(4, 3.2)],
        "token_2": [plain(4, 8.0)],
    }
    found = made(lengths, traces)
    found.results["run"] |= {**MACHINE, **other}
    return found


def test_what_was_decoded_on_that_machine_is_marked() -> None:
    figure = latency([ROUNDS], COST, [evaluation()])
    assert [point(figure, "fixed length, decoded", g)[0] for g in (1, 2)] == pytest.approx(
        [0.8, 2.0]
    )
    elsewhere = latency([ROUNDS], COST, [evaluation(threads=1)])
    assert "fixed length, decoded" not in elsewhere.column("curve")


def test_forward_times_are_those_of_the_file_and_the_papers() -> None:
    figure = forward_times([COST])
    assert figure.rows[0][1:] == pytest.approx([11, 45, 0.99, 44, 10, 50])
    printed = [list(row[1:]) for row in figure.rows[-2:]]
    assert printed == [[23.4, 112.0, *[None] * 4], [20.7, 108.0, *[None] * 4]]
    assert figure.n == "44 generations" and "no interval" in figure.interval


CHOICE = {
    "rule": "fixed",
    "threshold": 2,
    "expected": 1.3,
    "speedup": 1.2,
    "interval": [1.1, 1.3],
    "regret": 0.25,
    "discard_rate": 0.3,
    "verification_rate": 0.6,
}
FOUND: dict[str, Any] = {
    "pair": {"name": "toy"},
    "warp": {"temperature": 0.0},
    "draft_warp": {"temperature": 0.0},
    "cost": "measure",
    "chosen_on": "calibration",
    "judged_on": "test",
    "data": {"folder": "data/rounds"},
    "frontier": {
        "fixed": {"points": [[1, 0.3, 0.7], [2, 0.5, 0.6]], "fixed_dominated": None},
        "confidence": {"points": [[0.5, 0.2, 0.6]], "fixed_dominated": 1.0},
    },
    "oracle_calls": [60, 40],
    "results": {"chosen": {"rules": {"fixed": CHOICE}, "oracle_speedup": 1.5, "advice": "fixed"}},
}


def test_the_frontier_has_the_oracle_of_a_greedy_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    figure = frontier(FOUND, [Harvest.open(write_harvest(Path("data/rounds")))])
    assert figure.column("rule") == ["fixed", "fixed", "confidence", "oracle"]
    assert figure.column(DISCARD) == [0.3, 0.5, 0.2, 0.0] and figure.column(VERIFICATION) == [
        0.7,
        0.6,
        0.6,
        0.4,
    ]
    assert figure.column("fixed lengths dominated, %") == [None, None, 100.0, None]
    assert (figure.kind, figure.n) == ("measured", "4 prompts, test split of rounds")


def test_a_sampled_target_has_no_oracle_point() -> None:
    figure = frontier({**FOUND, "oracle_calls": None})
    assert "oracle" not in figure.column("rule") and figure.kind == "modelled"
    assert figure.n == "test split of rounds"


def test_tuned_thresholds_keep_their_intervals() -> None:
    figure = tuned(FOUND)
    assert figure.rows[0][:7] == ["measure", "fixed", 2, 1.2, 1.1, 1.3, 25.0]
    assert figure.column("oracle, modelled") == [1.5] and figure.kind == "modelled"


def test_what_is_missing_is_said() -> None:
    for build, command in (
        (lambda: forward_times([]), "tune.py"),
        (lambda: latency([], COST), "gen_data.py"),
    ):
        with pytest.raises(Missing, match=command):
            build()


def test_pictures_are_drawn(tmp_path: Path) -> None:
    for figure in (
        latency([ROUNDS], COST, [evaluation()]),
        forward_times([COST]),
        frontier(FOUND),
        tuned(FOUND),
    ):
        assert all(path.stat().st_size > 100 for path in save(figure, tmp_path))
    assert LATENCY in latency([ROUNDS], COST).columns
