"""Whether predicted probabilities mean what they say: reliability before and after calibration, and
across datasets."""

from collections.abc import Iterator, Sequence
from functools import partial

from matplotlib.figure import Figure as Canvas
from torch import Tensor

from predictors.metrics import log_loss, one_column
from predictors.reliability import mass_bins, reliability
from reports.artifacts import Artifacts, Checkpoint
from reports.checkpoint_data import Predicted, one_of_each, predicted
from reports.drawing import Record, distinct, panels, reach, records
from reports.figure import Builder, Cell, Entry, Figure, Missing
from reports.row_means import cells, mean
from runtime.intervals import METHOD
from runtime.intervals import columns as estimate_columns

NEEDS = (
    "needs a checkpoint and the harvest it was trained on (python train.py), and for other datasets"
    " harvests of the same pair and temperatures"
)
STAGES = ("as trained", "calibrated")


def diagrams(found: Sequence[Predicted]) -> Figure:
    """Predictions of one checkpoint against what happened, in bins of equal mass, a panel for every
    dataset."""
    if not found:
        raise Missing(NEEDS)
    first = found[0]
    columns = [
        "prompts of",
        "probabilities",
        "bin",
        "rows",
        "mean prediction",
        *estimate_columns("outcome"),
    ]
    rows = [row for one in found for stage in STAGES for row in _bin_rows(one, stage)]
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
        n=_counted(found),
        interval=f"{METHOD} in every bin",
        columns=columns,
        rows=rows,
        draw=partial(draw_diagrams, records(columns, rows)),
        how_to_read=f"Here: the probability of {what}.",
    )


def _bin_rows(one: Predicted, stage: str) -> Iterator[list[Cell]]:
    predicted, outcome = one_column(_probs(one, stage).double(), one.targets.double())
    place = mass_bins(predicted)
    for number in place.unique().tolist():
        rows = place == number
        about = [one.where, stage, number + 1, int(rows.sum()), float(predicted[rows].mean())]
        yield [*about, *mean(outcome[rows], one.group[rows])]


def draw_diagrams(found: Sequence[Record], canvas: Canvas) -> None:
    """A panel for each of "prompts of", a line for each of "probabilities", with the intervals of
    "outcome" where there are any."""
    names = distinct(found, "prompts of")
    for name, axes in zip(names, panels(canvas, names, most=3, size=(3.4, 3.2)), strict=True):
        axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
        for stage, marker, colour, dash in zip(
            STAGES, "so", ("tab:orange", "tab:blue"), ("--", "-"), strict=True
        ):
            part = [
                record
                for record in found
                if (record["prompts of"], record["probabilities"]) == (name, stage)
            ]
            x, y = (
                [record[column] for record in part] for column in ("mean prediction", "outcome")
            )
            axes.errorbar(
                x,
                y,
                yerr=reach(part, "outcome"),
                fmt=f"{marker}{dash}",
                color=colour,
                label=stage,
                capsize=2,
            )
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="mean prediction", ylabel="how often it happened")
        axes.set_aspect("equal")
    canvas.axes[0].legend(loc="upper left", fontsize=8)


def drift(found: Sequence[Predicted]) -> Figure:
    """Calibration error and log loss of checkpoints of one kind on every dataset, after calibration
    at home."""
    if not found:
        raise Missing(NEEDS)
    columns = ["checkpoint", "trained on", "prompts of", "prompts", "rows"]
    columns += [*estimate_columns("calibration error"), *estimate_columns("log loss"), "base rate"]
    rows = [_drift_row(one) for one in found]
    return Figure(
        name=f"drift-{found[0].predictor}-T{found[0].temperature:g}",
        title=f"{found[0].predictor}: calibration on other datasets, T = {found[0].temperature:g}",
        source="Drift matrix",
        kind="measured",
        n=_counted(found),
        interval=f"{METHOD}, pivotal",
        columns=columns,
        rows=rows,
        draw=partial(
            _draw_matrix,
            records(columns, rows),
            {(one.checkpoint, one.where) for one in found if one.in_domain},
        ),
    )


