"""What the predictors see and know: activations of H-RAD, its confusion, stale features, and
settings of SpecDec++."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from matplotlib.figure import Figure as Canvas
from sklearn.manifold import TSNE
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from predictors.card import confusion
from predictors.metrics import log_loss
from reports.artifacts import Checkpoint
from reports.drawing import COLOURS, DASHES, MARKERS, Record, distinct, panels, reach, records
from reports.estimates import cells, mean
from reports.figure import Cell, Figure, Missing
from reports.figures.calibration import base_rate
from runtime.intervals import METHOD
from runtime.intervals import columns as estimate_columns

CLASSES = ("none", "some", "all")
POINTS, NEIGHBOURS, SEED = 400, 10, 0
HARVEST = "python scripts/gen_data.py anchors.stride=1 out=data/rounds"

# Activations --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Activations:
    """Feature vectors of rounds [n, D] by kind of feature; the class of the round and its prompt,
    [n]."""

    dataset: str
    gamma: int
    features: Mapping[str, Tensor]
    label: Tensor
    group: Tensor


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
        title=f"t-SNE of the target's states before a round of {found.gamma}, {found.dataset}",
        source="SpecBranch, figure 3",
        kind="modelled",
        n=f"{len(found.group.unique())} prompts, {len(found.label)} rounds",
        interval=f"{METHOD} of the share of same-class neighbours",
        reading=(
            "Explicit: hidden states of the target's last layers at the last verified position;"
            " hybrid: with the embedding of the token that follows. t-SNE may show clusters that"
            " mean nothing, so neighbours are counted in the features themselves: of the"
            f" {NEIGHBOURS} nearest rounds of other prompts, as many are of the same class: {said};"
            f" by chance {chance:.3f}."
        ),
        columns=columns,
        rows=rows,
        draw=partial(_draw_tsne, records(columns, rows)),
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
            part = [
                record for record in found if (record["features"], record["class"]) == (name, label)
            ]
            x, y = ([record[column] for record in part] for column in "xy")
            axes.scatter(
                x,
                y,
                s=18,
                marker=MARKERS[place],
                color=COLOURS[place],
                alpha=0.6,
                linewidths=0,
                label=label,
            )
        axes.set(
            xlabel="first dimension (no unit)",
            ylabel="second dimension (no unit)",
            xticks=[],
            yticks=[],
        )
    canvas.legend(
        *canvas.axes[0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=3,
        title="accepted",
    )


# Confusion ----------------------------------------------------------------------------------------


def confusions(checkpoint: Checkpoint) -> Figure:
    """Classes decided against classes that came true, on the test split of the harvest trained
    on."""
    name, metrics = checkpoint.config["predictor"], checkpoint.config["metrics"]
    counts = confusion(name, metrics)
    if counts is None:
        raise Missing("needs a checkpoint that predicts classes: python train.py predictor=hrad")
    columns = ["true class", "decided", "rounds", "of the true class, %"]
    rows: list[list[Cell]] = [
        [CLASSES[true], CLASSES[decided], count, 100 * count / max(1, sum(row))]
        for true, row in enumerate(counts)
        for decided, count in enumerate(row)
    ]
    right, total = sum(counts[c][c] for c in range(len(counts))), sum(map(sum, counts))
    most = max(map(sum, counts)) / total
    splits = checkpoint.config["provenance"]["data"]["splits"]
    return Figure(
        name=f"confusion-{checkpoint.folder.name}",
        title=f"Classes decided by {checkpoint.folder.name}",
        source="SpecBranch, confusion matrix of H-RAD",
        kind="measured",
        n=(
            f"{splits['test']['prompts']} prompts, {total} rounds of {checkpoint.config['gamma']}"
            " draft tokens"
        ),
        interval="no interval: counts",
        reading=(
            f"Decided with class priors divided out, as in decoding: right {right / total:.1%} of"
            f" the time, while always saying the most frequent class is right {most:.1%}."
        ),
        columns=columns,
        rows=rows,
        draw=partial(_draw_confusion, records(columns, rows)),
    )


def _draw_confusion(found: Sequence[Record], canvas: Canvas) -> None:
    canvas.set_size_inches(4.6, 4)
    axes = canvas.subplots()
    shares = [record["of the true class, %"] for record in found]
    image = axes.imshow(torch.tensor(shares).view(3, 3).numpy(), cmap="Blues", vmin=0, vmax=100)
    for place, record in enumerate(found):
        colour = "white" if shares[place] > 60 else "black"
        text = f"{record['rounds']}\n{shares[place]:.0f} %"
        axes.text(place % 3, place // 3, text, ha="center", va="center", color=colour)
    axes.set_xticks(range(3), CLASSES)
    axes.set_yticks(range(3), CLASSES)
    axes.set(xlabel="decided", ylabel="true class")
    canvas.colorbar(image, label="of the true class, %")


# Feature age --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Aged:
    """What an H-RAD checkpoint says of the same rounds from features of several ages.

    probs: age in positions -> calibrated probabilities [n, 3]; decided: age -> class [n]; targets:
    [n, 3]; group: [n]"""

    checkpoint: str
    dataset: str
    gamma: int
    probs: Mapping[int, Tensor]
    decided: Mapping[int, Tensor]
    targets: Tensor
    group: Tensor


def feature_age(found: Sequence[Aged]) -> Figure:
    """Accuracy of the decision and log loss of the probabilities, by age of the features."""
    if not found:
        raise Missing(
            f"needs an H-RAD checkpoint and a harvest with a round at every position: {HARVEST}"
        )
    columns = [
        "dataset",
        "age (positions)",
        *estimate_columns("accuracy"),
        *estimate_columns("log loss"),
    ]
    columns += ["most frequent class", "base rate, log loss"]
    rows = [row for one in found for row in _age_rows(one)]
    prompts, rounds = (
        sum(len(one.group.unique()) for one in found),
        sum(len(one.group) for one in found),
    )
    return Figure(
        name=f"feature-age-{found[0].checkpoint}",
        title=f"{found[0].checkpoint}: prediction against the age of its features",
        source="SpecBranch, figure 19",
        kind="measured",
        n=f"{prompts} prompts, {rounds:,} rounds of {found[0].gamma} draft tokens",
        interval=METHOD,
        reading=(
            "The same rounds, predicted from the target's states so many positions earlier; 0 is"
            " what the serial engine uses, a class known a priori is about a round older. Grey:"
            " accuracy of always saying the most frequent class, and log loss of the classes' own"
            " shares."
        ),
        columns=columns,
        rows=rows,
        draw=partial(_draw_age, records(columns, rows)),
    )


def _age_rows(one: Aged) -> Iterator[list[Cell]]:
    label, most = one.targets.argmax(1), float(one.targets.double().mean(0).max())
    for age, probs in one.probs.items():
        right = mean((one.decided[age] == label).double(), one.group)
        loss = mean(log_loss(probs.double(), one.targets.double()), one.group)
        yield [one.dataset, age, *right, *loss, most, base_rate(one.targets)]


def _draw_age(found: Sequence[Record], canvas: Canvas) -> None:
    canvas.set_size_inches(8.4, 4)
    bases = {"accuracy": "most frequent class", "log loss": "base rate, log loss"}
    for axes, (name, base) in zip(canvas.subplots(1, 2), bases.items(), strict=True):
        for place, dataset in enumerate(distinct(found, "dataset")):
            part = [record for record in found if record["dataset"] == dataset]
            x, y = ([record[column] for record in part] for column in ("age (positions)", name))
            at = [age + 0.06 * place for age in x]
            style = f"{MARKERS[place]}{DASHES[place % len(DASHES)]}"
            axes.errorbar(
                at,
                y,
                yerr=reach(part, name),
                fmt=style,
                color=COLOURS[place],
                label=dataset,
                capsize=2,
            )
            marks = {"marker": MARKERS[place], "facecolors": "none", "edgecolors": "grey"}
            axes.scatter([-0.6], [part[0][base]], **marks)
        axes.set(xlabel="age of the features (positions)", ylabel=name)
    canvas.legend(
        *canvas.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=5, fontsize=8
    )


# Settings -----------------------------------------------------------------------------------------


def sweep(checkpoints: Sequence[Checkpoint]) -> Figure:
    """Held-out scores of SpecDec++ heads by depth and w_rej."""
    heads = [one for one in checkpoints if one.config["predictor"] == "specdecpp"]
    if (
        len({(one.config["settings"]["depth"], one.config["settings"]["w_rej"]) for one in heads})
        < 2
    ):
        command = "python train.py -m predictor.depth=0,1,2,3,4 predictor.w_rej=1,3,6,12"
        raise Missing(f"needs SpecDec++ checkpoints of several depths or weights: {command}")
    columns = [
        "checkpoint",
        "recipe",
        "depth",
        "w_rej",
        *estimate_columns("log loss"),
        "kl",
        "ece",
        "auroc",
    ]
    rows = sorted(map(_sweep_row, heads), key=lambda row: [str(row[1]), row[2], row[3]])
    return Figure(
        name="head-settings",
        title="SpecDec++ heads by depth and weight of rejections",
        source="SpecDec++, table 3",
        kind="measured",
        n=", ".join(
            sorted(
                {f"{_test(one)['prompts']} prompts, {_test(one)['rows']:,} rows" for one in heads}
            )
        ),
        interval=f"{METHOD}, pivotal",
        reading=(
            "Test split of the harvest trained on, after calibration, which undoes the shift of"
            " w_rej. Intervals that overlap do not tell settings apart; what they are worth in"
            " speed is in scripts/collect.py."
        ),
        columns=columns,
        rows=rows,
        draw=partial(_draw_sweep, records(columns, rows)),
    )


def _sweep_row(one: Checkpoint) -> list[Cell]:
    settings, metrics = one.config["settings"], one.config["metrics"]
    stages = next(iter(metrics["reliability"].values()))["token"]
    scores = [metrics["test"]["specdecpp"][name] for name in ("kl", "ece", "auroc")]
    named = [one.folder.name, *(settings[name] for name in ("recipe", "depth", "w_rej"))]
    return [*named, *cells(stages["calibrated"]["log_loss"]), *scores]


def _test(one: Checkpoint) -> Mapping[str, int]:
    found: Mapping[str, int] = one.config["provenance"]["data"]["splits"]["test"]
    return found


def _draw_sweep(found: Sequence[Record], canvas: Canvas) -> None:
    axes = canvas.subplots()
    groups = list(dict.fromkeys((record["recipe"], record["w_rej"]) for record in found))
    for place, (recipe, weight) in enumerate(groups):
        part = [
            record for record in found if (record["recipe"], record["w_rej"]) == (recipe, weight)
        ]
        at = [record["depth"] + 0.08 * (place - (len(groups) - 1) / 2) for record in part]
        style = f"{MARKERS[place % len(MARKERS)]}{DASHES[place % len(DASHES)]}"
        y = [record["log loss"] for record in part]
        colour, label = COLOURS[place % len(COLOURS)], f"{recipe}, w_rej = {weight:g}"
        axes.errorbar(
            at, y, yerr=reach(part, "log loss"), fmt=style, color=colour, label=label, capsize=2
        )
    axes.set_xticks(sorted({record["depth"] for record in found}))
    axes.set(xlabel="depth (residual blocks)", ylabel="log loss")
    canvas.legend(loc="outside upper center", ncols=4, fontsize=8)
