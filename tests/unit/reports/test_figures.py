"""Figures of any pair, on predictions, tokens, tunings and schedules one can count."""

from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch

from data_gen.storage.dataset import Harvest
from decoding.batch_cost import PerRow, tabled
from papers.dyspec.acceptance import acceptance_by_probability
from reports.artifacts import Artifacts, Checkpoint, Evaluation, gather
from reports.figures.batch import FIGURES, LOGGED, OVER, scheduler
from reports.figures.calibration import base_rate, diagrams, drift
from reports.figures.confidence import QUANTITIES, by_verdict
from reports.figures.confusion import confusions
from reports.figures.speed import speedups, time_shares
from reports.figures.thresholds import DISCARD, VERIFICATION, frontier, tuned
from reports.harvest_data import DraftTokens, Predicted
from runtime.intervals import METHOD
from serving.schedule import Schedule, write_schedule
from tests.helpers.data.harvests import write_harvest
from tests.helpers.evaluation.evaluations import chain, drawn, interval, lacks, plain, trace

COUNTS = [[6, 2, 2], [1, 3, 1], [0, 1, 4]]


def two(f: torch.Tensor) -> torch.Tensor:
    return torch.stack([1 - f, f], 1)


ACCEPT = torch.tensor([0.2, 0.2, 0.8, 0.8])
HOME = Predicted(
    checkpoint="head",
    predictor="specdecpp",
    temperature=1.0,
    trained_on="train",
    dataset="train",
    in_domain=True,
    as_trained=two(ACCEPT / 2),
    calibrated=two(ACCEPT),
    targets=two(torch.tensor([0.0, 1.0, 1.0, 1.0])),
    group=torch.tensor([0, 0, 1, 1]),
)
AWAY = replace(HOME, dataset="other", in_domain=False)


def test_bins_hold_predictions_and_outcomes_before_and_after_or_the_likeliest_class():
    figure = diagrams([HOME, AWAY])
    assert figure.column("prompts of") == ["train, test split"] * 4 + ["other"] * 4
    assert figure.column("probabilities")[:4] == ["as trained"] * 2 + ["calibrated"] * 2
    assert figure.column("mean prediction")[:4] == pytest.approx([0.1, 0.4, 0.2, 0.8])
    assert figure.column("outcome")[:4] == pytest.approx([0.5, 1.0, 0.5, 1.0])
    assert figure.column("rows")[:4] == [2, 2, 2, 2]
    assert figure.n == "4 prompts, 8 rows" and figure.kind == "measured"
    assert "bootstrap" in figure.interval
    one_bin = replace(HOME, calibrated=two(torch.full((4,), 0.5)))
    ends = interval(diagrams([one_bin]).records[-1], "outcome")
    assert ends == pytest.approx([0.75, 0.5, 1.0]), "over prompts"
    probs = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]])
    targets = torch.tensor([[1.0, 0, 0], [0, 1.0, 0]])
    said = {"as_trained": probs, "calibrated": probs, "targets": targets}
    figure = diagrams([replace(HOME, **said, group=torch.tensor([0, 1]))])
    assert figure.column("mean prediction")[0] == pytest.approx(0.6)
    assert figure.column("outcome")[0] == 0.5 and "most likely" in figure.how_to_read


def test_the_matrix_has_a_row_for_each_place_and_says_what_a_constant_would_score():
    figure = drift([HOME, AWAY])
    assert figure.column("prompts of") == ["train, test split", "other"]
    # bins of equal mass: |0.2 - 0.5| and |0.8 - 1| of half the rows each
    value, low, high = interval(figure.records[0], "calibration error")
    assert value == pytest.approx(0.25) and low <= value <= high
    assert figure.column("log loss")[0] == pytest.approx(-(log(0.8) + log(0.2) + 2 * log(0.8)) / 4)
    assert figure.column("base rate")[0] == pytest.approx(-(log(0.25) + 3 * log(0.75)) / 4)
    assert base_rate(two(torch.tensor([0.5, 0.5]))) == pytest.approx(log(2))
    for build in (diagrams, drift):
        lacks("train.py", build, [])


def hrad(counts: list[list[int]] | None) -> Checkpoint:
    decided = {"hrad": {"confusion": [[9]]}, "hrad, priors divided out": {"confusion": counts}}
    config = {
        "predictor": "hrad",
        "gamma": 3,
        "classes": ["none", "some", "all"],
        "metrics": {"test": decided if counts else {"hrad": {}}},
        "provenance": {"data": {"splits": {"test": {"prompts": 7, "rows": 20}}}},
    }
    return Checkpoint(Path("ck/h"), config)


