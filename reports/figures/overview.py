"""What every evaluation says, whatever its methods: how fast each decodes, and what the time goes
into."""

from collections.abc import Iterator, Sequence

from decoding.trace import Stage
from evaluation.metrics import Metrics
from evaluation.tables import verdict
from reports.artifacts import Evaluation
from reports.figure import Cell, Figure, Missing

STAGES: dict[Stage, str] = {
    "draft": "draft",
    "target": "target",
    "sample": "drawing",
    "verify": "verification",
    "stop": "stop rule",
    "other": "other",
}
NEEDS = "needs an evaluation: python scripts/evaluate.py"


def speedups(evaluations: Sequence[Evaluation]) -> Figure:
    """Every method of every evaluation, on all prompts and on each dataset."""
    if not evaluations:
        raise Missing(NEEDS)
    return Figure(
        name="speedups",
        title="Speed-up over decoding without a draft",
        source="The table that scripts/evaluate.py prints; SpecDec++, tables 1 and 4",
        kind="measured",
        n=f"evaluations: {len(evaluations)}; prompts and repeats as in the table",
        interval=(
            "lowest and highest of the repeats, each against plain decoding in the same repeat"
        ),
        reading=(
            "A method is faster only where even its slowest repeat is above 1. One repeat decides"
            " nothing."
        ),
        columns=[
            *(
                "evaluation",
                "prompts of",
                "temperature",
                "method",
                "prompts",
                "repeats",
                "tokens/s",
            ),
            *(
                "speed-up, measured",
                "lowest",
                "highest",
                "tokens/target call",
                "acceptance",
                "stop rule, % of time",
            ),
            "verdict",
        ],
        rows=[row for evaluation in evaluations for row in _speed_rows(evaluation)],
    )


def _speed_rows(evaluation: Evaluation) -> Iterator[list[Cell]]:
    for prompts, methods in evaluation.results["metrics"].items():
        for name, values in methods.items():
            m = Metrics.from_dict(values)
            spread: list[Cell] = (
                [m.speedup.median, m.speedup.low, m.speedup.high] if m.speedup else [1, None, None]
            )
            yield [
                *(
                    evaluation.folder.name,
                    prompts,
                    evaluation.temperature,
                    name,
                    m.requests // m.repeats,
                    m.repeats,
                ),
                *(m.tokens_per_second.median, *spread),
                *(
                    m.tokens_per_target_call,
                    m.acceptance,
                    100 * m.predictor_share,
                    verdict(name, m),
                ),
            ]


def time_shares(evaluations: Sequence[Evaluation]) -> Figure:
    """Stages of decoding, by method."""
    if not evaluations:
        raise Missing(NEEDS)
    return Figure(
        name="time-shares",
        title="Where the time goes",
        source="The table that scripts/evaluate.py prints with profile=true",
        kind="measured",
        n=f"evaluations: {len(evaluations)}; requests as in the table, every repeat counted",
        interval="no interval: sums over all requests, prefill left out",
        reading=(
            "A stop rule that takes long costs more than it can save. Where draft and target run"
            " side by side, their shares add up to more than 100 %."
        ),
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
                *(100 * shares[stage] for stage in STAGES),
            ]
            for evaluation in evaluations
            for name, shares in evaluation.results["profile"].items()
        ],
    )
