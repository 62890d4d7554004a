"""The tables of all evaluations on known results."""

from pathlib import Path

import pytest

from reports.artifacts import Evaluation
from reports.figure import Missing, save
from reports.figures.speed import speedups, time_shares
from runtime.intervals import METHOD
from tests.helpers.evaluation.evaluations import chain, plain, trace


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


def test_speedups_have_intervals_over_prompts() -> None:
    figure = speedups([evaluation(), evaluation("two")])
    assert figure.kind == "measured" and "evaluations: 2" in figure.n
    assert figure.interval == METHOD
    assert figure.column("evaluation") == ["one", "one", "two", "two"]
    assert figure.rows[0][4:10] == [3, 2, 2, 1, None, None]
    facts = ["one", "all", 1.0, "hrad", 3, 2, 4, 2, 2, 2, 4, 0.75, pytest.approx(10), "faster"]
    assert figure.rows[1] == facts
    assert {len(row) for row in figure.rows} == {len(figure.columns)}


def test_speedups_need_an_evaluation() -> None:
    with pytest.raises(Missing, match="python scripts/evaluate.py"):
        speedups([])


def test_time_shares_are_the_stages_in_percent() -> None:
    figure = time_shares([evaluation(), evaluation("two")])
    assert figure.kind == "measured" and "evaluations: 2" in figure.n and figure.draw is None
    assert figure.column("evaluation") == ["one", "one", "two", "two"]
    assert figure.rows[1] == ["one", "hrad", 6, *map(pytest.approx, (20, 40, 5, 5, 10, 20))]
    assert all("% of decode time" in name for name in figure.columns[3:])
    with pytest.raises(Missing, match=r"python scripts/evaluate.py"):
        time_shares([])


def test_they_are_written_as_tables(tmp_path: Path) -> None:
    for figure, pictures in ((speedups([evaluation()]), 1), (time_shares([evaluation()]), 0)):
        table, *drawn = save(figure, tmp_path)
        assert len(drawn) == pictures
        assert len(table.read_text().splitlines()) == len(figure.rows) + 1