def test_confusion_is_that_of_the_decision():
    figure = confusions(hrad(COUNTS))
    assert figure.column("rows") == [6, 2, 2, 1, 3, 1, 0, 1, 4]
    assert figure.column("of the true class, %")[:3] == [60, 20, 20]
    assert "Right 65.0%" in figure.how_to_read and "right 50.0%" in figure.how_to_read
    assert figure.n == "7 prompts, 20 rounds of 3 draft tokens"
    lacks("predictor=hrad", confusions, hrad(None))


TOKENS = DraftTokens(
    pair="toy",
    dataset="alpaca",
    temperature=1.0,
    draft_temperature=1.0,
    q=torch.tensor([0.05, 0.15, 0.95, 1.0]),
    max_q=torch.tensor([0.5, 0.6, 0.95, 1.0]),
    entropy=torch.tensor([3.0, 2.0, 1.0, 0.0]),
    accept=torch.tensor([0.2, 0.4, 1.0, 0.8]),
    accepted=torch.tensor([False, True, True, True]),
    group=torch.tensor([0, 0, 1, 1]),
)


def test_accepted_and_rejected_tokens_are_apart_of_every_dataset_and_temperature():
    q, highest, entropy = (by_verdict([TOKENS], quantity) for quantity in QUANTITIES)
    assert q.column("verdict") == ["accepted", "rejected"]
    assert q.column("tokens") == [3, 1] and q.column("prompts") == [2, 1]
    assert q.column("median") == pytest.approx([0.95, 0.05])
    assert q.column("mean q of the drawn token") == pytest.approx([0.7, 0.05])
    low = q.column("mean q of the drawn token low")
    assert low[0] is not None and low[1] is None, "one prompt has no interval"
    assert highest.column("mean highest q") == pytest.approx([0.85, 0.5])
    assert entropy.column("mean entropy (nats)") == pytest.approx([1.0, 3.0])
    assert entropy.column("95 %") == pytest.approx([1.9, 3.0])
    assert q.kind == "measured" and "bootstrap" in q.interval
    other = replace(TOKENS, temperature=0.0, dataset="gsm8k")
    figure = by_verdict([TOKENS, other], QUANTITIES[0])
    assert figure.column("temperatures") == ["T = 1"] * 2 + ["T = 0, draft 1"] * 2
    assert figure.column("dataset") == ["alpaca"] * 2 + ["gsm8k"] * 2
    assert figure.n == "toy, 4 prompts, 8 draft tokens"


def test_acceptance_is_averaged_within_bins_of_q():
    figure = acceptance_by_probability([TOKENS])
    assert figure.column("q from") == [0.0, 0.1, 0.9] and figure.column("q to") == [0.1, 0.2, 1.0]
    assert figure.column("acceptance") == pytest.approx([0.2, 0.4, 0.9])
    assert figure.column("mean q") == pytest.approx([0.05, 0.15, 0.975])
    assert figure.column("tokens, %") == [25, 25, 50]
    # prompts of other datasets are other prompts
    halved = replace(TOKENS, dataset="gsm8k", accept=TOKENS.accept / 2)
    figure = acceptance_by_probability([TOKENS, halved])
    assert figure.column("acceptance") == pytest.approx([0.15, 0.3, 0.675])
    value, low, high = interval(figure.records[0], "acceptance")
    assert low < value < high


def evaluation(name: str = "one") -> Evaluation:
    """Three prompts, twice each: eight tokens in 4 s, or with drafts in 2 s."""
    parts = {"draft": 0.4, "target": 0.8, "sample": 0.1, "verify": 0.1, "stop": 0.2}
    drafts = [chain(4, 3, **parts), chain(4, 3)]
    traces = {
        "autoregressive": [plain(8, 4.0, prompt) for prompt in "abcabc"],
        "hrad": [trace(drafts, 2.0, prompt) for prompt in "abcabc"],
    }
    results = {"run": {"config": {"warp": {"temperature": 1.0}}}}
    return Evaluation(Path("runs") / name, results, traces)


@pytest.mark.parametrize("build", [speedups, time_shares])
def test_every_method_of_every_evaluation_has_a_row(build):
    figure = build([evaluation(), evaluation("two")])
    assert figure.kind == "measured" and "evaluations: 2" in figure.n
    assert figure.column("evaluation") == ["one", "one", "two", "two"]
    if build is speedups:
        assert figure.interval == METHOD and figure.rows[0][4:10] == [3, 2, 2, 1, None, None]
        facts = ["one", "all", 1.0, "hrad", 3, 2, 4, 2, 2, 2, 4, 4, 0.75, pytest.approx(10)]
        assert figure.rows[1] == [*facts, "few prompts"]
    else:
        shares = map(pytest.approx, (20, 40, 5, 5, 10, 20))
        assert figure.rows[1] == ["one", "hrad", 6, *shares] and figure.draw is None
        assert all("% of decode time" in name for name in figure.columns[3:])
    alone = evaluation()
    del alone.traces["hrad"]  # type: ignore[attr-defined]
    assert len(build([alone]).rows) == 1 and build([alone]).draw is None, "nothing to compare"
    lacks("python scripts/evaluate.py", build, [])


