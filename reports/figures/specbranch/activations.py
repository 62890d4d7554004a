"""What H-RAD reads, in two dimensions, and whether rounds of one class lie together in it."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure as Canvas
from sklearn.manifold import TSNE
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from reports.artifacts import Artifacts, Checkpoint
from reports.checkpoint_data import one_of_each, trained_on
from reports.drawing import COLOURS, MARKERS, Record, distinct, panels, records
from reports.figure import Builder, Cell, Entry, Figure, Missing, lacking
from reports.figures.specbranch.hrad_data import Activations, activations
from reports.row_means import mean
from runtime.intervals import METHOD

CLASSES = ("none", "some", "all")
NEIGHBOURS, SEED = 10, 0
NEEDS = "needs an H-RAD checkpoint: python train.py predictor=hrad"
HOME = (
    "needs an H-RAD checkpoint and the harvest it was trained on: python scripts/gen_data.py;"
    " python train.py predictor=hrad"
)


def tsne(found: Activations) -> Figure:
    """Two dimensions that keep neighbours together, and how often neighbours are of the same
    class."""
    columns = ["features", "x", "y", "class"]
    shares = {name: same_class(x, found) for name, x in found.features.items()}
    rows: list[list[Cell]] = [
        [name, *place, CLASSES[label]]
        for name, x in found.features.items()
        for place, label in zip(embedded(x), found.label.tolist(), strict=True)
    ]
    chance = float((torch.bincount(found.label, minlength=3) / len(found.label)).square().sum())
    said = "; ".join(f"{name} {_span(share)}" for name, share in shares.items())
    return Figure(
        name=f"tsne-{found.dataset}",
        title=f"t-SNE of what H-RAD reads before a round of {found.gamma}, {found.dataset}",
        source=(
            "Ours, of the classifier's inputs; SpecBranch's figure 3 has the activations of its"
            " MLP, for predicting the length and for the three classes"
        ),
        kind="modelled",
        n=f"{len(found.group.unique())} prompts, {len(found.label)} rounds",
        interval=f"{METHOD} of the share of same-class neighbours",
        columns=columns,
        rows=rows,
        draw=partial(_draw_tsne, records(columns, rows)),
        how_to_read=f"Of the same class: {said}; by chance {chance:.3f}.",
    )


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
    for name, axes in zip(names, panels(canvas, names), strict=True):
        for place, label in enumerate(CLASSES):
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


def of_hrad(artifacts: Artifacts) -> list[Checkpoint]:
    chosen = one_of_each(artifacts.checkpoints)
    return [checkpoint for checkpoint in chosen if checkpoint.config["predictor"] == "hrad"]


def _builders(artifacts: Artifacts) -> list[Builder]:
    return [partial(_of_checkpoint, artifacts, one) for one in of_hrad(artifacts)] or [
        partial(lacking, NEEDS)
    ]


def _of_checkpoint(artifacts: Artifacts, checkpoint: Checkpoint) -> Figure:
    home = trained_on(checkpoint, artifacts.harvests)
    if home is None:
        raise Missing(HOME)
    return tsne(activations(home, checkpoint.config["gamma"]))


FIGURES = (
    Entry(
        "What H-RAD reads",
        "Hidden states: of the target's last layers at the last verified position; with embedding:"
        " and that of the token that follows. t-SNE may show clusters that mean nothing, so"
        f" neighbours are counted in the features themselves: how many of the {NEIGHBOURS} nearest"
        " rounds of other prompts are of the same class.",
        _builders,
    ),
)
