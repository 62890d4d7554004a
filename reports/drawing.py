"""Panels of lines or bars with intervals, drawn from the rows of a figure; distinct without colour
too."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from evaluation.table import ALL
from reports.figure import Cell

NAMES = ("blue", "orange", "green", "red", "purple", "brown", "grey", "cyan", "olive", "pink")
COLOURS = tuple(f"tab:{name}" for name in NAMES)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", "h")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--", "||", "**")
DASHES = ("-", "--", "-.", ":")
PANEL = (4.2, 3.0)  # inches
Record = dict[str, Any]


def records(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[Record]:
    return [dict(zip(columns, row, strict=True)) for row in rows]


def distinct(found: Sequence[Record], name: str) -> list[Any]:
    return list(dict.fromkeys(record[name] for record in found))


def together(found: Sequence[Record]) -> list[Record]:
    """Of each temperature the rows of all datasets together, or of the one there is."""
    whole = {record["T"] for record in found if record["dataset"] == ALL}
    return [record for record in found if record["T"] not in whole or record["dataset"] == ALL]


def titles(found: Sequence[Record]) -> list[str]:
    """Of one panel for each temperature."""
    datasets = {
        temperature: {r["dataset"] for r in found if r["T"] == temperature}
        for temperature in distinct(found, "T")
    }
    return [
        f"T = {temperature:g}, {' and '.join(sorted(names))}"
        for temperature, names in datasets.items()
    ]


def panels(
    canvas: Canvas, titles: Sequence[str], most: int = 2, size: tuple[float, float] = PANEL
) -> list[Axes]:
    """One empty panel for each title, `most` of them side by side."""
    across = min(most, len(titles))
    down = -(-len(titles) // across)
    canvas.set_size_inches(max(6.4, across * size[0]), max(3.4, down * size[1]))
    grid = canvas.subplots(down, across, squeeze=False).flatten().tolist()
    for axes, title in zip(grid, titles, strict=False):
        axes.set_title(title, fontsize=10)
    for axes in grid[len(titles) :]:
        axes.remove()
    return grid[: len(titles)]


def by_temperature(
    canvas: Canvas, found: Sequence[Record], size: tuple[float, float] = (4.4, 3.4)
) -> list[tuple[float, Axes]]:
    """An empty panel for each temperature."""
    temperatures = distinct(found, "T")
    titles = [f"T = {temperature:g}" for temperature in temperatures]
    return list(zip(temperatures, panels(canvas, titles, size=size), strict=True))


def lines(axes: Axes, found: Sequence[Record], x: str, y: str, by: str) -> None:
    """One line for each value of `by`, with the interval of each point; a little apart so that none
    hides another."""
    names, width = distinct(found, by), max(r[x] for r in found) - min(r[x] for r in found)
    for place, name in enumerate(names):
        shift = (place - (len(names) - 1) / 2) * 0.015 * width
        points = sorted(
            (record for record in found if record[by] == name), key=lambda record: record[x]
        )
        axes.errorbar(
            [point[x] + shift for point in points],
            [point[y] for point in points],
            yerr=reach(points, y),
            label=str(name),
            color=COLOURS[place % len(COLOURS)],
            marker=MARKERS[place % len(MARKERS)],
            linestyle=DASHES[place % len(DASHES)],
            capsize=3,
        )
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def bars(
    axes: Axes, found: Sequence[Record], x: str, y: str, by: str
) -> list[tuple[float, Record]]:
    """Groups along x, in each one bar for each value of `by`, with its interval. Returns where each
    bar stands."""
    groups, names = distinct(found, x), distinct(found, by)
    width, drawn = 0.8 / len(names), list[tuple[float, Record]]()
    for place, name in enumerate(names):
        points = [record for record in found if record[by] == name]
        where = [
            groups.index(point[x]) + (place - (len(names) - 1) / 2) * width for point in points
        ]
        drawn += zip(where, points, strict=True)
        axes.bar(
            where,
            [point[y] for point in points],
            width,
            yerr=reach(points, y),
            label=str(name),
            color=COLOURS[place % len(COLOURS)],
            hatch=HATCHES[place % len(HATCHES)],
            edgecolor="white",
            error_kw={"elinewidth": 1, "capsize": 2},
        )
    axes.set_xticks(range(len(groups)), [str(group) for group in groups])
    axes.set_ylabel(y)
    return drawn


def dots(axes: Axes, found: Sequence[Record], x: str, y: str, by: str) -> None:
    """One row for each value of y, in it a dot with its interval for each value of `by`."""
    rows, names = distinct(found, y), distinct(found, by)
    for place, name in enumerate(names):
        points = [record for record in found if record[by] == name]
        shift = (place - (len(names) - 1) / 2) * 0.6 / len(names)
        axes.errorbar(
            [point[x] for point in points],
            [rows.index(point[y]) + shift for point in points],
            xerr=reach(points, x),
            label=str(name),
            color=COLOURS[place % len(COLOURS)],
            marker=MARKERS[place % len(MARKERS)],
            linestyle="none",
            capsize=2,
            markersize=4,
        )
    axes.set_yticks(range(len(rows)), [str(row) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(x)


def reach(points: Sequence[Record], y: str) -> list[list[float]]:
    """How far each interval reaches below and above its value; 0 where there is none."""
    below = [max(0.0, point[y] - _known(point.get(f"{y} low"), point[y])) for point in points]
    above = [max(0.0, _known(point.get(f"{y} high"), point[y]) - point[y]) for point in points]
    return [below, above]


def legend(canvas: Canvas, axes: Axes, across: int = 4) -> None:
    """One for all panels, above them."""
    handles, labels = axes.get_legend_handles_labels()
    canvas.legend(
        handles, labels, loc="outside upper center", ncols=min(across, len(labels)), fontsize=9
    )


def _known(value: float | None, other: float) -> float:
    return other if value is None else value