CHOICE = {
    **{"rule": "fixed", "threshold": 2, "expected": 1.3, "speedup": 1.2, "interval": [1.1, 1.3]},
    **{"regret": 0.25, "discard_rate": 0.3, "verification_rate": 0.6},
}
TUNING: dict[str, Any] = {
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


def test_the_frontier_has_the_oracle_of_a_greedy_target(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    figure = frontier(TUNING, [Harvest.open(write_harvest(Path("data/rounds")))])
    assert figure.column("rule") == ["fixed", "fixed", "confidence", "oracle"]
    assert figure.column(DISCARD) == [0.3, 0.5, 0.2, 0.0]
    assert figure.column(VERIFICATION) == [0.7, 0.6, 0.6, 0.4]
    assert figure.column("fixed lengths dominated, %") == [None, None, 100.0, None]
    assert (figure.kind, figure.n) == ("measured", "4 prompts, test split of rounds")
    sampled = frontier({**TUNING, "oracle_calls": None})
    assert "oracle" not in sampled.column("rule") and sampled.kind == "modelled"
    assert sampled.n == "test split of rounds"


def test_tuned_thresholds_keep_their_intervals():
    figure = tuned(TUNING)
    assert figure.rows[0][:7] == ["measure", "fixed", 2, 1.2, 1.1, 1.3, 25.0]
    assert figure.column("oracle, modelled") == [1.5] and figure.kind == "modelled"


def way(requests: int, name: str, over: float) -> dict[str, Any]:
    def around(value: float) -> dict[str, float]:
        return {"value": value, "low": value - 0.125, "high": value + 0.125}

    ratios = {"over_fixed": around(over), "over_logged": around(2 * over)}
    known = {"requests": requests, "name": name, "drafted": 2}
    return {**known, "tokens_per_second": around(100 * over), **ratios}


WAYS = [way(r, name, r / 4) for r in (1, 4) for name in ("one length", "budget, sts")]
SCHEDULE: dict[str, Any] = {
    "file": "runs/schedule.json",
    "details": {"cost": {"name": "roof", "made": "modelled"}, "scheduler": {"a": WAYS, "b": WAYS}},
}


def test_every_way_of_scheduling_is_a_row_with_its_intervals():
    figure = scheduler(SCHEDULE)
    assert figure.kind == "modelled" and len(figure.rows) == 2 * len(WAYS)
    assert figure.column(OVER) == [0.25, 0.25, 1, 1] * 2
    assert figure.column(f"{LOGGED} low")[0] == 0.5 - 0.125


def test_a_schedule_is_found_and_one_without_a_simulation_draws_nothing(tmp_path):
    costs = tabled(PerRow(1.0, 0.1, 0.1, 0.0), [1, 4], 2)
    schedule = Schedule.at({1: 2, 4: 1}, costs)
    write_schedule(tmp_path / "a.json", schedule, "tune", SCHEDULE["details"])
    write_schedule(tmp_path / "b.json", schedule, "tune", {"scheduler": {}})
    found = gather([tmp_path])
    assert len(found.schedules) == 2 and not found.left_alone
    (build,) = FIGURES[0].builders(found)
    assert build().column("judged on") == ["a"] * 4 + ["b"] * 4
    (build,) = FIGURES[0].builders(Artifacts())
    lacks("needs a schedule", build)


def test_pictures_are_drawn(tmp_path):
    figures = [
        *(diagrams([HOME, AWAY]), drift([HOME, AWAY, replace(AWAY, checkpoint="head 2")])),
        *(by_verdict([TOKENS], quantity) for quantity in QUANTITIES),
        *(acceptance_by_probability([TOKENS]), confusions(hrad(COUNTS))),
        *(speedups([evaluation()]), time_shares([evaluation()])),
        *(frontier(TUNING), tuned(TUNING), scheduler(SCHEDULE)),
    ]
    for figure in figures:
        drawn(figure, tmp_path)
        lines = (tmp_path / f"{figure.name}.csv").read_text().splitlines()
        assert len(lines) == len(figure.rows) + 1
