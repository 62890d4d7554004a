"""Accepted draft tokens of a round: the truncated geometric distribution fitted to them, and the
draft length that would have been optimal.

The distribution has one acceptance a: a round of g draft tokens accepts k of them with probability
(1 - a) a^k for k < g and a^g for k = g. A round accepted to its end only shows that tau >= g, so
the maximum likelihood estimate is a = accepted / (accepted + rejected)."""

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from decoding.trace import Trace
from evaluation.table import prompts, ratio
from papers.specbranch.engine import COMMAND, NEEDS, specbranch
from reports import drawing
from reports.artifacts import Evaluation, grouped
from reports.figure import Entry, Figure, Missing, Record, estimated
from reports.runs import Run, each_setting, extent, runs
from runtime.intervals import METHOD, Estimate

SHARE = "share of rounds"
Round = tuple[int, int]
"""Draft tokens, and those accepted."""


def drafted_rounds(traces: Sequence[Trace]) -> list[Round]:
    """Return the rounds with a draft."""
    return [
        (len(r.draft_tokens), r.accepted)
        for trace in traces
        for r in trace.rounds
        if r.draft_tokens
    ]


def acceptance(run: Run) -> Estimate:
    """Return the maximum likelihood estimate of a."""
    rejected = [sum(round_.rejected for round_ in trace.rounds) for trace in run.traces]
    rows = run.rows.assign(tested=run.rows["accepted"] + rejected)
    return ratio(rows, "accepted", "tested")


def observed(rounds: Sequence[Round]) -> list[float]:
    """Return the share of rounds by accepted tokens, from 0 to the longest draft."""
    accepted = [k for _, k in rounds]
    return [accepted.count(k) / len(rounds) for k in range(max(g for g, _ in rounds) + 1)]


def fitted(rounds: Sequence[Round], a: float) -> list[float]:
    """Return the shares by the truncated geometric distribution, each round at its own length."""
    lengths = [g for g, _ in rounds]
    distribution = [
        a**k * (lengths.count(k) + (1 - a) * sum(g > k for g in lengths)) / len(rounds)
        for k in range(max(lengths) + 1)
    ]
    return distribution


def total_variation(rounds: Sequence[Round], a: float) -> float:
    return sum(abs(p - q) for p, q in zip(observed(rounds), fitted(rounds, a), strict=True)) / 2


def accepted_lengths(evaluations: Sequence[Evaluation]) -> Figure:
    """Return histogram and fit of the longest fixed draft length, by dataset and temperature."""
    fixed = runs(evaluations, lambda how: how.chain and how.stop == "Fixed")
    selected = longest([run for run in fixed if drafted_rounds(run.traces)])
    if not selected:
        raise Missing(f"needs an evaluation with a fixed draft length: {COMMAND}draft_lengths")
    return Figure(
        name="accepted-lengths",
        title="Accepted length of a round, and the truncated geometric distribution",
        source="SpecBranch, figures 1b, 12 and 13",
        kind="measured",
        n=extent(selected),
        interval=f"{METHOD} on the bars; black: fitted by maximum likelihood",
        records=[record for run in selected for record in _histogram(run)],
        draw=_draw_histogram,
    )


def longest(selected: Sequence[Run]) -> list[Run]:
    """Return for each dataset and temperature the run with the longest drafts."""
    alike = grouped(selected, lambda run: (run.temperature, run.dataset))
    return [max(each, key=lambda run: max(drafted_rounds(run.traces))[0]) for each in alike]


def _histogram(run: Run) -> list[Record]:
    lengths = [[accepted for _, accepted in drafted_rounds([trace])] for trace in run.traces]
    rows = run.rows.assign(drafts=[*map(len, lengths)])
    fit = fitted(drafted_rounds(run.traces), acceptance(run).value)
    return [
        {
            **{"dataset": run.dataset, "T": run.temperature, "method": run.label},
            "accepted tokens": k,
            **estimated(
                SHARE,
                ratio(rows.assign(at_k=[each.count(k) for each in lengths]), "at_k", "drafts"),
            ),
            "fitted": share,
        }
        for k, share in enumerate(fit)
    ]


def _draw_histogram(records: Sequence[Record], canvas: Canvas) -> None:
    shown = drawing.with_temperature(records)
    for axes, part in drawing.panels_by(canvas, shown, "dataset"):
        places = drawing.bars(axes, part, "accepted tokens", SHARE, "temperature")
        axes.scatter(
            [x for x, _ in places],
            [record["fitted"] for _, record in places],
            label="fitted distribution",
            marker="_",
            s=60,
            color="black",
            zorder=3,
        )
        axes.set_xlabel("accepted draft tokens per round")


