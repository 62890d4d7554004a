"""Calibration of predicted probabilities: reliability before and after calibration, and across
datasets."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.figure import Figure as Canvas
from torch import Tensor

from predictors.metrics import log_loss, one_column
from predictors.reliability import mass_bins, reliability
from reports.artifacts import Artifacts, Checkpoint
from reports.drawing import distinct, panels, reach, where
from reports.figure import Builder, Entry, Figure, Missing, Record, each, estimated, mean
from reports.harvest_data import Predicted, one_of_each, predicted
from runtime.intervals import METHOD
from runtime.text import plural

NEEDS = (
    "needs a checkpoint and the harvest it was trained on (python train.py), and for other datasets"
    " harvests of the same pair and temperatures"
)
STAGES = ("as trained", "calibrated")


def diagrams(predictions: Sequence[Predicted]) -> Figure:
    """Return predictions of one checkpoint against outcomes, in bins of equal mass, a panel for
    every dataset."""
    if not predictions:
        raise Missing(NEEDS)
    first = predictions[0]
    what = (
        "acceptance of a draft token"
        if first.targets.shape[1] == 2
        else "the class predicted most likely"
    )
    return Figure(
        name=f"reliability-{first.checkpoint}",
        title=f"Reliability of {first.checkpoint}, trained on {first.trained_on}",
        source="Reliability diagrams",
        kind="measured",
        n=_rows(predictions),
        interval=f"{METHOD} in every bin",
        records=[record for one in predictions for record in _bins(one)],
        draw=draw_diagrams,
        how_to_read=f"Here: the probability of {what}.",
    )


def of_bins(name: str, measured: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Return `diagrams` of the bins that training has measured, by harvest
    (`predictors.reliability.measured`), without intervals."""
    records, counts = [], dict[str, int]()
    for place, stages in measured.items():
        scores = next(iter(stages.values()))
        counts[place] = scores[STAGES[0]]["rows"]
        records += [
            {
                **{"prompts of": place, "probabilities": stage, "bin": number},
                **{"rows": round(share * counts[place]), "mean prediction": mean_prediction},
                "outcome": outcome,
            }
            for stage in STAGES
            for number, (share, mean_prediction, outcome) in enumerate(scores[stage]["bins"], 1)
        ]
    return Figure(
        name=f"reliability-{name}",
        title=f"Reliability of {name}",
        source="Reliability diagrams",
        kind="measured",
        n=plural(sum(counts.values()), "row"),
        interval="no interval here; the report has them",
        records=records,
        draw=draw_diagrams,
    )


def _bins(one: Predicted) -> Iterator[Record]:
    for stage, probs in zip(STAGES, (one.as_trained, one.calibrated), strict=True):
        predicted, outcome = one_column(probs.double(), one.targets.double())
        bins = mass_bins(predicted)
        for number in bins.unique().tolist():
            rows = bins == number
            yield {
                **{"prompts of": one.where, "probabilities": stage, "bin": number + 1},
                "rows": int(rows.sum()),
                "mean prediction": float(predicted[rows].mean()),
                **mean("outcome", outcome[rows], one.group[rows]),
            }


def draw_diagrams(records: Sequence[Record], canvas: Canvas) -> None:
    """Draw a panel for each of "prompts of", a line for each of "probabilities", with the intervals
    of "outcome" where there are any."""
    names = distinct(records, "prompts of")
    for name, axes in zip(names, panels(canvas, names, most=3, size=(3.4, 3.2)), strict=True):
        axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
        for stage, colour, style in zip(
            STAGES, ("tab:orange", "tab:blue"), ("s--", "o-"), strict=True
        ):
            part = where(records, **{"prompts of": name, "probabilities": stage})
            axes.errorbar(
                [record["mean prediction"] for record in part],
                [record["outcome"] for record in part],
                yerr=reach(part, "outcome"),
                fmt=style,
                color=colour,
                label=stage,
                capsize=2,
            )
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="mean prediction", ylabel="how often it happened")
        axes.set_aspect("equal")
    canvas.axes[0].legend(loc="upper left", fontsize=8)


