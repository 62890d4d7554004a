"""Classes decided against classes that came true."""

from collections.abc import Sequence
from functools import partial

import numpy as np
from matplotlib.figure import Figure as Canvas

from predictors.card import confusion
from reports.artifacts import Artifacts, Checkpoint
from reports.checkpoint_data import one_of_each
from reports.drawing import Record, distinct, records
from reports.figure import Builder, Cell, Entry, Figure, Missing, lacking

NEEDS = "needs a checkpoint that predicts classes: python train.py predictor=hrad"


def confusions(checkpoint: Checkpoint) -> Figure:
    """Of one checkpoint, on the test split of the harvest trained on."""
    config, name = checkpoint.config, checkpoint.folder.name
    counts = confusion(config["predictor"], config["metrics"])
    if counts is None:
        raise Missing(NEEDS)
    classes, splits = config["classes"], config["provenance"]["data"]["splits"]
    columns = ["true class", "decided", "rows", "of the true class, %"]
    rows: list[list[Cell]] = [
        [classes[true], classes[decided], count, 100 * count / max(1, sum(row))]
        for true, row in enumerate(counts)
        for decided, count in enumerate(row)
    ]
    right, total = sum(counts[c][c] for c in range(len(counts))), sum(map(sum, counts))
    most = max(map(sum, counts)) / total
    return Figure(
        name=f"confusion-{name}",
        title=f"Classes decided by {name}",
        source="Ours, a confusion matrix",
        kind="measured",
        n=f"{splits['test']['prompts']} prompts, {total} {_rows(config['gamma'])}",
        interval="no interval: counts",
        columns=columns,
        rows=rows,
        draw=partial(_draw, records(columns, rows)),
        how_to_read=(
            f"Right {right / total:.1%} of the time; always saying the most frequent class is right"
            f" {most:.1%}."
        ),
    )


def _rows(gamma: int | None) -> str:
    return f"rounds of {gamma} draft tokens" if gamma else "rows"


def _draw(found: Sequence[Record], canvas: Canvas) -> None:
    canvas.set_size_inches(4.6, 4)
    axes, classes = canvas.subplots(), distinct(found, "true class")
    shares = [record["of the true class, %"] for record in found]
    size = len(classes)
    image = axes.imshow(np.reshape(shares, (size, size)), cmap="Blues", vmin=0, vmax=100)
    for place, record in enumerate(found):
        colour = "white" if shares[place] > 60 else "black"
        text = f"{record['rows']}\n{shares[place]:.0f} %"
        axes.text(place % size, place // size, text, ha="center", va="center", color=colour)
    axes.set_xticks(range(size), classes)
    axes.set_yticks(range(size), classes)
    axes.set(xlabel="decided", ylabel="true class")
    canvas.colorbar(image, label="of the true class, %")


def _builders(artifacts: Artifacts) -> list[Builder]:
    return [partial(confusions, one) for one in one_of_each(artifacts.checkpoints)] or [
        partial(lacking, NEEDS)
    ]


FIGURES = (
    Entry(
        "Confusion of classes",
        "Rows are what happened, columns what was decided, with class priors divided out as in"
        " decoding. A classifier helps only where it is right more often than the most frequent"
        " class.",
        _builders,
    ),
)