def length_fits(evaluations: Sequence[Evaluation]) -> Figure:
    """Return the fit of every method that drafts a chain."""
    selected = [
        run for run in runs(evaluations, lambda how: how.chain) if drafted_rounds(run.traces)
    ]
    if not selected:
        raise Missing(
            f"needs an evaluation with a method that drafts a chain: {COMMAND}draft_lengths"
        )
    records = []
    for run in selected:
        rounds, a = drafted_rounds(run.traces), acceptance(run)
        records.append(
            {
                **run.labels,
                "rounds": len(rounds),
                "mean accepted": sum(accepted for _, accepted in rounds) / len(rounds),
                **estimated("a", a),
                "total variation": total_variation(rounds, a.value),
            }
        )
    return Figure(
        name="length-fits",
        title="Acceptance fitted to accepted lengths, by method and dataset",
        source="SpecBranch, figures 12 and 13",
        kind="modelled",
        n=extent(selected),
        records=records,
    )


# The length chosen --------------------------------------------------------------------------------


def optimal_lengths(evaluations: Sequence[Evaluation]) -> Figure:
    """Return the chosen length and the optimal one over the rounds of one prompt, by method."""
    choosing = [
        run for run in specbranch(evaluations) if run.method.stop not in ("", "Fixed", "Never")
    ]
    shown = _same_prompt(choosing)
    if not shown:
        raise Missing(NEEDS)
    records: list[Record] = [
        {
            **{"method": run.label, "round": number},
            **{"chosen length": chosen, "accepted": accepted},
            "right length": f"{accepted}" if accepted < chosen else f"{chosen} or more",
        }
        for run, trace in shown
        for number, (chosen, accepted) in enumerate(choices(trace), 1)
    ]
    if not records:
        raise Missing(f"needs requests with rounds: {COMMAND}specbranch")
    run, trace = shown[0]
    prompt = f"1 prompt of {run.dataset} ({trace.prompt_id}), T = {run.temperature:g}"
    return Figure(
        name="optimal-lengths",
        title="Right and chosen draft length over rounds",
        source="SpecBranch, figure 10",
        kind="measured",
        n=f"{prompt}, {len(records)} rounds",
        interval="no interval: single rounds are shown",
        records=records,
        draw=_draw_choices,
    )


def choices(trace: Trace) -> list[Round]:
    """Return the length chosen in each round, and its accepted tokens, without candidates at its
    end."""
    lengths = [r.overlap.pending if r.overlap else len(r.draft_tokens) for r in trace.rounds]
    return [
        (length, min(length, r.accepted)) for length, r in zip(lengths, trace.rounds, strict=True)
    ]


def _same_prompt(selected: Sequence[Run]) -> list[tuple[Run, Trace]]:
    """Return the first decode by every method of the median prompt by accepted draft tokens, at the
    lowest temperature."""
    coldest = [run for run in selected if run.temperature == selected[0].temperature]
    if not any(run.traces for run in coldest):
        return []
    accepted = prompts(pd.concat([run.rows for run in coldest]), "accepted")["accepted"]
    median = accepted.sort_values(kind="stable").index[len(accepted) // 2]
    first: dict[str, tuple[Run, Trace]] = {}
    for run in coldest:
        for trace in run.traces:
            if (trace.dataset, trace.prompt_id) == median:
                first.setdefault(run.name, (run, trace))
    return list(first.values())


def _draw_choices(records: Sequence[Record], canvas: Canvas) -> None:
    for axes, part in drawing.panels_by(canvas, records, "method", size=(4.4, 2.4)):
        rounds, chosen = ([r[name] for r in part] for name in ("round", "chosen length"))
        axes.step(rounds, chosen, where="mid", color="grey", label="chosen")
        for label, ended, face in (("right", True, "tab:blue"), ("right, or more", False, "none")):
            points = [r for r in part if (r["accepted"] < r["chosen length"]) == ended]
            marks = [r["round"] for r in points], [r["accepted"] for r in points]
            axes.scatter(
                *marks, s=16, facecolors=face, edgecolors="tab:blue", label=label, zorder=3
            )
        axes.set_xlabel("round (target call)")
        axes.set_ylabel("draft tokens")
        axes.set_ylim(-0.5, max(1, *chosen) + 0.5)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))


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
    Entry(
        "Right and chosen draft length over rounds",
        "Filled: a token was rejected, so this many would have been right. Hollow: all were"
        " accepted, so as many or more. The line is what the method chose; filled marks below it"
        " are tokens drafted in vain.",
        each_setting(optimal_lengths),
    ),
)
