"""Panels of lines or bars with intervals, drawn from the rows of a figure; distinguishable without
colour."""

from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from evaluation.table import ALL
from reports.figure import Record

NAMES = ("blue", "orange", "green", "red", "purple", "brown", "grey", "cyan", "olive", "pink")
COLOURS = tuple(f"tab:{name}" for name in NAMES)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", "h")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--", "||", "**")
DASHES = ("-", "--", "-.", ":")
PANEL = (4.2, 3.0)  # inches


def distinct(records: Sequence[Record], column: str) -> list[Any]:
    return list(dict.fromkeys(record[column] for record in records))


def where(records: Sequence[Record], **cells: Any) -> list[Record]:
    """Return the records with these cells."""
    return [record for record in records if cells.items() <= record.items()]


def together(records: Sequence[Record]) -> list[Record]:
    """Return for each temperature the rows of all datasets together, or of the only dataset."""
    whole = {record["T"] for record in records if record["dataset"] == ALL}
    return [record for record in records if record["T"] not in whole or record["dataset"] == ALL]


def with_temperature(records: Sequence[Record]) -> list[Record]:
    """Return the records with their temperature in words, for a legend."""
    return [{**record, "temperature": f"T = {record['T']:g}"} for record in records]


def style(number: int) -> dict[str, Any]:
    """Return colour, marker and dash of the n-th line."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": DASHES[number % len(DASHES)],
    }


def panels(
    canvas: Canvas, titles: Sequence[str], most: int = 2, size: tuple[float, float] = PANEL
) -> list[Axes]:
    """Return an empty panel for each title, `most` of them side by side."""
    across = min(most, len(titles))
    down = -(-len(titles) // across)
    canvas.set_size_inches(max(6.4, across * size[0]), max(3.4, down * size[1]))
    grid = canvas.subplots(down, across, squeeze=False).flatten().tolist()
    for axes, title in zip(grid, titles, strict=False):
        axes.set_title(title, fontsize=10)
    for axes in grid[len(titles) :]:
        axes.remove()
    return grid[: len(titles)]


def panels_by(
    canvas: Canvas,
    records: Sequence[Record],
    column: str,
    most: int = 2,
    size: tuple[float, float] = PANEL,
    datasets: bool = False,
) -> Iterator[tuple[Axes, list[Record]]]:
    """Yield an empty panel for each value of a column, and its records; when all are drawn, put one
    legend above them. datasets: whether the titles name those of the panel."""
    parts = [where(records, **{column: value}) for value in distinct(records, column)]
    titles = [f"T = {part[0]['T']:g}" if column == "T" else part[0][column] for part in parts]
    if datasets:
        names = [" and ".join(sorted(distinct(part, "dataset"))) for part in parts]
        titles = [f"{title}, {name}" for title, name in zip(titles, names, strict=True)]
    drawn = panels(canvas, titles, most, size)
    yield from zip(drawn, parts, strict=True)
    legend(canvas, drawn[0])


def lines(axes: Axes, records: Sequence[Record], x: str, y: str, by: str) -> None:
    """Draw one line for each value of `by`, with the interval of each point, slightly shifted so
    that none hides another."""
    names, width = distinct(records, by), max(r[x] for r in records) - min(r[x] for r in records)
    for number, name in enumerate(names):
        shift = (number - (len(names) - 1) / 2) * 0.015 * width
        points = sorted(where(records, **{by: name}), key=lambda record: record[x])
        axes.errorbar(
            [point[x] + shift for point in points],
            [point[y] for point in points],
            yerr=reach(points, y),
            label=str(name),
            capsize=3,
            **style(number),
        )
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def bars(
    axes: Axes, records: Sequence[Record], x: str, y: str, by: str
) -> list[tuple[float, Record]]:
    """Draw groups along x, in each one bar for each value of `by`, with its interval. Return the
    position of each bar."""
    groups, names = distinct(records, x), distinct(records, by)
    width, drawn = 0.8 / len(names), list[tuple[float, Record]]()
    for number, name in enumerate(names):
        points = where(records, **{by: name})
        at = [groups.index(point[x]) + (number - (len(names) - 1) / 2) * width for point in points]
        drawn += zip(at, points, strict=True)
        axes.bar(
            at,
            [point[y] for point in points],
            width,
            yerr=reach(points, y),
            label=str(name),
            color=COLOURS[number % len(COLOURS)],
            hatch=HATCHES[number % len(HATCHES)],
            edgecolor="white",
            error_kw={"elinewidth": 1, "capsize": 2},
        )
    axes.set_xticks(range(len(groups)), [str(group) for group in groups])
    axes.set_ylabel(y)
    return drawn


def dots(axes: Axes, records: Sequence[Record], x: str, y: str, by: str) -> None:
    """Draw one row for each value of y, in it a dot with its interval for each value of `by`."""
    rows, names = distinct(records, y), distinct(records, by)
    for number, name in enumerate(names):
        points = where(records, **{by: name})
        shift = (number - (len(names) - 1) / 2) * 0.6 / len(names)
        axes.errorbar(
            [point[x] for point in points],
            [rows.index(point[y]) + shift for point in points],
            xerr=reach(points, x),
            label=str(name),
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            linestyle="none",
            capsize=2,
            markersize=4,
        )
    axes.set_yticks(range(len(rows)), [str(row) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(x)


def reach(records: Sequence[Record], y: str) -> list[list[float]]:
    """Return the extent of each interval below and above its value; 0 if there is none."""
    ends = [(record[y], record.get(f"{y} low"), record.get(f"{y} high")) for record in records]
    below = [0.0 if low is None else max(0.0, value - low) for value, low, _ in ends]
    above = [0.0 if high is None else max(0.0, high - value) for value, _, high in ends]
    return [below, above]


def legend(canvas: Canvas, axes: Axes, across: int = 4) -> None:
    """Put one legend for all panels above them."""
    handles, labels = axes.get_legend_handles_labels()
    canvas.legend(
        handles, labels, loc="outside upper center", ncols=min(across, len(labels)), fontsize=9
    )
