"""The draft length chosen and the one that would have been right, round by round."""

from collections.abc import Sequence
from functools import partial

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from decoding.trace import Trace
from evaluation.table import prompts
from papers.specbranch.accepted_lengths import Round
from papers.specbranch.speed import NEEDS, specbranch
from reports import drawing
from reports.artifacts import Evaluation
from reports.figure import Cell, Entry, Figure, Missing
from reports.runs import Run
from reports.settings import each_setting

WITHOUT_CHOICE = ("", "Fixed", "Never")


def optimal_lengths(evaluations: Sequence[Evaluation]) -> Figure:
    """The length chosen and the one that would have been right, over the rounds of one prompt, by
    method."""
    found = [run for run in specbranch(evaluations) if run.method.stop not in WITHOUT_CHOICE]
    shown = _same_prompt(found)
    if not shown:
        raise Missing(NEEDS)
    names = ["method", "round", "chosen length", "accepted", "right length"]
    rows = [row for run, trace in shown for row in _rows(run, trace)]
    if not rows:
        command = "python scripts/evaluate.py experiment=specbranch"
        raise Missing(f"needs requests with rounds: {command}")
    run, trace = shown[0]
    prompt = f"1 prompt of {run.dataset} ({trace.prompt_id}), T = {run.temperature:g}"
    return Figure(
        name="optimal-lengths",
        title="Right and chosen draft length over rounds",
        source="SpecBranch, figure 10",
        kind="measured",
        n=f"{prompt}, {len(rows)} rounds",
        interval="no interval: single rounds are shown",
        columns=names,
        rows=rows,
        draw=partial(_draw_choices, drawing.records(names, rows)),
    )


def _rows(run: Run, trace: Trace) -> list[list[Cell]]:
    return [
        [run.label, number, chosen, accepted, _right(chosen, accepted)]
        for number, (chosen, accepted) in enumerate(choices(trace), 1)
    ]


def _right(chosen: int, accepted: int) -> str:
    return f"{accepted}" if accepted < chosen else f"{chosen} or more"


def _draw_choices(records: Sequence[drawing.Record], canvas: Canvas) -> None:
    methods = drawing.distinct(records, "method")
    panels = drawing.panels(canvas, methods, size=(4.4, 2.4))
    for method, axes in zip(methods, panels, strict=True):
        _draw_method(axes, [record for record in records if record["method"] == method])
    drawing.legend(canvas, panels[0])


def _draw_method(axes: Axes, here: Sequence[drawing.Record]) -> None:
    rounds, chosen = ([r[name] for r in here] for name in ("round", "chosen length"))
    axes.step(rounds, chosen, where="mid", color="grey", label="chosen")
    for label, known, face in (("right", True, "tab:blue"), ("right, or more", False, "none")):
        points = [r for r in here if (r["accepted"] < r["chosen length"]) == known]
        marks = [r["round"] for r in points], [r["accepted"] for r in points]
        axes.scatter(*marks, s=16, facecolors=face, edgecolors="tab:blue", label=label, zorder=3)
    axes.set_xlabel("round (target call)")
    axes.set_ylabel("draft tokens")
    axes.set_ylim(-0.5, max(1, *chosen) + 0.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


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
    coldest = [run for run in found if run.temperature == found[0].temperature]
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


FIGURES = (
    Entry(
        "Right and chosen draft length over rounds",
        "Filled: a token was rejected, so this many would have been right. Hollow: all were"
        " accepted, so as many or more. The line is what the method chose; filled marks below it"
        " are tokens drafted in vain.",
        each_setting(optimal_lengths),
    ),
)