def _drift_row(one: Predicted) -> list[Cell]:
    scores = reliability(one.calibrated, one.targets, one.group)
    about: list[Cell] = [one.checkpoint, one.trained_on, one.where, one.prompts, len(one.group)]
    return [*about, *cells(scores["ece"]), *cells(scores["log_loss"]), base_rate(one.targets)]


def base_rate(targets: Tensor) -> float:
    """Log loss of always predicting the mean of the targets [n, C]."""
    targets = targets.double()
    return float(log_loss(targets.mean(0).expand_as(targets), targets).mean())


def _draw_matrix(found: Sequence[Record], at_home: set[tuple[str, str]], canvas: Canvas) -> None:
    rows, places = distinct(found, "checkpoint"), distinct(found, "prompts of")
    canvas.set_size_inches(max(5, 1.7 * len(places) + 1.6), 0.8 * len(rows) + 1.6)
    axes = canvas.subplots()
    table = [[float("nan")] * len(places) for _ in rows]
    for record in found:
        y, x = rows.index(record["checkpoint"]), places.index(record["prompts of"])
        table[y][x] = record["calibration error"]
        text = f"{record['calibration error']:.3f}"
        if record["calibration error low"] is not None:
            text += (
                f"\n{record['calibration error low']:.3f}-{record['calibration error high']:.3f}"
            )
        box = (
            {"edgecolor": "black", "facecolor": "white"}
            if (rows[y], places[x]) in at_home
            else None
        )
        axes.text(x, y, text, ha="center", va="center", fontsize=8, bbox=box)
    image = axes.imshow(table, cmap="Oranges", vmin=0, vmax=0.15, aspect="auto")
    axes.set_xticks(
        range(len(places)), [place.replace(", ", ",\n") for place in places], fontsize=8
    )
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set_xlabel("prompts of")
    axes.set_ylabel("checkpoint")
    canvas.colorbar(image, label="calibration error", extend="max")


def _probs(one: Predicted, stage: str) -> Tensor:
    return one.as_trained if stage == "as trained" else one.calibrated


def _counted(found: Sequence[Predicted]) -> str:
    return (
        f"{sum(one.prompts for one in found)} prompts, {sum(len(one.group) for one in found):,}"
        " rows"
    )


# Which there are ---------------------------------------------------------------------------------


def _read(artifacts: Artifacts, checkpoint: Checkpoint) -> list[Predicted]:
    return artifacts.once(
        ("predicted", checkpoint.folder), lambda: predicted(checkpoint, artifacts.harvests)
    )


def _reliabilities(artifacts: Artifacts) -> list[Builder]:
    """One for each checkpoint."""
    chosen = one_of_each(artifacts.checkpoints)
    return [partial(_reliability, artifacts, checkpoint) for checkpoint in chosen] or [
        partial(diagrams, [])
    ]


def _reliability(artifacts: Artifacts, checkpoint: Checkpoint) -> Figure:
    return diagrams(_read(artifacts, checkpoint))


def _drifts(artifacts: Artifacts) -> list[Builder]:
    """One for each kind of predictor and temperature."""
    kinds: dict[tuple[str, float], list[Checkpoint]] = {}
    for checkpoint in one_of_each(artifacts.checkpoints):
        config = checkpoint.config
        kind = config["predictor"], float(config["warp"]["temperature"])
        kinds.setdefault(kind, []).append(checkpoint)
    return [partial(_drift, artifacts, alike) for alike in kinds.values()] or [partial(drift, [])]


def _drift(artifacts: Artifacts, checkpoints: Sequence[Checkpoint]) -> Figure:
    return drift([one for checkpoint in checkpoints for one in _read(artifacts, checkpoint)])


FIGURES = (
    Entry(
        "Reliability before and after calibration",
        "On the diagonal, predictions happen as often as they say; points below it promise too"
        " much. Calibration was fitted on the calibration split of the harvest trained on.",
        _reliabilities,
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
