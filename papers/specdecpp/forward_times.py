"""The linear model of the time of a decode: seconds of its draft and target forwards."""

from collections.abc import Sequence
from functools import partial

from decoding.models.machine import in_words
from reports.artifacts import Json
from reports.figure import Cell, Entry, Figure, Missing

NEEDS = "needs measured costs: python scripts/tune.py"
PAPER: Sequence[Sequence[Cell]] = (
    ("SpecDec++, on A100s", 23.4, 112.0, None, None, None, None),
    ("SpecDec++, on A100s, each model alone", 20.7, 108.0, None, None, None, None),
)
"""All of it fitted, none of it a median."""


def forward_times(costs: Sequence[Json]) -> Figure:
    """Seconds of a draft and a target forward by regression over whole generations, and the medians
    timed alone."""
    if not costs:
        raise Missing(NEEDS)
    rows = [_regression_row(cost) for cost in costs]
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
        columns=[
            *("machine", "t_draft, fitted (ms)", "t_target, fitted (ms)", "R^2", "generations"),
            *("draft forward, median (ms)", "target forward of one row, median (ms)"),
        ],
        rows=[*rows, *PAPER],
    )


def _regression_row(cost: Json) -> list[Cell]:
    fit, seconds = cost["regression"], cost["seconds"]
    alone = seconds["target"].get("1", seconds["autoregressive"])
    about = [_machine(cost), 1e3 * fit["draft"], 1e3 * fit["target"], fit["r2"], fit["rows"]]
    return [*about, 1e3 * seconds["draft"], 1e3 * alone]


def _machine(cost: Json) -> str:
    on = cost["measured_on"]
    return f"{in_words(on['hardware'])}, {in_words(on['dtypes'])}, {on['threads']} threads"


FIGURES = (
    Entry(
        "Forward times by regression",
        "An R^2 near 1 means that a decode takes what its forwards take, so that counting them is"
        " enough to price it. The medians are of single rounds, drawing and verification included.",
        lambda artifacts: [partial(forward_times, artifacts.costs)],
    ),
)
