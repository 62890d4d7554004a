"""How many draft tokens a round gets accepted, against the truncated geometric distribution that
theory assumes.

P(tau = k) = (1 - a) a^k for k < g and a^g for k = g, in a round of g draft tokens. A round accepted
to its end says no more than tau >= g, so the likelihood is greatest at a = accepted / (accepted +
rejected)."""

from collections.abc import Sequence

from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from decoding.trace import Trace
from evaluation.metrics import accepted_tokens
from evaluation.ratios import counted, ratio
from reports import drawing
from reports.artifacts import Evaluation
from reports.figure import Cell, Figure, Missing
from reports.figures.speed import specbranch
from reports.runs import Method, Run, extent, runs
from runtime.intervals import METHOD, Estimate, columns

COMMAND = "python scripts/evaluate.py experiment=draft_lengths"
CHOOSING = ("HRADStop", "SpecDecPPStop", "Confidence", "ConfidenceBefore", "AdaEDL")
Round = tuple[int, int]
"""Draft tokens, and those accepted."""


def accepted_lengths(evaluations: Sequence[Evaluation]) -> Figure:
    """Histogram and fit of the longest fixed draft length, by dataset and temperature."""
    found = longest([run for run in runs(evaluations, _fixed) if drafted_rounds(run.traces)])
    if not found:
        raise Missing(f"needs an evaluation with a fixed draft length: {COMMAND}")
    names = ["dataset", "T", "method", "accepted tokens", *columns("share of rounds"), "fitted"]
    rows = [row for run in found for row in _histogram(run)]

    def draw(canvas: Canvas) -> None:
        records = drawing.records(names, rows)
        datasets = drawing.distinct(records, "dataset")
        panels = drawing.panels(canvas, datasets)
        for dataset, axes in zip(datasets, panels, strict=True):
            here = [
                {**r, "distribution": f"T = {r['T']:g}"} for r in records if r["dataset"] == dataset
            ]
            places = drawing.bars(axes, here, "accepted tokens", "share of rounds", "distribution")
            marks = [x for x, _ in places], [record["fitted"] for _, record in places]
            axes.scatter(
                *marks, marker="_", s=60, color="black", zorder=3, label="fitted distribution"
            )
            axes.set_xlabel("accepted draft tokens per round")
        drawing.legend(canvas, panels[0])

    return Figure(
        name="accepted-lengths",
        title="Accepted length of a round, and the truncated geometric distribution",
        source="SpecBranch, figures 1b, 12 and 13",
        kind="measured",
        n=extent(found),
        interval=f"{METHOD} on the bars; black: fitted by maximum likelihood",
        reading=(
            "Bars are rounds counted, black dashes what a constant acceptance per token predicts."
            " Bars above them at both ends mean that easy and hard stretches alternate."
        ),
        columns=names,
        rows=rows,
        draw=draw,
    )


def length_fits(evaluations: Sequence[Evaluation]) -> Figure:
    """The fit of every method that drafts a chain."""
    found = [run for run in runs(evaluations, _chain) if drafted_rounds(run.traces)]
    if not found:
        raise Missing(f"needs an evaluation with a method that drafts a chain: {COMMAND}")
    return Figure(
        name="length-fits",
        title="Acceptance fitted to accepted lengths, by method and dataset",
        source="SpecBranch, figures 12 and 13",
        kind="modelled",
        n=extent(found),
        interval=METHOD,
        reading=(
            "a: acceptance per token tested. total variation: share of rounds to be moved for"
            " histogram and fitted distribution to agree, 0 is a perfect fit."
        ),
        columns=[
            "T",
            "dataset",
            "method",
            "rounds",
            "mean accepted",
            *columns("a"),
            "total variation",
        ],
        rows=[_fit_row(run) for run in found],
    )


