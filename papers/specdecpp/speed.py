"""SpecDec++ compared with other methods, and the linear model of the time of a decode by its draft
and target forwards."""

from collections.abc import Sequence
from functools import partial

from papers.specbranch.latency import machine
from reports.artifacts import Evaluation, Json
from reports.figure import Entry, Figure, Missing, Record
from reports.figures.comparison import MEASURED, MODELLED, measured, modelled
from reports.figures.times import ROUND_TIMES, step_times
from reports.runs import Run, each_setting, runs, with_method

NEEDS = "needs SpecDec++ decoded: python scripts/evaluate.py experiment=specdecpp"
TABLES = "SpecDec++, tables 1 and 4"


def specdecpp_speed(evaluations: Sequence[Evaluation]) -> Figure:
    title = "SpecDec++ and what it is compared with"
    return measured("specdecpp-speed", title, TABLES, specdecpp(evaluations))


def specdecpp_modelled(evaluations: Sequence[Evaluation]) -> Figure:
    title = "SpecDec++ and what it is compared with, on other machines"
    return modelled("specdecpp-modelled", title, TABLES, specdecpp(evaluations))


def specdecpp_times(evaluations: Sequence[Evaluation]) -> Figure:
    title = "Where a round's time goes: SpecDec++ and others"
    source = "Ours; SpecBranch's table 9 has the times of its own rounds"
    return step_times("specdecpp-times", title, source, specdecpp(evaluations))


def specdecpp(evaluations: Sequence[Evaluation]) -> list[Run]:
    """Return all runs of the evaluations that have SpecDec++."""
    return runs(with_method(evaluations, lambda how: how.stop == "SpecDecPPStop", NEEDS))


PAPER = (
    ("SpecDec++, on A100s", 23.4, 112.0),
    ("SpecDec++, on A100s, each model alone", 20.7, 108.0),
)
"""All of it fitted, none of it a median."""


def forward_times(costs: Sequence[Json]) -> Figure:
    """Return seconds of a draft and a target forward by regression over whole generations, and the
    medians timed alone."""
    if not costs:
        raise Missing("needs measured costs: python scripts/tune.py")
    records = []
    for cost in costs:
        fit, seconds = cost["regression"], cost["seconds"]
        alone = seconds["target"].get("1", seconds["autoregressive"])
        fitted = (1e3 * fit["draft"], 1e3 * fit["target"])
        medians = (1e3 * seconds["draft"], 1e3 * alone)
        records.append(_times(machine(cost), *fitted, fit["r2"], fit["rows"], *medians))
    return Figure(
        name="forward-times",
        title="T = t_draft N_draft + t_target N_target",
        source="SpecDec++, table 2",
        kind="modelled",
        n=f"{sum(cost['regression']['rows'] for cost in costs)} generations",
        interval=(
            "no interval: one least-squares fit over all generations of a file, R^2 says how good"
            " it is"
        ),
        records=[*records, *(_times(*printed) for printed in PAPER)],
    )


def _times(
    machine: str,
    draft: float,
    target: float,
    r2: float | None = None,
    generations: int | None = None,
    draft_median: float | None = None,
    target_median: float | None = None,
) -> Record:
    """Return a row; times are milliseconds."""
    return {
        "machine": machine,
        "t_draft, fitted (ms)": draft,
        "t_target, fitted (ms)": target,
        "R^2": r2,
        "generations": generations,
        "draft forward, median (ms)": draft_median,
        "target forward of one row, median (ms)": target_median,
    }


FIGURES = (
    Entry(
        "Forward times by regression",
        "An R^2 near 1 means that a decode takes what its forwards take, so that counting them is"
        " enough to price it. The medians are of single rounds, drawing and verification included.",
        lambda artifacts: [partial(forward_times, artifacts.costs)],
    ),
    Entry("SpecDec++ and what it is compared with", MEASURED, each_setting(specdecpp_speed)),
    Entry("SpecDec++ on other machines", MODELLED, each_setting(specdecpp_modelled)),
    Entry("Where a round's time goes: SpecDec++", ROUND_TIMES, each_setting(specdecpp_times)),
)
