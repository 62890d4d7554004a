"""What a round takes, by component."""

from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from decoding.trace import STAGES
from evaluation.table import SHARES, ratio
from reports import drawing
from reports.figure import Cell, Figure
from reports.runs import Run, extent, pooled
from runtime.intervals import METHOD, columns

ROUND = "round, ms"
ROUND_TIMES = (
    "draft and target: the forwards; sample: drawing draft tokens; verify: the verifier; stop: the"
    " stop rule, predictors included. Where the models run side by side the parts add up to more"
    " than the round, which the black dot shows."
)


def step_times(name: str, title: str, source: str, found: Sequence[Run]) -> Figure:
    """Milliseconds per round, all datasets together; the prefill is left out."""
    together = pooled(found)
    names = ["T", "method", *columns(ROUND), *(f"{stage}, ms" for stage in STAGES)]
    rows = [_row(run) for run in together]
    return Figure(
        name=name,
        title=title,
        source=source,
        kind="measured",
        n=extent(found),
        interval=f"{METHOD}, of the whole round",
        columns=names,
        rows=rows,
        draw=partial(_draw, drawing.records(names, rows)),
    )


def _draw(records: Sequence[drawing.Record], canvas: Canvas) -> None:
    temperatures = drawing.distinct(records, "T")
    height = 1.2 + 0.3 * len(records) / len(temperatures)
    titles = [f"T = {temperature:g}" for temperature in temperatures]
    panels = drawing.panels(canvas, titles, size=(4.4, height))
    for temperature, axes in zip(temperatures, panels, strict=True):
        _draw_parts(axes, [record for record in records if record["T"] == temperature])
    drawing.legend(canvas, panels[0])


def _row(run: Run) -> list[Cell]:
    rows = run.rows.assign(ms=1000 * run.rows["decode_seconds"])
    whole = ratio(rows, "ms", "rounds")
    shares = {stage: ratio(rows, *SHARES[stage]).value for stage in STAGES}
    return [run.temperature, run.label, *whole, *(shares[stage] * whole.value for stage in STAGES)]


def _draw_parts(axes: Axes, records: Sequence[drawing.Record]) -> None:
    left = [0.0] * len(records)
    for place, stage in enumerate(STAGES):
        widths = [record[f"{stage}, ms"] for record in records]
        colour, hatch = drawing.COLOURS[place], drawing.HATCHES[place]
        axes.barh(
            range(len(records)),
            widths,
            left=left,
            label=stage,
            color=colour,
            hatch=hatch,
            edgecolor="white",
        )
        left = [start + width for start, width in zip(left, widths, strict=True)]
    whole = [record[ROUND] for record in records]
    reach = drawing.reach(records, ROUND)
    axes.errorbar(
        whole,
        range(len(records)),
        xerr=reach,
        fmt="o",
        color="black",
        ms=4,
        capsize=2,
        label="round",
    )
    axes.set_yticks(range(len(records)), [record["method"] for record in records])
    axes.invert_yaxis()
    axes.set_xlabel("time per round, ms")
