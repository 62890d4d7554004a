"""What a round takes, by component."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from decoding.trace import STAGES
from evaluation.metrics import profile
from evaluation.ratios import ratio
from reports import drawing
from reports.artifacts import Evaluation
from reports.figure import Cell, Figure
from reports.figures.speed import specbranch, specdecpp
from reports.figures.trees import trees
from reports.runs import Run, extent, pooled
from runtime.intervals import METHOD, columns

ROUND = "round, ms"


def specdecpp_times(evaluations: Sequence[Evaluation]) -> Figure:
    title = "Where a round's time goes: SpecDec++ and others"
    return step_times("specdecpp-times", title, "SpecBranch, table 9", specdecpp(evaluations))


def specbranch_times(evaluations: Sequence[Evaluation]) -> Figure:
    title = "Where a round's time goes: SpecBranch and others"
    return step_times("specbranch-times", title, "SpecBranch, table 9", specbranch(evaluations))


def tree_times(evaluations: Sequence[Evaluation]) -> Figure:
    title = "Where a round's time goes: trees"
    return step_times("tree-times", title, "DySpec, figure 4", trees(evaluations))


def step_times(name: str, title: str, source: str, found: Sequence[Run]) -> Figure:
    """Milliseconds per round, all datasets together; the prefill is left out."""
    together = pooled(found)
    names = ["T", "method", *columns(ROUND), *(f"{stage}, ms" for stage in STAGES)]
    rows = [_row(run) for run in together]

    def draw(canvas: Canvas) -> None:
        records = drawing.records(names, rows)
        distributions = drawing.distinct(records, "T")
        height = 1.2 + 0.3 * len(together) / len(distributions)
        panels = drawing.panels(
            canvas, [f"T = {distribution:g}" for distribution in distributions], size=(4.4, height)
        )
        for distribution, axes in zip(distributions, panels, strict=True):
            _draw_parts(axes, [record for record in records if record["T"] == distribution])
        drawing.legend(canvas, panels[0])

    return Figure(
        name=name,
        title=title,
        source=source,
        kind="measured",
        n=extent(found),
        interval=f"{METHOD}, of the whole round",
        reading=(
            "draft and target: the forwards; sample: drawing draft tokens; verify: the verifier;"
            " stop: the stop rule, predictors included. Where the models run side by side the parts"
            " add up to more than the round, which the black dot shows."
        ),
        columns=names,
        rows=rows,
        draw=draw,
    )


def _row(run: Run) -> list[Cell]:
    whole = ratio(
        run.traces, lambda trace: 1000 * trace.decode_seconds, lambda trace: len(trace.rounds)
    )
    shares = profile(run.traces)
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