def drift(predictions: Sequence[Predicted]) -> Figure:
    """Return calibration error and log loss of checkpoints of one kind on every dataset, with the
    calibration of their training dataset."""
    if not predictions:
        raise Missing(NEEDS)
    records = []
    for one in predictions:
        scores = reliability(one.calibrated, one.targets, one.group)
        records.append(
            {
                **{"checkpoint": one.checkpoint, "trained on": one.trained_on},
                **{"prompts of": one.where, "prompts": one.prompts, "rows": len(one.group)},
                **estimated("calibration error", scores["ece"]),
                **estimated("log loss", scores["log_loss"]),
                "base rate": base_rate(one.targets),
            }
        )
    predictor, temperature = predictions[0].predictor, predictions[0].temperature
    at_home = {(one.checkpoint, one.where) for one in predictions if one.in_domain}
    return Figure(
        name=f"drift-{predictor}-T{temperature:g}",
        title=f"{predictor}: calibration on other datasets, T = {temperature:g}",
        source="Drift matrix",
        kind="measured",
        n=_rows(predictions),
        interval=f"{METHOD}, pivotal",
        records=records,
        draw=partial(_draw_matrix, at_home=at_home),
    )


def base_rate(targets: Tensor) -> float:
    """Return the log loss of always predicting the mean of the targets [n, C]."""
    targets = targets.double()
    return float(log_loss(targets.mean(0).expand_as(targets), targets).mean())


def _draw_matrix(records: Sequence[Record], canvas: Canvas, at_home: set[tuple[str, str]]) -> None:
    rows, places = distinct(records, "checkpoint"), distinct(records, "prompts of")
    canvas.set_size_inches(max(5, 1.7 * len(places) + 1.6), 0.8 * len(rows) + 1.6)
    axes = canvas.subplots()
    table = [[float("nan")] * len(places) for _ in rows]
    for record in records:
        y, x = rows.index(record["checkpoint"]), places.index(record["prompts of"])
        table[y][x] = record["calibration error"]
        text = f"{record['calibration error']:.3f}"
        if record["calibration error low"] is not None:
            text += (
                f"\n{record['calibration error low']:.3f}-{record['calibration error high']:.3f}"
            )
        boxed = (record["checkpoint"], record["prompts of"]) in at_home
        box = {"edgecolor": "black", "facecolor": "white"} if boxed else None
        axes.text(x, y, text, ha="center", va="center", fontsize=8, bbox=box)
    image = axes.imshow(table, cmap="Oranges", vmin=0, vmax=0.15, aspect="auto")
    axes.set_xticks(
        range(len(places)), [place.replace(", ", ",\n") for place in places], fontsize=8
    )
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set_xlabel("prompts of")
    axes.set_ylabel("checkpoint")
    canvas.colorbar(image, label="calibration error", extend="max")


def _rows(predictions: Sequence[Predicted]) -> str:
    rows = sum(len(one.group) for one in predictions)
    prompts = plural(sum(one.prompts for one in predictions), "prompt")
    return f"{prompts}, {plural(rows, 'row')}"


def _drifts(artifacts: Artifacts) -> list[Builder]:
    """Return the builder of each kind of predictor and temperature."""
    kinds: dict[tuple[str, float], list[Checkpoint]] = {}
    for checkpoint in one_of_each(artifacts.checkpoints):
        config = checkpoint.config
        kind = config["predictor"], float(config["warp"]["temperature"])
        kinds.setdefault(kind, []).append(checkpoint)

    def build(alike: Sequence[Checkpoint]) -> Figure:
        return drift([one for checkpoint in alike for one in predicted(checkpoint, artifacts)])

    return each(kinds.values(), build, NEEDS)


FIGURES = (
    Entry(
        "Reliability before and after calibration",
        "On the diagonal, predictions happen as often as they say; points below it promise too"
        " much. Calibration was fitted on the calibration split of the harvest trained on.",
        lambda artifacts: each(
            one_of_each(artifacts.checkpoints),
            lambda checkpoint: diagrams(predicted(checkpoint, artifacts)),
            NEEDS,
        ),
    ),
    Entry(
        "Drift across datasets",
        "Expected calibration error in ten bins of equal mass; boxed: the test prompts of the"
        " harvest trained on, elsewhere all prompts it does not hold. Base rate: log loss of the"
        " classes' own shares there. Where the log loss is above it, the predictor knows less than"
        " those shares.",
        _drifts,
    ),
)
