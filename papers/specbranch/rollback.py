"""How much of what SpecBranch and others draft is rolled back."""

from collections.abc import Sequence
from functools import partial

from matplotlib.figure import Figure as Canvas

from papers.specbranch.speed import specbranch
from reports import drawing
from reports.artifacts import Evaluation
from reports.figure import Entry, Figure, Missing
from reports.runs import ROLLBACK, extent
from reports.settings import each_setting
from runtime.intervals import METHOD, columns

COMMAND = "python scripts/evaluate.py experiment=specbranch"


def rollback_rates(evaluations: Sequence[Evaluation]) -> Figure:
    """RB by method, dataset and temperature."""
    found = [run for run in specbranch(evaluations) if run.rows["drafted"].any()]
    if not found:
        raise Missing(f"needs requests in which something is drafted: {COMMAND}")
    names = ["T", "dataset", "method", *columns(ROLLBACK)]
    rows = [[run.temperature, run.dataset, run.label, *run.estimate(ROLLBACK)] for run in found]
    return Figure(
        name="rollback-rates",
        title="Rollback rate by method and dataset",
        source="SpecBranch, figures 5 and 11",
        kind="measured",
        n=extent(found),
        interval=METHOD,
        columns=names,
        rows=rows,
        draw=partial(_draw, drawing.records(names, rows)),
    )


def _draw(records: Sequence[drawing.Record], canvas: Canvas) -> None:
    for temperature, axes in drawing.by_temperature(canvas, records):
        here = [record for record in records if record["T"] == temperature]
        drawing.bars(axes, here, "dataset", ROLLBACK, "method")
        axes.set_ylim(0, 1)
        axes.set_xlabel("dataset")
    drawing.legend(canvas, canvas.axes[0])


FIGURES = (
    Entry(
        "Rollback rate by method and dataset",
        "Share of draft steps lost to a rejection; branches side by side take one step together."
        " Low is good, but a method that hardly drafts has a low rate too.",
        each_setting(rollback_rates),
    ),
)
