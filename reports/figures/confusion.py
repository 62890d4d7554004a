"""Predicted classes against true classes."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure as Canvas

from predictors.card import confusion
from reports.artifacts import Checkpoint
from reports.drawing import distinct
from reports.figure import Entry, Figure, Missing, Record, each
from reports.harvest_data import one_of_each
from runtime.text import plural

NEEDS = "needs a checkpoint that predicts classes: python train.py predictor=hrad"
SHARE = "of the true class, %"


def confusions(checkpoint: Checkpoint) -> Figure:
    """Return the figure of one checkpoint, on the test split of the harvest trained on."""
    config, name = checkpoint.config, checkpoint.folder.name
    counts = confusion(config["predictor"], config["metrics"])
    if counts is None:
        raise Missing(NEEDS)
    classes, splits = config["classes"], config["provenance"]["data"]["splits"]
    right, total = sum(counts[c][c] for c in range(len(counts))), sum(map(sum, counts))
    rows = f"rounds of {config['gamma']} draft tokens" if config["gamma"] else "rows"
    return Figure(
        name=f"confusion-{name}",
        title=f"Classes decided by {name}",
        source="Ours, a confusion matrix",
        kind="measured",
        n=f"{plural(splits['test']['prompts'], 'prompt')}, {total} {rows}",
        interval="no interval: counts",
        records=[
            {
                "true class": classes[true],
                "decided": classes[decided],
                "rows": count,
                SHARE: 100 * count / max(1, sum(row)),
            }
            for true, row in enumerate(counts)
            for decided, count in enumerate(row)
        ],
        draw=_draw,
        how_to_read=(
            f"Right {right / total:.1%} of the time; always saying the most frequent class is right"
            f" {max(map(sum, counts)) / total:.1%}."
        ),
    )


def _draw(records: Sequence[Record], canvas: Canvas) -> None:
    canvas.set_size_inches(4.6, 4)
    axes, classes = canvas.subplots(), distinct(records, "true class")
    shares = [record[SHARE] for record in records]
    size = len(classes)
    image = axes.imshow(np.reshape(shares, (size, size)), cmap="Blues", vmin=0, vmax=100)
    for place, record in enumerate(records):
        colour = "white" if shares[place] > 60 else "black"
        text = f"{record['rows']}\n{shares[place]:.0f} %"
        axes.text(place % size, place // size, text, ha="center", va="center", color=colour)
    axes.set_xticks(range(size), classes)
    axes.set_yticks(range(size), classes)
    axes.set(xlabel="decided", ylabel="true class")
    canvas.colorbar(image, label=SHARE)


FIGURES = (
    Entry(
        "Confusion of classes",
        "Rows are what happened, columns what was decided, with class priors divided out as in"
        " decoding. A classifier helps only where it is right more often than the most frequent"
        " class.",
        lambda artifacts: each(one_of_each(artifacts.checkpoints), confusions, NEEDS),
    ),
)
