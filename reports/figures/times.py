"""The time of a round, by component."""

from collections.abc import Sequence

from matplotlib.figure import Figure as Canvas

from decoding.trace import STAGES
from evaluation.table import SHARES, ratio
from reports import drawing
from reports.figure import Figure, Record, estimated
from reports.runs import Run, extent, pooled
from runtime.intervals import METHOD

ROUND = "round, ms"
ROUND_TIMES = (
    "draft and target: the forwards; sample: drawing draft tokens; verify: the verifier; stop: the"
    " stop rule, predictors included. Where the models run side by side the parts add up to more"
    " than the round, which the black dot shows."
)


def step_times(name: str, title: str, source: str, runs: Sequence[Run]) -> Figure:
    """Return milliseconds per round, all datasets together; the prefill is left out."""
    return Figure(
        name=name,
        title=title,
        source=source,
        kind="measured",
        n=extent(runs),
        interval=f"{METHOD}, of the whole round",
        records=[_times(run) for run in pooled(runs)],
        draw=_draw,
    )


def _times(run: Run) -> Record:
    whole = ratio(run.rows.assign(ms=1000 * run.rows["decode_seconds"]), "ms", "rounds")
    shares = {stage: ratio(run.rows, *SHARES[stage]).value for stage in STAGES}
    return {
        **{"T": run.temperature, "method": run.label},
        **estimated(ROUND, whole),
        **{f"{stage}, ms": share * whole.value for stage, share in shares.items()},
    }


def _draw(records: Sequence[Record], canvas: Canvas) -> None:
    height = 1.2 + 0.3 * len(records) / len(drawing.distinct(records, "T"))
    for axes, part in drawing.panels_by(canvas, records, "T", size=(4.4, height)):
        left = [0.0] * len(part)
        for place, stage in enumerate(STAGES):
            widths = [record[f"{stage}, ms"] for record in part]
            axes.barh(
                range(len(part)),
                widths,
                left=left,
                label=stage,
                color=drawing.COLOURS[place],
                hatch=drawing.HATCHES[place],
                edgecolor="white",
            )
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.errorbar(
            [record[ROUND] for record in part],
            range(len(part)),
            xerr=drawing.reach(part, ROUND),
            fmt="o",
            color="black",
            ms=4,
            capsize=2,
            label="round",
        )
        axes.set_yticks(range(len(part)), [record["method"] for record in part])
        axes.invert_yaxis()
        axes.set_xlabel("time per round, ms")
