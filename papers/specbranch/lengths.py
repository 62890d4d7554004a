"""Three classes against a direct predictor of the accepted length, trained on the same rows."""

from collections.abc import Iterator, Sequence
from functools import partial

from matplotlib.figure import Figure as Canvas
from torch import Tensor

from papers.specbranch.hrad_data import (
    CLASSES,
    EVEN,
    LENGTHS,
    LENGTHS_COMMAND,
    LONE,
    PROBABLE,
    Heads,
    counterpart,
    heads,
    of_hrad,
)
from predictors.metrics import log_loss
from reports import drawing
from reports.artifacts import Artifacts, Checkpoint
from reports.figure import Builder, Cell, Entry, Figure, Missing, lacking
from reports.figures.calibration import base_rate
from reports.row_means import mean
from runtime.intervals import METHOD, columns

NEEDS = f"needs an H-RAD checkpoint of classes and one of lengths: {LENGTHS_COMMAND}"
GAIN = f"{CLASSES} - {LENGTHS}"
COMPARED = ((PROBABLE, PROBABLE), (PROBABLE, LONE), (EVEN, EVEN))
"""Decisions of the classes, and of the lengths."""


def lengths_table(found: Sequence[Heads]) -> Figure:
    """Accuracy of the class, and log loss, on the same rounds, with paired differences."""
    if not found:
        raise Missing(NEEDS)
    names = ["dataset", "head", "decision", *columns("accuracy"), *columns("log loss")]
    rows = [row for one in found for row in (*_rows(one), *_gains(one), *_bases(one))]
    prompts = sum(len(one.group.unique()) for one in found)
    rounds = sum(len(one.group) for one in found)
    return Figure(
        name=f"lengths-{found[0].checkpoint}",
        title=f"{found[0].checkpoint}: three classes against a predictor of the length",
        source="SpecBranch, figure 3",
        kind="measured",
        n=f"{prompts} prompts, {rounds:,} rounds of {found[0].gamma} draft tokens",
        interval=METHOD,
        columns=names,
        rows=rows,
        draw=partial(_draw, drawing.records(names, rows)),
    )


def _rows(one: Heads) -> Iterator[list[Cell]]:
    for head, decision in one.decided:
        loss = mean(_loss(one, head), one.group) if decision == PROBABLE else [None] * 3
        yield [one.dataset, head, decision, *mean(_right(one, head, decision), one.group), *loss]


def _gains(one: Heads) -> Iterator[list[Cell]]:
    for ours, theirs in COMPARED:
        right = _right(one, CLASSES, ours) - _right(one, LENGTHS, theirs)
        loss = mean(_loss(one, CLASSES) - _loss(one, LENGTHS), one.group)
        shown = loss if theirs == PROBABLE else [None] * 3
        yield [one.dataset, GAIN, theirs, *mean(right, one.group), *shown]


def _bases(one: Heads) -> Iterator[list[Cell]]:
    most = float(one.targets.double().mean(0).max())
    yield [one.dataset, "shares", PROBABLE, most, None, None, base_rate(one.targets), None, None]


def _right(one: Heads, head: str, decision: str) -> Tensor:
    """[n] how probable the class is that was decided: with labels of one draw 0 or 1."""
    return one.targets.double().gather(1, one.decided[head, decision][:, None])[:, 0]


def _loss(one: Heads, head: str) -> Tensor:
    return log_loss(one.probs[head].double(), one.targets.double())


def _draw(found: Sequence[drawing.Record], canvas: Canvas) -> None:
    shown = [record for record in found if record["head"] in (CLASSES, LENGTHS)]
    for record in shown:
        record["what"] = f"{record['head']}, {record['decision']}"
    panels = drawing.panels(canvas, ["accuracy of the class", "log loss of the classes"])
    for axes, value in zip(panels, ("accuracy", "log loss"), strict=True):
        part = [record for record in shown if record[value] is not None]
        drawing.dots(axes, part, value, "dataset", "what")
    drawing.legend(canvas, panels[0], across=2)


def _builders(artifacts: Artifacts) -> list[Builder]:
    every = artifacts.checkpoints
    pairs = [(one, counterpart(one, every)) for one in of_hrad(artifacts)]
    found: list[Builder] = [
        partial(_of_checkpoints, artifacts, one, other) for one, other in pairs if other is not None
    ]
    return found or [partial(lacking, NEEDS)]


def _of_checkpoints(artifacts: Artifacts, one: Checkpoint, other: Checkpoint) -> Figure:
    return lengths_table(heads(one, other, artifacts.harvests))


FIGURES = (
    Entry(
        "Three classes against a predictor of the length",
        "Two heads trained on the same rows, the same rounds. Accuracy: how often the class decided"
        " comes true; of lengths, the class of the length decided, or the class that their summed"
        " probabilities favour. Priors divided out: every class, or every length, weighs the same,"
        " as when the heads were trained with balanced draws. Differences are paired; shares: of"
        " always saying the most frequent class, and of the classes' own shares.",
        _builders,
    ),
)
