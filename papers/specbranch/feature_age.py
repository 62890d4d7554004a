"""H-RAD asked from older features."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from papers.specbranch.activations import NEEDS
from papers.specbranch.hrad_data import Aged, aged, of_hrad
from predictors.metrics import log_loss
from reports.artifacts import Artifacts, Checkpoint
from reports.drawing import COLOURS, DASHES, MARKERS, Record, distinct, reach, records
from reports.figure import Builder, Cell, Entry, Figure, Missing, lacking
from reports.figures.calibration import base_rate
from reports.row_means import mean
from runtime.intervals import METHOD
from runtime.intervals import columns as estimate_columns

HARVEST = "python scripts/gen_data.py anchors.stride=1 out=data/rounds"


def feature_age(found: Sequence[Aged]) -> Figure:
    """Accuracy of the decision and log loss of the probabilities, by age of the features."""
    if not found:
        raise Missing(
            f"needs an H-RAD checkpoint and a harvest with a round at every position: {HARVEST}"
        )
    unit = found[0].unit
    columns = [
        "dataset",
        f"age ({unit})",
        *estimate_columns("accuracy"),
        *estimate_columns("log loss"),
        *estimate_columns("log loss above age 0"),
    ]
    columns += ["most frequent class", "base rate, log loss"]
    rows = [row for one in found for row in _age_rows(one)]
    prompts, rounds = (
        sum(len(one.group.unique()) for one in found),
        sum(len(one.group) for one in found),
    )
    return Figure(
        name=f"feature-age-{unit}-{found[0].checkpoint}",
        title=f"{found[0].checkpoint}: prediction against the age of its features in {unit}",
        source="SpecBranch, figure 19",
        kind="measured",
        n=f"{prompts} prompts, {rounds:,} rounds of {found[0].gamma} draft tokens",
        interval=METHOD,
        columns=columns,
        rows=rows,
        draw=partial(_draw_age, records(columns, rows), unit),
        how_to_read=_how_far(found),
    )


def _how_far(found: Sequence[Aged]) -> str:
    trained = found[0].trained_age
    taught = f"Trained on states of age {trained}, in rounds. " if trained else ""
    if found[0].unit == "positions":
        return taught.strip()
    backs = [f"{one.dataset} {one.back[max(one.back)] / max(one.back):.2f}" for one in found]
    return f"{taught}Positions in a round, on average: {', '.join(backs)}."


def _age_rows(one: Aged) -> Iterator[list[Cell]]:
    most = float(one.targets.double().mean(0).max())
    targets = one.targets.double()
    losses = {age: log_loss(probs.double(), targets) for age, probs in one.probs.items()}
    for age, loss in losses.items():
        right = mean(one.targets.gather(1, one.decided[age][:, None])[:, 0], one.group)
        both = (mean(values, one.group) for values in (loss, loss - losses[0]))
        yield [one.dataset, age, *right, *chain(*both), most, base_rate(one.targets)]


def _draw_age(found: Sequence[Record], unit: str, canvas: Canvas) -> None:
    canvas.set_size_inches(8.4, 4)
    bases = {"accuracy": "most frequent class", "log loss": "base rate, log loss"}
    for axes, (name, base) in zip(canvas.subplots(1, 2), bases.items(), strict=True):
        for place, dataset in enumerate(distinct(found, "dataset")):
            part = [record for record in found if record["dataset"] == dataset]
            _draw_dataset(axes, part, (f"age ({unit})", name), place)
            marks: dict[str, Any] = {
                "marker": MARKERS[place],
                "facecolors": "none",
                "edgecolors": "grey",
            }
            axes.scatter([-0.6 if unit == "positions" else -0.2], [part[0][base]], **marks)
        axes.set(xlabel=f"age of the features ({unit})", ylabel=name)
    handles = canvas.axes[0].get_legend_handles_labels()
    canvas.legend(*handles, loc="outside upper center", ncols=5, fontsize=8)


def _draw_dataset(axes: Axes, part: Sequence[Record], columns: tuple[str, str], place: int) -> None:
    """columns: what is drawn against what."""
    (x, name), width = columns, part[-1][columns[0]]
    at = [record[x] + 0.0125 * width * place for record in part]
    style = f"{MARKERS[place]}{DASHES[place % len(DASHES)]}"
    axes.errorbar(
        at,
        [record[name] for record in part],
        yerr=reach(part, name),
        fmt=style,
        color=COLOURS[place],
        label=part[0]["dataset"],
        capsize=2,
    )


def _builders(unit: str, artifacts: Artifacts) -> list[Builder]:
    return [partial(_of_checkpoint, unit, artifacts, one) for one in of_hrad(artifacts)] or [
        partial(lacking, NEEDS)
    ]


def _of_checkpoint(unit: str, artifacts: Artifacts, checkpoint: Checkpoint) -> Figure:
    return feature_age(aged(checkpoint, artifacts.harvests, unit))


GREY = (
    " Accuracy: how often the class decided comes true. Grey: accuracy of always saying the most"
    " frequent class, and log loss of the classes' own shares."
)
FIGURES = (
    Entry(
        "Prediction against the age of features",
        "The same rounds, predicted from the target's states so many positions earlier; 0 is what"
        " the serial engine uses." + GREY,
        partial(_builders, "positions"),
    ),
    Entry(
        "Prediction against the age of features in rounds",
        "The same rounds, those that a decode comes to, predicted from the target's states before"
        " the round before, and the one before that; a class known a priori is one round old. A"
        " round goes as many positions on as it has tokens accepted, and one; of a sampled target"
        " text and accepted lengths are treated as independent." + GREY,
        partial(_builders, "rounds"),
    ),
)
