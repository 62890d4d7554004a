"""Speed tables of hand-made evaluations, computed by hand."""

from pathlib import Path

import pytest

from evaluation.table import SPEEDUP
from papers.specbranch.speed import specbranch_modelled, specbranch_speed
from papers.specdecpp.speed import specdecpp_modelled, specdecpp_speed
from reports.figure import Missing, save
from reports.runs import CALLS, LENGTH, ROLLBACK, runs
from tests.helpers.evaluation.evaluations import (
    chain,
    evaluation,
    labels,
    method,
    overlapped,
    plain,
    trace,
)

HRAD = method("serial", "chain", "token", "hrad")
BRANCHES = method("overlapped", "branch_point", "token", "hrad", engine={"pre_verify": False})
HEAD = method("serial", "chain", "token", "acceptance")
# two prompts of 4 tokens; plain decoding takes 4 s each, ours 1 and 3 s
OURS = [trace([chain(3, 3)], 1.0, "a"), trace([chain(2, 1), chain(2, 1)], 3.0, "b")]
PLAIN = [plain(4, 4.0, "a"), plain(4, 4.0, "b")]
BESIDE = [trace([overlapped(2, 2, 4, 1)], 2.0, "a"), trace([overlapped(2, 0, 3, 3)], 2.0, "b")]


def compared(**results: object) -> list:
    found = evaluation(
        {"without_branch": HRAD, "specbranch": BRANCHES},
        {"autoregressive": PLAIN, "without_branch": OURS, "specbranch": BESIDE},
        **results,
    )
    found.config["modelled"] = ["measured", 2, 10]
    return [found]


def priced(speed: float) -> dict:
    """What an evaluation said of costs measured there, on all prompts."""
    figures = {"speed-up, measured": [speed, None, None], "speed-up, c=2": [7.0, None, None]}
    return {"all": {"without_branch": figures}}


def row_of(figure, method: str) -> dict:
    return next(
        row
        for row in (dict(zip(figure.columns, r, strict=True)) for r in figure.rows)
        if row["method"] == method
    )


def test_estimates_of_a_run() -> None:
    run = next(run for run in runs(compared()) if run.name == "without_branch")
    assert run.estimate(SPEEDUP) == (2, 4 / 3, 4), (
        "8 tokens in 4 s over 8 in 8; prompt b alone 4/3, prompt a alone 4"
    )
    assert run.estimate(CALLS) == (pytest.approx(8 / 3), 2, 4)
    assert run.estimate(LENGTH).value == pytest.approx(5 / 3), "5 tokens in 3 rounds"
    assert run.estimate(ROLLBACK) == (pytest.approx(2 / 7), 0, 0.5)
    # c = 2, draft forwards 7, target calls 3: 13 for 8 tokens, plain decoding 16
    assert run.modelled_speedup(2.0).value == pytest.approx(16 / 13)
    assert run.modelled_speedup(2.0)[1:] == (pytest.approx(8 / 8), pytest.approx(8 / 5))


def test_the_measured_table() -> None:
    figure = specbranch_speed(compared())
    ours, plainly = row_of(figure, "without branch"), row_of(figure, "autoregressive")
    assert (
        ours["drafted/round"] == pytest.approx(7 / 3)
        and ours["tokens/s"] == 2
        and ours["speed-up"] == 2
        and ours["speed-up high"] == 4
    )
    assert ours["rollback RB"] == pytest.approx(2 / 7)
    assert (
        plainly["speed-up"] == 1
        and plainly["speed-up low"] is None
        and plainly["accepted length M"] is None
    )
    assert row_of(figure, "specbranch")["rollback RB"] == pytest.approx(4 / 7), (
        "as the engine has counted"
    )
    assert (figure.kind, figure.n) == ("measured", "2 prompts, 13 rounds")
    assert "bootstrap" in figure.interval and "SpecBranch" in figure.source


def test_the_modelled_table_takes_ratios_and_what_was_priced() -> None:
    figure = specbranch_modelled(compared(summary=priced(1.25)))
    ours = row_of(figure, "without branch")
    assert figure.kind == "modelled"
    assert ours["speed-up, c = 2"] == pytest.approx(16 / 13), "priced here, not as stored"
    assert ours["speed-up, forwards as measured"] == 1.25
    assert row_of(figure, "specbranch")["speed-up, forwards as measured"] is None
    assert "speed-up, c = 10 low" in figure.columns


def test_datasets_together_have_no_stored_price() -> None:
    other = evaluation(
        {"specbranch": BRANCHES, "without_branch": HRAD},
        {
            "autoregressive": [plain(4, 4.0, dataset="other")],
            "specbranch": [trace([overlapped(1, 1, 1, 0)], dataset="other")],
            "without_branch": [trace([chain(1, 1)], 1.0, dataset="other")],
        },
        summary=priced(1.5),
    )
    other.config["modelled"] = ["measured", 2]
    figure = specbranch_modelled([*compared(summary=priced(1.25)), other])
    rows = {(row[1], row[2]): row for row in figure.rows}
    assert rows["other", "without branch"][
        figure.columns.index("speed-up, c = 10")
    ] == pytest.approx(2 * 10 / 11)
    stored = figure.columns.index("speed-up, forwards as measured")
    assert rows["toy", "without branch"][stored] == 1.25
    assert rows["other", "without branch"][stored] == 1.5
    assert rows["all", "without branch"][stored] is None


def test_specdecpp_is_known_by_its_stop_rule() -> None:
    found = evaluation({"stop_50": HEAD}, {"autoregressive": PLAIN, "stop_50": OURS})
    assert row_of(specdecpp_speed([*compared(), found]), "stop 50")["speed-up"] == 2
    found.config["modelled"] = [2]
    assert row_of(specdecpp_modelled([found]), "stop 50")["speed-up, c = 2"] == pytest.approx(
        16 / 13
    )


def test_without_ratios_asked_the_papers_are_priced() -> None:
    found = compared()
    del found[0].config["modelled"]
    names = specbranch_modelled(found).columns
    assert [name for name in names if name.endswith(" low")] == [
        f"speed-up, c = {c} low" for c in (4, 5, 10, 15)
    ]


def test_what_is_missing_is_named() -> None:
    alone = evaluation({"eps_10": BRANCHES}, {"autoregressive": PLAIN, "eps_10": BESIDE})
    for build, experiment in ((specdecpp_speed, "specdecpp"), (specbranch_speed, "specbranch")):
        with pytest.raises(Missing, match=f"python scripts/evaluate.py experiment={experiment}"):
            build([alone])


def test_they_draw(tmp_path: Path) -> None:
    for build in (specbranch_speed, specbranch_modelled):
        assert all(path.stat().st_size for path in save(build(compared()), tmp_path))
    assert labels(specbranch_speed(compared())) == {("speed-up, measured", "")}
    modelled = {("speed ratio c: draft forwards per target forward", "speed-up, modelled")}
    assert labels(specbranch_modelled(compared())) == modelled
