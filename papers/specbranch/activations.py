"""What H-RAD reads and makes of it, in two dimensions, and whether rounds of one class lie together
there."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure as Canvas
from sklearn.manifold import TSNE
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from papers.specbranch.hrad_data import (
    LENGTHS,
    LENGTHS_COMMAND,
    Activations,
    activations,
    counterpart,
    of_hrad,
)
from reports.artifacts import Artifacts, Checkpoint
from reports.drawing import COLOURS, MARKERS, Record, distinct, panels, records
from reports.figure import Builder, Cell, Entry, Figure, lacking
from reports.row_means import mean
from runtime.intervals import METHOD

NAMES = ("none", "some", "all")
NEIGHBOURS, SEED = 10, 0
NEEDS = "needs an H-RAD checkpoint: python train.py predictor=hrad"


def tsne(found: Activations) -> Figure:
    """Two dimensions that keep neighbours together, and how often neighbours are of the same
    class."""
    columns = ["features", "x", "y", "class"]
    shares = {name: same_class(x, found) for name, x in found.features.items()}
    rows: list[list[Cell]] = [
        [name, *place, NAMES[label]]
        for name, x in found.features.items()
        for place, label in zip(embedded(x), found.label.tolist(), strict=True)
    ]
    chance = float((torch.bincount(found.label, minlength=3) / len(found.label)).square().sum())
    said = "; ".join(f"{name} {_span(share)}" for name, share in shares.items())
    return Figure(
        name=f"tsne-{found.checkpoint}",
        title=f"t-SNE of what {found.checkpoint} makes of rounds of {found.gamma}",
        source="SpecBranch, figure 3; its inputs are ours",
        kind="modelled",
        n=f"{len(found.group.unique())} prompts, {len(found.label)} rounds",
        interval=f"{METHOD} of the share of same-class neighbours",
        columns=columns,
        rows=rows,
        draw=partial(_draw_tsne, records(columns, rows)),
        how_to_read=f"Of the same class: {said}; by chance {chance:.3f}.{_lacks(found)}",
    )


def _lacks(found: Activations) -> str:
    return "" if LENGTHS in found.features else f" For a head of lengths: {LENGTHS_COMMAND}."


def _span(share: Sequence[Cell]) -> str:
    value, low, high = share
    return f"{value:.3f}" + ("" if low is None else f" ({low:.3f}-{high:.3f})")


def standardised(x: Tensor) -> Tensor:
    x = x.double()
    return (x - x.mean(0)) / x.std(0).clamp_min(1e-9)


def embedded(x: Tensor) -> list[list[float]]:
    """[n, D] -> n points."""
    perplexity = min(30, (len(x) - 1) / 3)
    places = TSNE(2, perplexity=perplexity, init="pca", random_state=SEED).fit_transform(
        standardised(x).numpy()
    )
    return [[float(x), float(y)] for x, y in places]


def same_class(x: Tensor, found: Activations) -> list[Cell]:
    """Share of the nearest rounds of other prompts that are of the same class."""
    x = standardised(x)
    nearest = (
        NearestNeighbors(n_neighbors=len(x))
        .fit(x.numpy())
        .kneighbors(x.numpy(), return_distance=False)
    )
    shares = []
    for row, order in enumerate(torch.from_numpy(nearest)):
        others = order[found.group[order] != found.group[row]][:NEIGHBOURS]
        shares.append((found.label[others] == found.label[row]).double().mean())
    return mean(torch.stack(shares), found.group)


def _draw_tsne(found: Sequence[Record], canvas: Canvas) -> None:
    names = distinct(found, "features")
    for name, axes in zip(names, panels(canvas, names, most=3, size=(3.4, 3.0)), strict=True):
        for place, label in enumerate(NAMES):
            part = [one for one in found if (one["features"], one["class"]) == (name, label)]
            x, y = ([record[column] for record in part] for column in "xy")
            style: dict[str, Any] = {
                "s": 18,
                "marker": MARKERS[place],
                "color": COLOURS[place],
                "linewidths": 0,
            }
            axes.scatter(x, y, alpha=0.6, label=label, **style)
        axes.set(xlabel="first dimension (no unit)", ylabel="second dimension (no unit)")
        axes.set(xticks=[], yticks=[])
    handles = canvas.axes[0].get_legend_handles_labels()
    canvas.legend(*handles, loc="outside upper center", ncols=3, title="accepted")


def _builders(artifacts: Artifacts) -> list[Builder]:
    return [partial(_of_checkpoint, artifacts, one) for one in of_hrad(artifacts)] or [
        partial(lacking, NEEDS)
    ]


def _of_checkpoint(artifacts: Artifacts, checkpoint: Checkpoint) -> Figure:
    lengths = counterpart(checkpoint, artifacts.checkpoints)
    return tsne(activations(checkpoint, lengths, artifacts.harvests))


FIGURES = (
    Entry(
        "What H-RAD makes of what it reads",
        "Rounds of the test split of the harvest trained on. Inputs: what the head reads; three"
        " classes, lengths: activations of the last hidden layer of the head, and of one trained on"
        " the same rows to predict the length itself. t-SNE may show clusters that mean nothing, so"
        f" neighbours are counted before it: how many of the {NEIGHBOURS} nearest rounds of other"
        " prompts are of the same class.",
        _builders,
    ),
)
