"""What every evaluation says, whatever its methods: how fast each decodes, and what the time goes
into."""

from collections.abc import Iterator, Sequence
from functools import partial

from matplotlib.figure import Figure as Canvas

from decoding.trace import Stage
from evaluation.page import verdict
from evaluation.table import ALL, BASELINE, SPEEDUP, by_dataset, count_prompts, timed
from reports import drawing
from reports.artifacts import Evaluation
from reports.figure import Cell, Entry, Figure, Missing
from runtime.intervals import METHOD, columns

STAGES: dict[Stage, str] = {
    "draft": "draft",
    "target": "target",
    "sample": "drawing",
    "verify": "verification",
    "stop": "stop rule",
    "other": "other",
}
NEEDS = "needs an evaluation: python scripts/evaluate.py"
SPEED = "speed-up, measured"


def speedups(evaluations: Sequence[Evaluation]) -> Figure:
    """Every method of every evaluation, on all prompts and on each dataset."""
    if not evaluations:
        raise Missing(NEEDS)
    names = ["evaluation", "prompts of", "temperature", "method", "prompts", "repeats", "tokens/s"]
    names += [*columns(SPEED), "tokens/target call", "acceptance", "stop rule, % of time"]
    names += ["verdict"]
    rows = [row for evaluation in evaluations for row in _speed_rows(evaluation)]
    return Figure(
        name="speedups",
        title="Speed-up over decoding without a draft",
        source="The table that scripts/evaluate.py prints; SpecDec++, tables 1 and 4",
        kind="measured",
        n=f"evaluations: {len(evaluations)}; prompts and repeats as in the table",
        interval=METHOD,
        columns=names,
        rows=rows,
        draw=partial(_draw_speedups, drawing.records(names, rows)),
    )


def _draw_speedups(records: Sequence[drawing.Record], canvas: Canvas) -> None:
    shown = [
        {**record, "repeats": METHOD}
        for record in records
        if record["prompts of"] == ALL and record["method"] != BASELINE
    ]
    names = drawing.distinct(shown, "evaluation")
    most = max(sum(record["evaluation"] == name for record in shown) for name in names)
    panels = drawing.panels(canvas, names, size=(5.4, 1.2 + 0.3 * most))
    for name, axes in zip(names, panels, strict=True):
        here = [record for record in shown if record["evaluation"] == name]
        drawing.dots(axes, here, SPEED, "method", "repeats")
        axes.axvline(1, color="black", lw=0.8)
    drawing.legend(canvas, panels[0])


def _speed_rows(evaluation: Evaluation) -> Iterator[list[Cell]]:
    drafting = [*filter(evaluation.speculates, evaluation.traces)]
    for dataset, rows in by_dataset(timed(evaluation.traces)).items():
        prompts, repeats = count_prompts(rows), int(rows["repeat"].max()) + 1
        for name, row in evaluation.summary[dataset].items():
            yield [
                *(evaluation.folder.name, dataset, evaluation.temperature, name, prompts, repeats),
                *(row["tokens/s"].value, *row[SPEEDUP]),
                *(row["tokens/target call"].value, row["acceptance"].value),
                *(100 * row["stop rule time"].value, verdict(name, row, drafting)),
            ]


def time_shares(evaluations: Sequence[Evaluation]) -> Figure:
    """Stages of decoding, by method."""
    if not evaluations:
        raise Missing(NEEDS)
    return Figure(
        name="time-shares",
        title="Where the time goes",
        source="The table that scripts/evaluate.py prints with verbose=true",
        kind="measured",
        n=f"evaluations: {len(evaluations)}; requests as in the table, every repeat counted",
        interval="no interval: sums over all requests, prefill left out",
        columns=[
            "evaluation",
            "method",
            "requests",
            *(f"{words}, % of decode time" for words in STAGES.values()),
        ],
        rows=[
            [
                evaluation.folder.name,
                name,
                len(evaluation.traces[name]),
                *(100 * row[stage].value for stage in STAGES),
            ]
            for evaluation in evaluations
            for name, row in evaluation.summary[ALL].items()
        ],
    )


FIGURES = (
    Entry(
        "Speed-up",
        "A method is faster only where the whole interval is above 1. One prompt decides nothing.",
        lambda artifacts: [partial(speedups, artifacts.evaluations)],
    ),
    Entry(
        "Where the time goes",
        "A stop rule that takes long costs more than it can save. Where draft and target run side"
        " by side, their shares add up to more than 100 %.",
        lambda artifacts: [partial(time_shares, artifacts.evaluations)],
    ),
)
