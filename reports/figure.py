"""What every figure and table of a report is: values, how they were come by, and how to draw
them."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas

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
    reading: one or two sentences on how to read it
    columns, rows: the values, units in the column names; what is drawn is drawn from them
    draw: onto an empty canvas; None for a table
    """

    name: str
    title: str
    source: str
    kind: Kind
    n: str
    interval: str
    reading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    draw: Callable[[Canvas], None] | None = None

    def column(self, name: str) -> list[Cell]:
        place = list(self.columns).index(name)
        return [row[place] for row in self.rows]

    @property
    def caption(self) -> str:
        return f"{self.source}. {self.kind.capitalize()}; {self.n}; {self.interval}."


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
