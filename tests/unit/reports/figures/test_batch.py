"""The figure of the simulated scheduler, from a file of tune.py."""

from pathlib import Path
from typing import Any

import pytest

from decoding.batch_cost import PerRow, tabled
from reports.artifacts import Artifacts
from reports.figure import Missing, save
from reports.figures.batch import FIGURES, LOGGED, OVER, scheduler
from reports.find_artifacts import gather
from serving.schedule import Schedule, write_schedule


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


def test_every_way_is_a_row_with_its_intervals(tmp_path: Path) -> None:
    figure = scheduler(SCHEDULE)
    assert figure.kind == "modelled" and len(figure.rows) == 2 * len(WAYS)
    assert figure.column(OVER) == [0.25, 0.25, 1, 1] * 2
    assert figure.column(f"{LOGGED} low")[0] == 0.5 - 0.125
    assert [path.suffix for path in save(figure, tmp_path)] == [".csv", ".png"]


def test_a_schedule_is_found_and_one_without_a_simulation_draws_nothing(tmp_path: Path) -> None:
    costs = tabled(PerRow(1.0, 0.1, 0.1, 0.0), [1, 4], 2)
    schedule = Schedule.at({1: 2, 4: 1}, costs)
    write_schedule(tmp_path / "a.json", schedule, "tune", SCHEDULE["details"])
    write_schedule(tmp_path / "b.json", schedule, "tune", {"scheduler": {}})
    found = gather([tmp_path])
    assert len(found.schedules) == 2 and not found.left_alone
    (build,) = FIGURES[0].builders(found)
    assert build().column("judged on") == ["a"] * 4 + ["b"] * 4
    (build,) = FIGURES[0].builders(Artifacts())
    with pytest.raises(Missing, match="needs a schedule"):
        build()
