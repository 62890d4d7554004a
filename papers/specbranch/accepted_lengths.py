"""How many draft tokens of a round are accepted, and the truncated geometric distribution fitted to
it.

The distribution has one acceptance a: a round of g draft tokens accepts k of them with probability
(1 - a) a^k for k < g and a^g for k = g. A round accepted to its end says no more than tau >= g, so
the likelihood is greatest at a = accepted / (accepted + rejected)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from matplotlib.figure import Figure as Canvas

from decoding.trace import Trace
from evaluation.table import ratio
from reports import drawing
from reports.artifacts import Evaluation
from reports.figure import Cell, Entry, Figure, Missing
from reports.runs import Method, Run, extent, runs
from reports.settings import each_setting
from runtime.intervals import METHOD, Estimate, columns

COMMAND = "python scripts/evaluate.py experiment=draft_lengths"
SHARE = "share of rounds"


Round = tuple[int, int]
"""Draft tokens, and those accepted."""


def accepted_lengths(evaluations: Sequence[Evaluation]) -> Figure:
    """Histogram and fit of the longest fixed draft length, by dataset and temperature."""
    found = longest([run for run in runs(evaluations, _fixed) if drafted_rounds(run.traces)])
    if not found:
        raise Missing(f"needs an evaluation with a fixed draft length: {COMMAND}")
    names = ["dataset", "T", "method", "accepted tokens", *columns(SHARE), "fitted"]
    rows = [row for run in found for row in _histogram(run)]
    return Figure(
        name="accepted-lengths",
        title="Accepted length of a round, and the truncated geometric distribution",
        source="SpecBranch, figures 1b, 12 and 13",
        kind="measured",
        n=extent(found),
        interval=f"{METHOD} on the bars; black: fitted by maximum likelihood",
        columns=names,
        rows=rows,
        draw=partial(_draw, drawing.records(names, rows)),
    )


def _draw(every: Sequence[drawing.Record], canvas: Canvas) -> None:
    records = [{**record, "temperature": f"T = {record['T']:g}"} for record in every]
    datasets = drawing.distinct(records, "dataset")
    panels = drawing.panels(canvas, datasets)
    for dataset, axes in zip(datasets, panels, strict=True):
        here = [record for record in records if record["dataset"] == dataset]
        places = drawing.bars(axes, here, "accepted tokens", SHARE, "temperature")
        at, fits = [x for x, _ in places], [record["fitted"] for _, record in places]
        dashes: dict[str, Any] = {"marker": "_", "s": 60, "color": "black", "zorder": 3}
        axes.scatter(at, fits, label="fitted distribution", **dashes)
        axes.set_xlabel("accepted draft tokens per round")
    drawing.legend(canvas, panels[0])


def length_fits(evaluations: Sequence[Evaluation]) -> Figure:
    """The fit of every method that drafts a chain."""
    found = [run for run in runs(evaluations, _chain) if drafted_rounds(run.traces)]
    if not found:
        raise Missing(f"needs an evaluation with a method that drafts a chain: {COMMAND}")
    names = ["T", "dataset", "method", "rounds", "mean accepted", *columns("a"), "total variation"]
    return Figure(
        name="length-fits",
        title="Acceptance fitted to accepted lengths, by method and dataset",
        source="SpecBranch, figures 12 and 13",
        kind="modelled",
        n=extent(found),
        interval=METHOD,
        columns=names,
        rows=[_fit_row(run) for run in found],
    )


def drafted_rounds(traces: Sequence[Trace]) -> list[Round]:
    """Those with a draft."""
    return [
        (len(r.draft_tokens), r.accepted)
        for trace in traces
        for r in trace.rounds
        if r.draft_tokens
    ]


def acceptance(run: Run) -> Estimate:
    """Return the a of the greatest likelihood."""
    rejected = [sum(round_.rejected for round_ in trace.rounds) for trace in run.traces]
    rows = run.rows.assign(tested=run.rows["accepted"] + rejected)
    return ratio(rows, "accepted", "tested")


def observed(rounds: Sequence[Round]) -> list[float]:
    """Share of rounds by accepted tokens, from 0 to the longest draft."""
    accepted = [k for _, k in rounds]
    return [accepted.count(k) / len(rounds) for k in range(max(g for g, _ in rounds) + 1)]


def fitted(rounds: Sequence[Round], a: float) -> list[float]:
    """The same of the truncated geometric distribution, each round at its own length."""
    lengths = [g for g, _ in rounds]
    distribution = [
        a**k * (lengths.count(k) + (1 - a) * sum(g > k for g in lengths)) / len(rounds)
        for k in range(max(lengths) + 1)
    ]
    return distribution


def total_variation(rounds: Sequence[Round], a: float) -> float:
    return sum(abs(p - q) for p, q in zip(observed(rounds), fitted(rounds, a), strict=True)) / 2


def longest(found: Sequence[Run]) -> list[Run]:
    """Of each dataset and temperature the run with the longest drafts."""
    best: dict[tuple[float, str], Run] = {}
    for run in found:
        key = (run.temperature, run.dataset)
        if key not in best or _gamma(run) > _gamma(best[key]):
            best[key] = run
    return list(best.values())


def _gamma(run: Run) -> int:
    return max(g for g, _ in drafted_rounds(run.traces))


def _histogram(run: Run) -> list[list[Cell]]:
    rounds, a = drafted_rounds(run.traces), acceptance(run).value
    return [
        [run.dataset, run.temperature, run.label, k, *_share(run, k), fit]
        for k, fit in enumerate(fitted(rounds, a))
    ]


def _share(run: Run, k: int) -> Estimate:
    lengths = [[accepted for _, accepted in drafted_rounds([trace])] for trace in run.traces]
    at_k, rounds = [each.count(k) for each in lengths], [*map(len, lengths)]
    return ratio(run.rows.assign(at_k=at_k, drafts=rounds), "at_k", "drafts")


def _fit_row(run: Run) -> list[Cell]:
    rounds, a = drafted_rounds(run.traces), acceptance(run)
    mean = sum(accepted for _, accepted in rounds) / len(rounds)
    return [
        run.temperature,
        run.dataset,
        run.label,
        len(rounds),
        mean,
        *a,
        total_variation(rounds, a.value),
    ]


def _chain(method: Method) -> bool:
    return (method.engine, method.structure, method.verifier) == (
        "SerialEngine",
        "Chain",
        "TokenVerifier",
    )


def _fixed(method: Method) -> bool:
    return _chain(method) and method.stop == "Fixed"


FIGURES = (
    Entry(
        "Accepted length of a round, and the truncated geometric distribution",
        "Bars are rounds counted, black dashes what a constant acceptance per token predicts. Bars"
        " above them at both ends mean that easy and hard stretches alternate, which is what a stop"
        " rule can use.",
        each_setting(accepted_lengths),
    ),
    Entry(
        "Acceptance fitted to accepted lengths",
        "a: acceptance per token tested. Total variation: share of rounds to be moved for histogram"
        " and fitted distribution to agree; 0 is a perfect fit.",
        each_setting(length_fits),
    ),
)
