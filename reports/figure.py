"""What every figure and table of a report is: values, how they were come by, and how to draw
them."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas

from reports.artifacts import Artifacts

Kind = Literal["measured", "modelled", "exact"]
SIZE, DPI = (6.4, 4.0), 120  # inches
Cell = str | float | int | None


class Missing(Exception):
    """What a figure needs is not there. The message says what, and the command that makes it."""


@dataclass(frozen=True)
class Figure:
    """One figure or table.

    name: of its files; title: a heading; source: what it is the counterpart of, e.g. "SpecBranch,
    figure 12"
    kind: measured (counted or timed), modelled (priced by a cost table, or a fit), exact (computed
    without sampling)
    n: what it rests on, e.g. "4 prompts, 312 rounds"; interval: what its intervals are, or why
    there are none
    columns, rows: the values, units in the column names; what is drawn is drawn from them
    draw: onto an empty canvas; None for a table
    how_to_read: what only this figure says on how to read it, often with its numbers; the report
    puts before it what is said of every figure of its kind (`Entry.how_to_read`)
    """

    name: str
    title: str
    source: str
    kind: Kind
    n: str
    interval: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    draw: Callable[[Canvas], None] | None = None
    how_to_read: str = ""

    def column(self, name: str) -> list[Cell]:
        place = list(self.columns).index(name)
        return [row[place] for row in self.rows]

    @property
    def caption(self) -> str:
        return f"{self.source}. {self.kind.capitalize()}; {self.n}; {self.interval}."


Builder = Callable[[], Figure]


@dataclass(frozen=True)
class Entry:
    """A kind of figure: one figure of the report, or one for each of several pairs, harvests or
    checkpoints.

    title: its name in the guide and, where it is lacking, in the report; how_to_read: one or two
    sentences; builders: what draws its figures from what was found. A builder raises Missing where
    its input is not there; of an entry without any input at least one does"""

    title: str
    how_to_read: str
    builders: Callable[[Artifacts], Sequence[Builder]]


def lacking(needs: str) -> Figure:
    """The builder of an entry whose input is not there."""
    raise Missing(needs)


def canvas(figure: Figure) -> Canvas | None:
    """The drawn figure; None for a table."""
    if figure.draw is None:
        return None
    drawn = Canvas(figsize=SIZE, dpi=DPI, layout="constrained")
    FigureCanvasAgg(drawn)
    figure.draw(drawn)
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
