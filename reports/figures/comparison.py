"""Methods side by side: measured against plain decoding of the same evaluation, and modelled for
other machines."""

from collections.abc import Sequence
from functools import partial

from matplotlib.figure import Figure as Canvas

from evaluation.table import ALL, BASELINE, SPEEDUP
from evaluation.timeline import TABLES
from reports import drawing
from reports.figure import Cell, Figure
from reports.runs import CALLS, LENGTH, ROLLBACK, Run, extent, ratios_of, with_all
from runtime.intervals import METHOD, columns

DRAFTED = "drafted/round"
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


def measured(name: str, title: str, source: str, found: Sequence[Run]) -> Figure:
    """Every method on every dataset, drawn with datasets apart."""
    estimated = (SPEEDUP, CALLS, LENGTH, ROLLBACK)
    names = ["T", "dataset", "method", DRAFTED, "tokens/s"]
    names += [column for value in estimated for column in columns(value)]
    rows = [_measured_row(run) for run in with_all(found)]
    return Figure(
        name=name,
        title=title,
        source=source,
        kind="measured",
        n=extent(found),
        interval=f"{METHOD}, repeats pooled",
        columns=names,
        rows=rows,
        draw=partial(_draw_measured, drawing.records(names, rows)),
    )


def _draw_measured(every: Sequence[drawing.Record], canvas: Canvas) -> None:
    records = [
        {**record, "distribution": f"T = {record['T']:g}"}
        for record in every
        if record["method"] != BASELINE
    ]
    datasets, methods = (drawing.distinct(records, name) for name in ("dataset", "method"))
    panels = drawing.panels(canvas, datasets, size=(4.4, 1.2 + 0.3 * len(methods)))
    for dataset, axes in zip(datasets, panels, strict=True):
        here = [record for record in records if record["dataset"] == dataset]
        drawing.dots(axes, here, SPEEDUP, "method", "distribution")
        axes.axvline(1, color="black", lw=0.8)
        axes.set_xlabel("speed-up, measured")
    drawing.legend(canvas, panels[0])


def modelled(name: str, title: str, source: str, found: Sequence[Run]) -> Figure:
    """The same priced by the cost tables of the evaluations, drawn over the speed ratio."""
    ratios, tables = ratios_of(found), _tables(found)
    names = ["T", "dataset", "method"]
    names += [*(part for c in ratios for part in columns(of_ratio(c))), *tables]
    rows: list[list[Cell]] = [
        [
            *(run.temperature, run.dataset, run.label),
            *(x for c in ratios for x in run.modelled_speedup(c)),
            *_stored(run, tables),
        ]
        for run in with_all(found)
    ]
    return Figure(
        name=name,
        title=title,
        source=source,
        kind="modelled",
        n=extent(found),
        interval=f"{METHOD}; none for costs measured here, where only the sum is kept",
        columns=names,
        rows=rows,
        draw=partial(_draw_modelled, drawing.records(names, rows), ratios),
    )


def _draw_modelled(
    every: Sequence[drawing.Record], ratios: Sequence[float], canvas: Canvas
) -> None:
    points = [
        _at_ratio(record, c)
        for record in drawing.together(every)
        for c in ratios
        if record["method"] != BASELINE
    ]
    panels = drawing.panels(canvas, drawing.titles(points), size=(4.4, 3.6))
    for temperature, axes in zip(drawing.distinct(points, "T"), panels, strict=True):
        here = [point for point in points if point["T"] == temperature]
        drawing.lines(axes, here, "c", SPEEDUP, "method")
        axes.axhline(1, color="black", lw=0.8)
        axes.set_xlabel("speed ratio c: draft forwards per target forward")
        axes.set_ylabel("speed-up, modelled")
    drawing.legend(canvas, panels[0])


def of_ratio(c: float) -> str:
    return f"{SPEEDUP}, c = {c:g}"


def _measured_row(run: Run) -> list[Cell]:
    row: list[Cell] = [run.temperature, run.dataset, run.label]
    row += [run.estimate(name).value for name in (DRAFTED, "tokens/s")]
    row += [*run.estimate(SPEEDUP), *run.estimate(CALLS)]
    drafts = run.rows["drafted"].any()
    return [*row, *(x for n in (LENGTH, ROLLBACK) for x in (run.estimate(n) if drafts else NONE))]


def _at_ratio(record: drawing.Record, c: float) -> drawing.Record:
    """A point of a drawing over c."""
    estimate = zip(columns(SPEEDUP), columns(of_ratio(c)), strict=True)
    return {**record, "c": c, **{short: record[name] for short, name in estimate}}


def _tables(found: Sequence[Run]) -> dict[str, str]:
    """Column names of the cost tables that are no ratios, and the tables' own."""
    said = {"measured": f"{SPEEDUP}, forwards as measured", "pipeline": f"{SPEEDUP}, split target"}
    return {
        said[table]: table
        for table in TABLES
        if any(table in run.evaluation.config.get("modelled", []) for run in found)
    }


def _stored(run: Run, tables: dict[str, str]) -> list[Cell]:
    """What the evaluation has priced by other tables; None where it has priced other requests than
    the run's."""
    whole = len(run.traces) == len(run.evaluation.traces[run.name])
    summary = run.evaluation.results.get("summary", {ALL: {}})[ALL] if whole else {}
    priced = summary.get(run.name, {})
    return [priced.get(f"{SPEEDUP}, {table}", [None])[0] for table in tables.values()]
