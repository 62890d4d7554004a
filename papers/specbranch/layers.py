"""H-RAD by the number of the target's layers whose states it reads, K."""

from collections.abc import Iterator, Sequence
from functools import partial

from matplotlib.figure import Figure as Canvas
from torch import Tensor

from data_gen.storage.dataset import Harvest
from papers.specbranch.hrad_data import classifiers
from predictors.metrics import log_loss
from reports import drawing
from reports.artifacts import Artifacts, Checkpoint
from reports.checkpoint_data import Predicted, predicted, training_data
from reports.figure import Builder, Cell, Entry, Figure, Missing, lacking
from reports.figures.calibration import base_rate
from reports.row_means import mean
from runtime.intervals import METHOD, columns

NEEDS = (
    "needs H-RAD checkpoints of one harvest that read several numbers of layers: python train.py -m"
    " predictor=hrad 'predictor.layers=[-1],[-4,-3,-2,-1],null'"
)
K = "layers"


def by_layers(checkpoints: Sequence[Checkpoint], harvests: Sequence[Harvest]) -> Figure:
    """Accuracy and log loss on the same rounds, and the log loss above that of the fewest
    layers."""
    heads = {count_of(one): predicted(one, harvests) for one in sorted(checkpoints, key=count_of)}
    fewest, *_ = heads.values()
    if not fewest:
        raise Missing("needs the harvest they were trained on: python scripts/gen_data.py")
    names = ["dataset", K, *columns("accuracy"), *columns("log loss"), *columns("difference")]
    names += ["most frequent class", "base rate, log loss"]
    rows = [
        row
        for place, least in enumerate(fewest)
        for row in _rows({count: found[place] for count, found in heads.items()}, least)
    ]
    n = sum(one.prompts for one in fewest), sum(len(one.group) for one in fewest)
    settings = checkpoints[0].config["settings"]
    return Figure(
        name=f"hrad-layers-{fewest[0].trained_on}-gamma{settings['gamma']}",
        title=f"H-RAD by the layers it reads, trained on {fewest[0].trained_on}",
        source="SpecBranch, table 5, which has the speed of each number of layers",
        kind="measured",
        n=f"{n[0]} prompts, {n[1]:,} rounds of {settings['gamma']} draft tokens",
        interval=METHOD,
        columns=names,
        rows=rows,
        draw=partial(_draw, drawing.records(names, rows)),
    )


def count_of(checkpoint: Checkpoint) -> int:
    return len(checkpoint.config["inputs"]["target_hidden"])


def _rows(heads: dict[int, Predicted], least: Predicted) -> Iterator[list[Cell]]:
    most, base = float(least.targets.double().mean(0).max()), base_rate(least.targets)
    for count, one in heads.items():
        right = one.targets.double().gather(1, one.calibrated.argmax(1)[:, None])[:, 0]
        values = right, _loss(one), _loss(one) - _loss(least)
        estimates = [cell for value in values for cell in mean(value, one.group)]
        yield [one.dataset, count, *estimates, most, base]


def _loss(one: Predicted) -> Tensor:
    return log_loss(one.calibrated.double(), one.targets.double())


def _draw(found: Sequence[drawing.Record], canvas: Canvas) -> None:
    panels = drawing.panels(canvas, ["most probable class", "all classes"])
    for axes, value in zip(panels, ("accuracy", "log loss"), strict=True):
        drawing.lines(axes, found, K, value, "dataset")
        axes.set_xlabel("layers of the target")
    drawing.legend(canvas, panels[0])


def _builders(artifacts: Artifacts) -> list[Builder]:
    """One for all that differ in their layers alone."""
    found: dict[str, dict[int, Checkpoint]] = {}
    for one in classifiers(artifacts.checkpoints):
        alike = {**one.config["settings"], "layers": None}
        key = f"{training_data(one)} {sorted(alike.items())}"
        found.setdefault(key, {}).setdefault(count_of(one), one)
    several = [list(group.values()) for group in found.values() if len(group) > 1]
    return [partial(by_layers, group, artifacts.harvests) for group in several] or [
        partial(lacking, NEEDS)
    ]


FIGURES = (
    Entry(
        "H-RAD by the layers it reads",
        "Heads that differ in nothing but the number of the target's layers whose states they read,"
        " on the same rounds. Accuracy: how often the most probable class comes true. Difference:"
        " of the log loss to that of the fewest layers, paired; below 0 more layers are better.",
        _builders,
    ),
)
