"""Methods side by side: measured against plain decoding of the same evaluation, and modelled for
other machines."""

from collections.abc import Sequence
from functools import partial

from matplotlib.figure import Figure as Canvas

from evaluation.table import ALL, BASELINE, SPEEDUP
from evaluation.timeline import TABLES
from reports import drawing
from reports.figure import Cell, Figure, Record, estimated
from reports.runs import CALLS, LENGTH, ROLLBACK, Run, extent, ratios_of, with_all
from runtime.intervals import METHOD, columns

NONE = (None, None, None)
MEASURED = (
    "Wall time of whole requests, prefill included, over that of plain decoding in the same run. A"
    " speed-up whose interval holds 1 is none."
)
MODELLED = (
    "The counts of the run, priced: what runs side by side takes as long as the slower model, all"
    " outside the models costs nothing. At speed ratio c a target forward costs c draft forwards,"
    " however many rows it has."
)
OTHER_TABLES = {"measured": "forwards as measured", "pipeline": "split target"}


def measured(name: str, title: str, source: str, runs: Sequence[Run]) -> Figure:
    """Return the figure of every method on every dataset, drawn with datasets apart."""
    return Figure(
        name=name,
        title=title,
        source=source,
        kind="measured",
        n=extent(runs),
        interval=f"{METHOD}, repeats pooled",
        records=[_measured(run) for run in with_all(runs)],
        draw=_draw_measured,
    )


def _measured(run: Run) -> Record:
    drafts = run.rows["drafted"].any()
    return {
        **run.labels,
        **{name: run.estimate(name).value for name in ("drafted/round", "tokens/s")},
        **run.columns(SPEEDUP, CALLS),
        **(
            run.columns(LENGTH, ROLLBACK)
            if drafts
            else {**estimated(LENGTH, NONE), **estimated(ROLLBACK, NONE)}
        ),
    }


def _draw_measured(records: Sequence[Record], canvas: Canvas) -> None:
    shown = [one for one in drawing.with_temperature(records) if one["method"] != BASELINE]
    size = (4.4, 1.2 + 0.3 * len(drawing.distinct(shown, "method")))
    for axes, part in drawing.panels_by(canvas, shown, "dataset", size=size):
        drawing.dots(axes, part, SPEEDUP, "method", "temperature")
        axes.axvline(1, color="black", lw=0.8)
        axes.set_xlabel("speed-up, measured")


def modelled(name: str, title: str, source: str, runs: Sequence[Run]) -> Figure:
    """Return the speeds of every method priced by the cost tables of the evaluations, drawn over
    the speed ratio."""
    ratios = ratios_of(runs)
    asked = {name for run in runs for name in run.evaluation.config.get("modelled", [])}
    tables = [table for table in TABLES if table in asked]
    return Figure(
        name=name,
        title=title,
        source=source,
        kind="modelled",
        n=extent(runs),
        interval=f"{METHOD}; none for costs measured here, where only the sum is kept",
        records=[
            {
                **run.labels,
                **{
                    column: cell
                    for c in ratios
                    for column, cell in estimated(of_ratio(c), run.modelled_speedup(c)).items()
                },
                **{f"{SPEEDUP}, {OTHER_TABLES[table]}": _stored(run, table) for table in tables},
            }
            for run in with_all(runs)
        ],
        draw=partial(_draw_modelled, ratios=ratios),
    )


def _stored(run: Run, table: str) -> Cell:
    """Return the evaluation's own price by another table; None if it has priced other requests than
    the run's."""
    if len(run.traces) != len(run.evaluation.traces[run.name]):
        return None
    summary = run.evaluation.results.get("summary", {ALL: {}})[ALL]
    value: Cell = summary.get(run.name, {}).get(f"{SPEEDUP}, {table}", [None])[0]
    return value


def _draw_modelled(records: Sequence[Record], canvas: Canvas, ratios: Sequence[float]) -> None:
    points = [
        {**record, "c": c, **dict(zip(columns(SPEEDUP), cells, strict=True))}
        for record in drawing.together(records)
        for c in ratios
        if record["method"] != BASELINE
        for cells in [[record[column] for column in columns(of_ratio(c))]]
    ]
    for axes, part in drawing.panels_by(canvas, points, "T", size=(4.4, 3.6), datasets=True):
        drawing.lines(axes, part, "c", SPEEDUP, "method")
        axes.axhline(1, color="black", lw=0.8)
        axes.set_xlabel("speed ratio c: draft forwards per target forward")
        axes.set_ylabel("speed-up, modelled")


def of_ratio(c: float) -> str:
    return f"{SPEEDUP}, c = {c:g}"
