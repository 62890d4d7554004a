"""Figures of any evaluation, whatever its methods: the speed of each, and the time of its
stages."""

from collections.abc import Sequence
from functools import partial

from matplotlib.figure import Figure as Canvas

from decoding.trace import Stage
from evaluation.page import NONE, TAU, verdict
from evaluation.table import ALL, BASELINE, SPEEDUP, by_dataset, count_prompts
from reports import drawing
from reports.artifacts import Evaluation
from reports.figure import Entry, Figure, Missing, Record, estimated
from runtime.intervals import METHOD

STAGES: dict[Stage, str] = {
    "draft": "draft",
    "target": "target",
    "sample": "drawing",
    "verify": "verification",
    "stop": "stop rule",
    "other": "other",
}
NEEDS = "needs an evaluation: python scripts/evaluate.py"
SPEED, LENGTH = "speed-up, measured", "acceptance length"


def speedups(evaluations: Sequence[Evaluation]) -> Figure:
    """Return the figure of every method of every evaluation, on all prompts and on each dataset."""
    if not evaluations:
        raise Missing(NEEDS)
    records = []
    for evaluation in evaluations:
        drafting = [*filter(evaluation.speculates, evaluation.traces)]
        for dataset, rows in by_dataset(evaluation.measurements).items():
            prompts, repeats = count_prompts(rows), int(rows["repeat"].max()) + 1
            for name, row in evaluation.summary[dataset].items():
                records.append(
                    {
                        **{"evaluation": evaluation.folder.name, "prompts of": dataset},
                        **{"temperature": evaluation.temperature, "method": name},
                        **{"prompts": prompts, "repeats": repeats},
                        "tokens/s": row["tokens/s"].value,
                        **estimated(SPEED, row[SPEEDUP]),
                        TAU: row["tokens/target call"].value,
                        LENGTH: row[LENGTH].value if row.get(LENGTH, NONE).value else None,
                        "acceptance": row["acceptance"].value,
                        "stop rule, % of time": 100 * row["stop rule time"].value,
                        "verdict": verdict(name, row, drafting, prompts),
                    }
                )
    return Figure(
        name="speedups",
        title="Speed-up over decoding without a draft",
        source="The table that scripts/evaluate.py prints; SpecDec++, tables 1 and 4",
        kind="measured",
        n=f"evaluations: {len(evaluations)}; prompts and repeats as in the table",
        records=records,
        draw=_draw if any(record["method"] != BASELINE for record in records) else None,
    )


def _draw(records: Sequence[Record], canvas: Canvas) -> None:
    shown = [
        {**record, "repeats": METHOD}
        for record in drawing.where(records, **{"prompts of": ALL})
        if record["method"] != BASELINE
    ]
    each = [record["evaluation"] for record in shown]
    size = (5.4, 1.2 + 0.3 * max(map(each.count, each)))
    for axes, part in drawing.panels_by(canvas, shown, "evaluation", size=size):
        drawing.dots(axes, part, SPEED, "method", "repeats")
        axes.axvline(1, color="black", lw=0.8)


def time_shares(evaluations: Sequence[Evaluation]) -> Figure:
    """Return the stages of decoding, by method."""
    if not evaluations:
        raise Missing(NEEDS)
    return Figure(
        name="time-shares",
        title="Where the time goes",
        source="The table that scripts/evaluate.py prints with verbose=true",
        kind="measured",
        n=f"evaluations: {len(evaluations)}; requests as in the table, every repeat counted",
        interval="no interval: sums over all requests, prefill left out",
        records=[
            {
                "evaluation": evaluation.folder.name,
                "method": name,
                "requests": len(evaluation.traces[name]),
                **{
                    f"{words}, % of decode time": 100 * row[stage].value
                    for stage, words in STAGES.items()
                },
            }
            for evaluation in evaluations
            for name, row in evaluation.summary[ALL].items()
        ],
    )


FIGURES = (
    Entry(
        "Speed-up",
        "A method is faster only where the whole interval is above 1. One prompt decides nothing."
        " tau (EAGLE): tokens per target call over all rounds. Acceptance length: 1 + accepted"
        " tokens per draft, over rounds that drafted.",
        lambda artifacts: [partial(speedups, artifacts.evaluations)],
    ),
    Entry(
        "Where the time goes",
        "A stop rule that takes long costs more than it can save. Where draft and target run side"
        " by side, their shares add up to more than 100 %.",
        lambda artifacts: [partial(time_shares, artifacts.evaluations)],
    ),
)
