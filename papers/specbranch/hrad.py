"""H-RAD heads on rounds they were not trained on: in two dimensions, with older features, by the
layers they read, and compared with a head of lengths."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from matplotlib.figure import Figure as Canvas
from sklearn.manifold import TSNE
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from papers.specbranch.hrad_data import (
    CLASSES,
    EVEN,
    LENGTHS,
    LENGTHS_COMMAND,
    LONE,
    PROBABLE,
    Activations,
    Aged,
    Heads,
    activations,
    aged,
    classifiers,
    counterpart,
    heads,
    of_hrad,
)
from predictors.metrics import log_loss
from reports import drawing
from reports.artifacts import Artifacts, Checkpoint, grouped
from reports.figure import Builder, Entry, Figure, Missing, Record, each, estimated, mean
from reports.figures.calibration import base_rate
from reports.harvest_data import Predicted, predicted
from runtime.intervals import METHOD

NAMES = ("none", "some", "all")
NEIGHBOURS, SEED = 10, 0
NEEDS = "needs an H-RAD checkpoint: python train.py predictor=hrad"
MOST, BASE = "most frequent class", "base rate, log loss"
NOTHING = (None, None, None)


def right(targets: Tensor, decided: Tensor) -> Tensor:
    """Return the probability of the decided class under the targets, [n]: 0 or 1 for labels of one
    draw."""
    return targets.double().gather(1, decided[:, None])[:, 0]


def losses(probs: Tensor, targets: Tensor) -> Tensor:
    return log_loss(probs.double(), targets.double())


def most_frequent(targets: Tensor) -> float:
    """Return the accuracy of always predicting the most frequent class."""
    return float(targets.double().mean(0).max())


def _rounds(parts: Sequence[Aged] | Sequence[Heads] | Sequence[Predicted], gamma: int) -> str:
    prompts = sum(len(one.group.unique()) for one in parts)
    rounds = sum(len(one.group) for one in parts)
    return f"{prompts} prompts, {rounds:,} rounds of {gamma} draft tokens"


# In two dimensions --------------------------------------------------------------------------------


def tsne(states: Activations) -> Figure:
    """Return a t-SNE embedding of the states, and how often neighbours are of the same class."""
    shares = []
    for name, x in states.features.items():
        value, low, high = same_class(x, states).values()
        interval = "" if low is None else f" ({low:.3f}-{high:.3f})"
        shares.append(f"{name} {value:.3f}{interval}")
    chance = float((torch.bincount(states.label, minlength=3) / len(states.label)).square().sum())
    lengths = "" if LENGTHS in states.features else f" For a head of lengths: {LENGTHS_COMMAND}."
    return Figure(
        name=f"tsne-{states.checkpoint}",
        title=f"t-SNE of what {states.checkpoint} makes of rounds of {states.gamma}",
        source="SpecBranch, figure 3; its inputs are ours",
        kind="modelled",
        n=f"{len(states.group.unique())} prompts, {len(states.label)} rounds",
        interval=f"{METHOD} of the share of same-class neighbours",
        records=[
            {"features": name, "x": x, "y": y, "class": NAMES[label]}
            for name, features in states.features.items()
            for (x, y), label in zip(embedded(features), states.label.tolist(), strict=True)
        ],
        draw=_draw_tsne,
        how_to_read=f"Of the same class: {'; '.join(shares)}; by chance {chance:.3f}.{lengths}",
    )


def standardised(x: Tensor) -> Tensor:
    x = x.double()
    return (x - x.mean(0)) / x.std(0).clamp_min(1e-9)


def embedded(x: Tensor) -> list[list[float]]:
    """Return the n points that embed x [n, D] in two dimensions."""
    perplexity = min(30, (len(x) - 1) / 3)
    points = TSNE(2, perplexity=perplexity, init="pca", random_state=SEED).fit_transform(
        standardised(x).numpy()
    )
    return [[float(x), float(y)] for x, y in points]


def same_class(x: Tensor, states: Activations) -> Record:
    """Return the share of the nearest rounds of other prompts that are of the same class."""
    points = standardised(x).numpy()
    neighbours = NearestNeighbors(n_neighbors=len(x)).fit(points)
    nearest = neighbours.kneighbors(points, return_distance=False)
    shares = []
    for row, order in enumerate(torch.from_numpy(nearest)):
        others = order[states.group[order] != states.group[row]][:NEIGHBOURS]
        shares.append((states.label[others] == states.label[row]).double().mean())
    return mean("share", torch.stack(shares), states.group)


def _draw_tsne(records: Sequence[Record], canvas: Canvas) -> None:
    names = drawing.distinct(records, "features")
    panels = drawing.panels(canvas, names, most=3, size=(3.4, 3.0))
    for name, axes in zip(names, panels, strict=True):
        for place, label in enumerate(NAMES):
            part = drawing.where(records, **{"features": name, "class": label})
            axes.scatter(
                [record["x"] for record in part],
                [record["y"] for record in part],
                alpha=0.6,
                label=label,
                s=18,
                marker=drawing.MARKERS[place],
                color=drawing.COLOURS[place],
                linewidths=0,
            )
        axes.set(xlabel="first dimension (no unit)", ylabel="second dimension (no unit)")
        axes.set(xticks=[], yticks=[])
    handles = canvas.axes[0].get_legend_handles_labels()
    canvas.legend(*handles, loc="outside upper center", ncols=3, title="accepted")


# From older features ------------------------------------------------------------------------------


def feature_age(parts: Sequence[Aged]) -> Figure:
    """Return accuracy of the decision and log loss of the probabilities, by age of the features."""
    if not parts:
        raise Missing(
            "needs an H-RAD checkpoint and a harvest with a round at every position: python"
            " scripts/gen_data.py anchors.stride=1 out=data/rounds"
        )
    first, unit = parts[0], parts[0].unit
    about = (
        f"Trained on states of age {first.trained_age}, in rounds. " if first.trained_age else ""
    )
    if unit == "rounds":
        backs = [f"{one.dataset} {one.back[max(one.back)] / max(one.back):.2f}" for one in parts]
        about += f"Positions in a round, on average: {', '.join(backs)}."
    return Figure(
        name=f"feature-age-{unit}-{first.checkpoint}",
        title=f"{first.checkpoint}: prediction against the age of its features in {unit}",
        source="SpecBranch, figure 19",
        kind="measured",
        n=_rounds(parts, first.gamma),
        records=[record for one in parts for record in _ages(one)],
        draw=partial(_draw_age, unit=unit),
        how_to_read=about.strip(),
    )


def _ages(one: Aged) -> Iterator[Record]:
    now = losses(one.probs[0], one.targets)
    for age, probs in one.probs.items():
        loss = losses(probs, one.targets)
        yield {
            **{"dataset": one.dataset, f"age ({one.unit})": age},
            **mean("accuracy", right(one.targets, one.decided[age]), one.group),
            **mean("log loss", loss, one.group),
            **mean("log loss above age 0", loss - now, one.group),
            **{MOST: most_frequent(one.targets), BASE: base_rate(one.targets)},
        }


def _draw_age(records: Sequence[Record], canvas: Canvas, unit: str) -> None:
    canvas.set_size_inches(8.4, 4)
    x = f"age ({unit})"
    for axes, (y, base) in zip(
        canvas.subplots(1, 2), {"accuracy": MOST, "log loss": BASE}.items(), strict=True
    ):
        for place, dataset in enumerate(drawing.distinct(records, "dataset")):
            part, line = drawing.where(records, dataset=dataset), drawing.style(place)
            axes.errorbar(
                [record[x] + 0.0125 * part[-1][x] * place for record in part],
                [record[y] for record in part],
                yerr=drawing.reach(part, y),
                label=dataset,
                capsize=2,
                **line,
            )
            at = [-0.6 if unit == "positions" else -0.2], [part[0][base]]
            axes.scatter(*at, marker=line["marker"], facecolors="none", edgecolors="grey")
        axes.set(xlabel=f"age of the features ({unit})", ylabel=y)
    handles = canvas.axes[0].get_legend_handles_labels()
    canvas.legend(*handles, loc="outside upper center", ncols=5, fontsize=8)


def _of_age(artifacts: Artifacts, unit: str) -> list[Builder]:
    def build(checkpoint: Checkpoint) -> Figure:
        return feature_age(aged(checkpoint, artifacts.harvests, unit))

    return each(of_hrad(artifacts), build, NEEDS)


# By the layers ------------------------------------------------------------------------------------


def by_layers(checkpoints: Sequence[Checkpoint], artifacts: Artifacts) -> Figure:
    """Return accuracy and log loss on the same rounds, and the log loss above that of the fewest
    layers."""
    on_harvests = {
        count_of(one): predicted(one, artifacts) for one in sorted(checkpoints, key=count_of)
    }
    fewest, *_ = on_harvests.values()
    if not fewest:
        raise Missing("needs the harvest they were trained on: python scripts/gen_data.py")
    records = []
    for place, least in enumerate(fewest):
        for count, predictions in on_harvests.items():
            one, targets = predictions[place], predictions[place].targets
            loss, of_least = (
                losses(one.calibrated, targets),
                losses(least.calibrated, least.targets),
            )
            records.append(
                {
                    **{"dataset": one.dataset, "layers": count},
                    **mean("accuracy", right(targets, one.calibrated.argmax(1)), one.group),
                    **mean("log loss", loss, one.group),
                    **mean("difference", loss - of_least, one.group),
                    **{MOST: most_frequent(least.targets), BASE: base_rate(least.targets)},
                }
            )
    gamma = checkpoints[0].config["settings"]["gamma"]
    return Figure(
        name=f"hrad-layers-{fewest[0].trained_on}-gamma{gamma}",
        title=f"H-RAD by the layers it reads, trained on {fewest[0].trained_on}",
        source="SpecBranch, table 5, which has the speed of each number of layers",
        kind="measured",
        n=_rounds(fewest, gamma),
        records=records,
        draw=_draw_layers,
    )


def count_of(checkpoint: Checkpoint) -> int:
    return len(checkpoint.config["inputs"]["target_hidden"])


def _draw_layers(records: Sequence[Record], canvas: Canvas) -> None:
    panels = drawing.panels(canvas, ["most probable class", "all classes"])
    for axes, value in zip(panels, ("accuracy", "log loss"), strict=True):
        drawing.lines(axes, records, "layers", value, "dataset")
        axes.set_xlabel("layers of the target")
    drawing.legend(canvas, panels[0])


def by_their_layers(
    artifacts: Artifacts, build: Callable[[Sequence[Checkpoint], Artifacts], Figure]
) -> list[Builder]:
    """Return the builder of each group of checkpoints that differ only in their layers."""

    def rest(one: Checkpoint) -> str:
        settings = {**one.config["settings"], "layers": None}
        return f"{one.training_data} {sorted(settings.items())}"

    several = []
    for alike in grouped(classifiers(artifacts), rest):
        firsts = [same[0] for same in grouped(alike, count_of)]
        if len(firsts) > 1:
            several.append(firsts)
    return each(
        several,
        lambda alike: build(alike, artifacts),
        "needs H-RAD checkpoints of one harvest that read several numbers of layers: python"
        " train.py -m predictor=hrad 'predictor.layers=[-1],[-4,-3,-2,-1],null'",
    )


# Classes and lengths ------------------------------------------------------------------------------


def lengths_table(parts: Sequence[Heads]) -> Figure:
    """Return accuracy of the class, and log loss, on the same rounds, with paired differences."""
    if not parts:
        raise Missing(NO_LENGTHS)
    return Figure(
        name=f"lengths-{parts[0].checkpoint}",
        title=f"{parts[0].checkpoint}: three classes against a predictor of the length",
        source="SpecBranch, figure 3",
        kind="measured",
        n=_rounds(parts, parts[0].gamma),
        records=[record for one in parts for record in _compared(one)],
        draw=_draw_lengths,
    )


NO_LENGTHS = f"needs an H-RAD checkpoint of classes and one of lengths: {LENGTHS_COMMAND}"


def _compared(one: Heads) -> Iterator[Record]:
    def record(head: str, decision: str, hits: Tensor, loss: Tensor) -> Record:
        probable = decision == PROBABLE  # the loss of probabilities does not depend on decisions
        no_loss = estimated("log loss", NOTHING)
        return {
            **{"dataset": one.dataset, "head": head, "decision": decision},
            **mean("accuracy", hits, one.group),
            **(mean("log loss", loss, one.group) if probable else no_loss),
        }

    hits = {key: right(one.targets, decided) for key, decided in one.decided.items()}
    loss = {head: losses(probs, one.targets) for head, probs in one.probs.items()}
    for head, decision in one.decided:
        yield record(head, decision, hits[head, decision], loss[head])
    for ours, theirs in ((PROBABLE, PROBABLE), (PROBABLE, LONE), (EVEN, EVEN)):
        gain = hits[CLASSES, ours] - hits[LENGTHS, theirs]
        yield record(f"{CLASSES} - {LENGTHS}", theirs, gain, loss[CLASSES] - loss[LENGTHS])
    yield {
        **{"dataset": one.dataset, "head": "shares", "decision": PROBABLE},
        **estimated("accuracy", (most_frequent(one.targets), None, None)),
        **estimated("log loss", (base_rate(one.targets), None, None)),
    }


def _draw_lengths(records: Sequence[Record], canvas: Canvas) -> None:
    shown = [
        {**record, "what": f"{record['head']}, {record['decision']}"}
        for record in records
        if record["head"] in (CLASSES, LENGTHS)
    ]
    panels = drawing.panels(canvas, ["accuracy of the class", "log loss of the classes"])
    for axes, value in zip(panels, ("accuracy", "log loss"), strict=True):
        part = [record for record in shown if record[value] is not None]
        drawing.dots(axes, part, value, "dataset", "what")
    drawing.legend(canvas, panels[0], across=2)


def _of_lengths(artifacts: Artifacts) -> list[Builder]:
    every = artifacts.checkpoints
    pairs = [(one, lengths) for one in of_hrad(artifacts) if (lengths := counterpart(one, every))]
    return each(pairs, lambda pair: lengths_table(heads(*pair, artifacts.harvests)), NO_LENGTHS)


GREY = (
    " Accuracy: how often the class decided comes true. Grey: accuracy of always saying the most"
    " frequent class, and log loss of the classes' own shares."
)
FIGURES = (
    Entry(
        "What H-RAD makes of what it reads",
        "Rounds of the test split of the harvest trained on. Inputs: what the head reads; three"
        " classes, lengths: activations of the last hidden layer of the head, and of one trained on"
        " the same rows to predict the length itself. t-SNE may show clusters that mean nothing, so"
        f" neighbours are counted before it: how many of the {NEIGHBOURS} nearest rounds of other"
        " prompts are of the same class.",
        lambda artifacts: each(
            of_hrad(artifacts), lambda one: tsne(activations(one, artifacts)), NEEDS
        ),
    ),
    Entry(
        "Prediction against the age of features",
        "The same rounds, predicted from the target's states so many positions earlier; 0 is what"
        " the serial engine uses." + GREY,
        partial(_of_age, unit="positions"),
    ),
    Entry(
        "Prediction against the age of features in rounds",
        "The same rounds, those that a decode comes to, predicted from the target's states before"
        " the round before, and the one before that; a class known a priori is one round old. A"
        " round goes as many positions on as it has tokens accepted, and one; of a sampled target"
        " text and accepted lengths are treated as independent." + GREY,
        partial(_of_age, unit="rounds"),
    ),
    Entry(
        "H-RAD by the layers it reads",
        "Heads that differ in nothing but the number of the target's layers whose states they read,"
        " on the same rounds. Accuracy: how often the most probable class comes true. Difference:"
        " of the log loss to that of the fewest layers, paired; below 0 more layers are better.",
        partial(by_their_layers, build=by_layers),
    ),
    Entry(
        "Three classes against a predictor of the length",
        "Two heads trained on the same rows, the same rounds. Accuracy: how often the class decided"
        " comes true; of lengths, the class of the length decided, or the class that their summed"
        " probabilities favour. Priors divided out: every class, or every length, weighs the same,"
        " as when the heads were trained with balanced draws. Differences are paired; shares: of"
        " always saying the most frequent class, and of the classes' own shares.",
        _of_lengths,
    ),
)
