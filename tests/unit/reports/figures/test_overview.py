"""The tables of all evaluations on known results."""

from pathlib import Path
from typing import Any

import pytest

from decoding.trace import STAGES, Trace
from evaluation.metrics import Metrics, Spread
from reports.artifacts import Evaluation
from reports.figure import Missing, save
from reports.figures.general.speed import speedups, time_shares


def metrics(speed: float, speedup: Spread | None) -> dict[str, Any]:
    counts = {
        "tokens_per_target_call": 1.5,
        "drafted_per_round": 2,
        "acceptance": 0.25,
        "predictor_share": 0.125,
        "requests": 6,
        "repeats": 2,
    }
    rest = dict.fromkeys((name for name in Metrics.__dataclass_fields__ if name not in counts), 0)
    values = {
        **rest,
        **counts,
        "tokens_per_second": Spread(speed, speed - 1, speed + 1),
        "speedup": speedup,
    }
    return Metrics(**values).to_dict()


def evaluation(name: str = "one") -> Evaluation:
    methods = {"autoregressive": metrics(10, None), "hrad": metrics(12, Spread(1.2, 1.1, 1.3))}
    shares = {
        stage: share for stage, share in zip(STAGES, (0.2, 0.5, 0.1, 0.05, 0.05, 0.1), strict=True)
    }
    results = {
        "metrics": {"pooled": methods, "datasets": {}},
        "profile": {name: {**shares, "overhead": 0.3} for name in methods},
        "run": {"config": {"warp": {"temperature": 1.0}}},
    }
    trace = Trace(prompt_tokens=1, tokens=[1], rounds=[], prefill_seconds=0.1, seconds=1.0)
    return Evaluation(Path("runs") / name, results, {name: [trace] * 6 for name in methods})


def test_speedups_have_the_spread_of_the_repeats() -> None:
    figure = speedups([evaluation(), evaluation("two")])
    assert (
        figure.kind == "measured" and "evaluations: 2" in figure.n and "repeats" in figure.interval
    )
    assert figure.column("evaluation") == ["one", "one", "two", "two"]
    assert figure.rows[0][4:10] == [3, 2, 10, 1, None, None]
    assert figure.rows[1] == [
        "one",
        "all",
        1.0,
        "hrad",
        3,
        2,
        12,
        1.2,
        1.1,
        1.3,
        1.5,
        0.25,
        12.5,
        "faster",
    ]
    assert {len(row) for row in figure.rows} == {len(figure.columns)}


def test_speedups_need_an_evaluation() -> None:
    with pytest.raises(Missing, match="python scripts/evaluate.py"):
        speedups([])


def test_time_shares_are_the_stages_in_percent() -> None:
    figure = time_shares([evaluation(), evaluation("two")])
    assert figure.kind == "measured" and "evaluations: 2" in figure.n and figure.draw is None
    assert figure.column("evaluation") == ["one", "one", "two", "two"]
    assert figure.rows[1] == ["one", "hrad", 6, 20.0, 50.0, 10.0, 5.0, 5.0, 10.0]
    assert all("% of decode time" in name for name in figure.columns[3:])
    with pytest.raises(Missing, match=r"python scripts/evaluate.py"):
        time_shares([])


def test_they_are_written_as_tables(tmp_path: Path) -> None:
    for figure, pictures in ((speedups([evaluation()]), 1), (time_shares([evaluation()]), 0)):
        table, *drawn = save(figure, tmp_path)
        assert len(drawn) == pictures
        assert len(table.read_text().splitlines()) == len(figure.rows) + 1
