"""Figures and tables of a report: their values, the origin of these, and how to draw them."""

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from torch import Tensor

from predictors.reliability import mean_gap
from reports.artifacts import Artifacts
from runtime.intervals import METHOD, columns

Kind = Literal["measured", "modelled", "exact"]
SIZE, DPI = (6.4, 4.0), 120  # inches
Cell = str | float | int | None
Record = dict[str, Any]
"""A row of a table: column -> `Cell`."""
T = TypeVar("T")


class Missing(Exception):
    """A figure's input is missing. The message names it, and the command that makes it."""


@dataclass(frozen=True)
class Figure:
    """One figure or table.

    name: of its files; title: a heading; source: its counterpart, e.g. "SpecBranch, figure 12"
    kind: measured (counted or timed), modelled (priced by a cost table, or a fit), exact (computed
    without sampling)
    n: size of its data, e.g. "4 prompts, 312 rounds"
    records: the rows, all with the same columns, units in the column names
    draw: draws the records onto an empty canvas; None for a table
    interval: kind of its intervals, or why there are none
    how_to_read: advice on reading this figure, often with its numbers; the report puts that for all
    figures of its kind before it (`Entry.how_to_read`)
    """

    name: str
    title: str
    source: str
    kind: Kind
    n: str
    records: Sequence[Record]
    draw: Callable[[Sequence[Record], Canvas], None] | None = None
    interval: str = METHOD
    how_to_read: str = ""

    @property
    def columns(self) -> list[str]:
        return list(self.records[0]) if self.records else []

    @property
    def rows(self) -> list[list[Cell]]:
        return [list(record.values()) for record in self.records]

    def column(self, name: str) -> list[Cell]:
        return [record[name] for record in self.records]

    @property
    def caption(self) -> str:
        return f"{self.source}. {self.kind.capitalize()}; {self.n}; {self.interval}."


def estimated(name: str, estimate: Iterable[float | None]) -> Record:
    """Return the three cells of an estimate (value, low, high), empty where it has NaN or None."""
    cells = (None if value is None or math.isnan(value) else value for value in estimate)
    return dict(zip(columns(name), cells, strict=True))


def mean(name: str, values: Tensor, group: Tensor) -> Record:
    """Return the three cells of the mean of values [n]. group: [n], the prompt of each; a single
    prompt has no interval."""
    return estimated(name, mean_gap(values.double(), group, 0, signed=True))


Builder = Callable[[], Figure]


@dataclass(frozen=True)
class Entry:
    """A kind of figure: one figure of the report, or one for each of several pairs, harvests or
    checkpoints.

    title: its name in the guide and, if it is lacking, in the report; how_to_read: one or two
    sentences; builders: functions that make its figures from the artifacts. A builder raises
    Missing if its input is missing; without any input, at least one builder of an entry does"""

    title: str
    how_to_read: str
    builders: Callable[[Artifacts], Sequence[Builder]]


def each(things: Iterable[T], build: Callable[[T], Figure], needs: str) -> list[Builder]:
    """Return the builder of each thing's figure; without things, one that raises Missing with
    `needs`."""

    def lacking() -> Figure:
        raise Missing(needs)

    return [partial(build, thing) for thing in things] or [lacking]


def canvas(figure: Figure) -> Canvas | None:
    """Return the drawn figure; None for a table."""
    if figure.draw is None:
        return None
    drawn = Canvas(figsize=SIZE, dpi=DPI, layout="constrained")
    FigureCanvasAgg(drawn)
    figure.draw(figure.records, drawn)
    return drawn


def save(figure: Figure, folder: Path) -> list[Path]:
    """Write <name>.csv and, where there is something to draw, <name>.png."""
    table = folder / f"{figure.name}.csv"
    with table.open("w", encoding="utf-8", newline="") as out:
        csv.writer(out).writerows([figure.columns, *figure.rows])
    drawn = canvas(figure)
    if drawn is None:
        return [table]
    image = folder / f"{figure.name}.png"
    drawn.savefig(image)
    return [table, image]
