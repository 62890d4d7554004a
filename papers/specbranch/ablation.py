"""What each part of SpecBranch brings."""

from collections.abc import Sequence
from functools import partial

from matplotlib.figure import Figure as Canvas

from evaluation.table import SPEEDUP
from papers.specbranch.speed import specbranch
from reports import drawing
from reports.artifacts import Evaluation
from reports.figure import Cell, Entry, Figure
from reports.runs import Run, branches, extent, pearl, pooled, ratios_of, with_all
from reports.settings import each_setting
from runtime.intervals import METHOD, columns


def ablation(evaluations: Sequence[Evaluation]) -> Figure:
    """Measured speed of SpecBranch and of what is left without one of its parts."""
    found = _parts(evaluations)
    names = ["T", "dataset", "method", *columns(SPEEDUP)]
    rows: list[list[Cell]] = [
        [run.temperature, run.dataset, part(run), *run.estimate(SPEEDUP)] for run in with_all(found)
    ]
    return Figure(
        name="ablation-measured",
        title="SpecBranch without its parts, measured",
        source="SpecBranch, figure 6",
        kind="measured",
        n=extent(found),
        interval=f"{METHOD}, repeats pooled",
        columns=names,
        rows=rows,
        draw=partial(_draw, drawing.records(names, rows), "dataset", "measured"),
    )


def ablation_modelled(evaluations: Sequence[Evaluation]) -> Figure:
    """The same where each model has a device of its own, all datasets together."""
    found = pooled(_parts(evaluations))
    ratios = ratios_of(found)
    names = ["T", "method", "speed ratio c", *columns(SPEEDUP)]
    rows: list[list[Cell]] = [
        [run.temperature, part(run), c, *run.modelled_speedup(c)] for run in found for c in ratios
    ]
    return Figure(
        name="ablation-modelled",
        title="SpecBranch without its parts, a device for each model",
        source="SpecBranch, figure 6",
        kind="modelled",
        n=extent(found),
        interval=METHOD,
        columns=names,
        rows=rows,
        draw=partial(_draw, drawing.records(names, rows), "speed ratio c", "modelled"),
    )


def part(run: Run) -> str:
    """What it is in the ablation; "" for what has no place there."""
    how = run.method
    if branches(how):
        return "SpecBranch" if how.stop == "HRADStop" else "without H-RAD"
    if pearl(how):
        return "PEARL"
    chain = {"HRADStop": "without branches", "Fixed": "fixed length"}
    return chain.get(how.stop, "") if how.structure == "Chain" else ""


def _parts(evaluations: Sequence[Evaluation]) -> list[Run]:
    return sorted(
        filter(part, specbranch(evaluations)), key=lambda run: (run.temperature, run.dataset)
    )


def _draw(records: Sequence[drawing.Record], x: str, kind: str, canvas: Canvas) -> None:
    for temperature, axes in drawing.by_temperature(canvas, records):
        here = [record for record in records if record["T"] == temperature]
        drawing.bars(axes, here, x, SPEEDUP, "method")
        axes.axhline(1, color="black", lw=0.8)
        axes.set_xlabel(x)
        axes.set_ylabel(f"speed-up, {kind}")
    drawing.legend(canvas, canvas.axes[0])


FIGURES = (
    Entry(
        "SpecBranch without its parts",
        "Speed over plain decoding on this machine. Where draft and target share one processor,"
        " running side by side cannot pay.",
        each_setting(ablation),
    ),
    Entry(
        "SpecBranch without its parts, a device for each model",
        "Speed over plain decoding if a target forward took c draft forwards, from the counts of"
        " the run. What SpecBranch loses without a part is what that part brings.",
        each_setting(ablation_modelled),
    ),
)
