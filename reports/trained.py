"""Pictures of a checkpoint that has just been trained, for its run."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from predictors.base import read_config, read_metrics
from reports.artifacts import Checkpoint
from reports.figure import Missing, save
from reports.figures.calibration import of_bins
from reports.figures.confusion import confusions


def pictures(checkpoint: Path, folder: Path) -> Iterator[tuple[str, Path, str]]:
    """Draw into `folder` the reliability of a checkpoint on every harvest that it was judged on,
    and of classes the confusion. Yield a name, the PNG and its caption."""
    metrics = read_metrics(checkpoint, "out")
    figures = [of_bins(checkpoint.name, metrics["reliability"])]
    with suppress(Missing):
        config = {**read_config(checkpoint, "out"), "metrics": metrics}
        figures.append(confusions(Checkpoint(checkpoint, config)))
    for figure in figures:
        *_, image = save(figure, folder)
        yield f"figures/{figure.name}", image, f"{figure.title}. {figure.caption}"
