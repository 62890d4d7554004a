"""What every evaluation says, whatever its methods: how fast each decodes, and what the time goes into."""

from collections.abc import Iterator, Sequence

from matplotlib.figure import Figure as Canvas

from decoding.figures.evidence import Evaluation
from decoding.figures.figure import Cell, Figure, Missing
from decoding.metrics import Metrics
from decoding.report import verdict

STAGES = {"draft": "draft", "target": "target", "sample": "drawing", "verify": "verification", "stop": "stop rule"}
HATCHES = ("", "//", "..", "xx", "\\\\", "")
COMMAND = "python scripts/evaluate.py"


def speedups(evaluations: Sequence[Evaluation]) -> Figure:
    """Every method of every evaluation, on all prompts and on each dataset."""
    if not evaluations:
        raise Missing(f"needs an evaluation: {COMMAND}")
    return Figure(
        name="speedups",
        title="Speed-up over decoding without a draft",
        source="The table that scripts/evaluate.py prints; SpecDec++, tables 1 and 4",
        kind="measured",
        n=f"evaluations: {len(evaluations)}; prompts and repeats as in the table",
        interval="lowest and highest of the repeats, each against plain decoding in the same repeat",
        reading="A method is faster only where even its slowest repeat is above 1. One repeat decides nothing.",
        columns=[
            *("evaluation", "prompts of", "temperature", "method", "prompts", "repeats", "tokens/s"),
            *("speed-up, measured", "lowest", "highest", "tokens/target call", "acceptance", "stop rule, % of time"),
            "verdict",
        ],
        rows=[row for evaluation in evaluations for row in _speed_rows(evaluation)],
    )


def _speed_rows(evaluation: Evaluation) -> Iterator[list[Cell]]:
    for prompts, methods in evaluation.results["metrics"].items():
        for name, values in methods.items():
            m = Metrics.from_dict(values)
            spread: list[Cell] = [m.speedup.median, m.speedup.low, m.speedup.high] if m.speedup else [1, None, None]
            yield [
                *(evaluation.folder.name, prompts, evaluation.temperature, name, m.requests // m.repeats, m.repeats),
                *(m.tokens_per_second.median, *spread),
                *(m.tokens_per_target_call, m.acceptance, 100 * m.predictor_share, verdict(name, m)),
            ]


def time_shares(evaluation: Evaluation) -> Figure:
    """Stages of decoding, by method."""
    profile = evaluation.results["profile"]
    requests = evaluation.results["metrics"]["all"]
    rows: list[list[Cell]] = [
        [name, *(100 * shares[stage] for stage in (*STAGES, "other"))] for name, shares in profile.items()
    ]
    return Figure(
        name=f"time-{evaluation.folder.name}",
        title=f"Where the time goes: {evaluation.folder.name}",
        source="The table that scripts/evaluate.py prints with profile=true",
        kind="measured",
        n=f"{max(values['requests'] for values in requests.values())} requests a method",
        interval="no interval: sums over all requests, prefill left out",
        reading="Where draft and target run side by side, their shares add up to more than 100 %.",
        columns=["method", *(f"{words}, % of decode time" for words in (*STAGES.values(), "other"))],
        rows=rows,
        draw=lambda canvas: _draw_shares(canvas, rows),
    )


def _draw_shares(canvas: Canvas, rows: Sequence[Sequence[Cell]]) -> None:
    axes = canvas.subplots()
    names = [str(row[0]) for row in rows]
    left = [0.0] * len(rows)
    for number, (stage, hatch) in enumerate(zip((*STAGES.values(), "other"), HATCHES, strict=True), 1):
        width = [float(row[number] or 0) for row in rows]
        axes.barh(names, width, left=left, label=stage, hatch=hatch, edgecolor="white", linewidth=0.5)
        left = [start + more for start, more in zip(left, width, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("share of decode time (%)")
    axes.set_ylabel("method")
    canvas.legend(
        loc="outside upper center", ncols=len(STAGES) + 1, fontsize="small", columnspacing=1, handlelength=1.5
    )