def optimal_lengths(evaluations: Sequence[Evaluation]) -> Figure:
    """The length chosen and the one that would have been right, over the rounds of one prompt, by
    method."""
    found = [run for run in specbranch(evaluations) if run.method.stop in CHOOSING]
    shown = _same_prompt(found)
    if not shown:
        raise Missing(
            "needs SpecBranch beside other methods: python scripts/evaluate.py"
            " experiment=specbranch"
        )
    names = ["method", "round", "chosen length", "accepted", "right length"]
    rows: list[list[Cell]] = [
        [
            run.label,
            number,
            chosen,
            accepted,
            f"{accepted}" if accepted < chosen else f"{chosen} or more",
        ]
        for run, trace in shown
        for number, (chosen, accepted) in enumerate(choices(trace), 1)
    ]
    if not rows:
        raise Missing(
            "needs requests with rounds: python scripts/evaluate.py experiment=specbranch"
        )
    run, trace = shown[0]
    return Figure(
        name="optimal-lengths",
        title="Right and chosen draft length over rounds",
        source="SpecBranch, figure 10",
        kind="measured",
        n=(
            f"1 prompt of {run.dataset} ({trace.prompt_id}), T = {run.temperature:g}, {len(rows)}"
            " rounds"
        ),
        interval="no interval: single rounds are shown",
        reading=(
            "Filled: a token was rejected, so this many would have been right. Hollow: all were"
            " accepted, so as many or more. The line is what the method chose; filled marks below"
            " it are tokens drafted in vain."
        ),
        columns=names,
        rows=rows,
        draw=lambda canvas: _draw_choices(canvas, drawing.records(names, rows)),
    )


def _draw_choices(canvas: Canvas, records: Sequence[drawing.Record]) -> None:
    methods = drawing.distinct(records, "method")
    panels = drawing.panels(canvas, methods, size=(4.4, 2.4))
    for method, axes in zip(methods, panels, strict=True):
        here = [record for record in records if record["method"] == method]
        axes.step(
            [r["round"] for r in here],
            [r["chosen length"] for r in here],
            where="mid",
            color="grey",
            label="chosen",
        )
        for label, known, face in (("right", True, "tab:blue"), ("right, or more", False, "none")):
            points = [r for r in here if (r["accepted"] < r["chosen length"]) == known]
            marks = [r["round"] for r in points], [r["accepted"] for r in points]
            axes.scatter(
                *marks, s=16, facecolors=face, edgecolors="tab:blue", label=label, zorder=3
            )
        axes.set_xlabel("round (target call)")
        axes.set_ylabel("draft tokens")
        axes.set_ylim(-0.5, max(1, *(r["chosen length"] for r in here)) + 0.5)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    drawing.legend(canvas, panels[0])


def choices(trace: Trace) -> list[Round]:
    """The length chosen in each round, and how much of it was accepted; candidates at its end are
    none of it."""
    lengths = [r.overlap.pending if r.overlap else len(r.draft_tokens) for r in trace.rounds]
    return [
        (length, min(length, r.accepted)) for length, r in zip(lengths, trace.rounds, strict=True)
    ]


def _same_prompt(found: Sequence[Run]) -> list[tuple[Run, Trace]]:
    """At the lowest temperature the median prompt by accepted draft tokens, as every method decoded
    it first."""
    every = [
        (run, trace)
        for run in found
        if run.temperature == found[0].temperature
        for trace in run.traces
    ]
    prompts = counted([trace for _, trace in every], accepted_tokens)
    median = sorted(prompts, key=lambda prompt: prompts[prompt][0])[
        len(prompts) // 2 : len(prompts) // 2 + 1
    ]
    first: dict[str, tuple[Run, Trace]] = {}
    for run, trace in every:
        if (trace.dataset, trace.prompt_id) in median:
            first.setdefault(run.name, (run, trace))
    return list(first.values())


def drafted_rounds(traces: Sequence[Trace]) -> list[Round]:
    """Those with a draft."""
    return [
        (len(r.draft_tokens), r.accepted)
        for trace in traces
        for r in trace.rounds
        if r.draft_tokens
    ]


def acceptance(traces: Sequence[Trace]) -> Estimate:
    """a of the greatest likelihood."""
    return ratio(traces, accepted_tokens, lambda trace: accepted_tokens(trace) + rejections(trace))


def rejections(trace: Trace) -> int:
    return sum(round_.rejected for round_ in trace.rounds)


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
    rounds, a = drafted_rounds(run.traces), acceptance(run.traces).value
    return [
        [run.dataset, run.temperature, run.label, k, *_share(run.traces, k), fit]
        for k, fit in enumerate(fitted(rounds, a))
    ]


def _share(traces: Sequence[Trace], k: int) -> Estimate:
    def at_k(trace: Trace) -> int:
        return sum(accepted == k for _, accepted in drafted_rounds([trace]))

    return ratio(traces, at_k, lambda trace: len(drafted_rounds([trace])))


def _fit_row(run: Run) -> list[Cell]:
    rounds, a = drafted_rounds(run.traces), acceptance(run.traces)
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
