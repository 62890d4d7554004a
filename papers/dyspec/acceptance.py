"""Acceptance in bins of the draft's probability."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from reports.artifacts import Artifacts
from reports.drawing import COLOURS, DASHES, MARKERS, Record, distinct, reach, records
from reports.figure import Builder, Cell, Entry, Figure, Missing
from reports.harvest_data import DraftTokens, counted, distinct_groups, tokens_by_pair
from reports.row_means import mean
from runtime.intervals import METHOD
from runtime.intervals import columns as estimate_columns

BINS = 10
NEEDS = "needs a harvest: python scripts/gen_data.py"


def acceptance_by_probability(found: Sequence[DraftTokens]) -> Figure:
    """Mean acceptance in bins of q, and how often q lies in each, prompts of all datasets
    together."""
    if not found:
        raise Missing(NEEDS)
    columns = [
        "temperatures",
        "q from",
        "q to",
        "mean q",
        "tokens",
        "tokens, %",
        *estimate_columns("acceptance"),
    ]
    rows = [
        row
        for distributions, parts in _by_distributions(found).items()
        for row in _bin_rows(distributions, parts)
    ]
    return Figure(
        name="acceptance-by-probability",
        title="Acceptance against draft probability",
        source="DySpec, figure 2",
        kind="measured",
        n=counted(found),
        interval=f"{METHOD} within each bin of q",
        columns=columns,
        rows=rows,
        draw=partial(_draw_bins, records(columns, rows)),
    )


def _by_distributions(found: Sequence[DraftTokens]) -> Mapping[str, list[DraftTokens]]:
    parts: dict[str, list[DraftTokens]] = {}
    for tokens in found:
        parts.setdefault(tokens.distributions, []).append(tokens)
    return parts


def _bin_rows(distributions: str, parts: Sequence[DraftTokens]) -> Iterator[list[Cell]]:
    q, accept = (
        torch.cat([getattr(tokens, name) for tokens in parts]).double() for name in ("q", "accept")
    )
    group = distinct_groups(parts)
    place = (q * BINS).long().clamp(max=BINS - 1)
    for number in range(BINS):
        rows = place == number
        if count := int(rows.sum()):
            about: list[Cell] = [
                distributions,
                number / BINS,
                (number + 1) / BINS,
                float(q[rows].mean()),
                count,
                100 * count / len(q),
            ]
            yield [*about, *mean(accept[rows], group[rows])]


def _draw_bins(found: Sequence[Record], canvas: Canvas) -> None:
    canvas.set_size_inches(6.4, 5)
    upper, lower = canvas.subplots(2, sharex=True, height_ratios=[3, 1])
    upper.plot([0, 1], [0, 1], "--", color="grey", label="acceptance = q")
    for place, distributions in enumerate(distinct(found, "temperatures")):
        part = [record for record in found if record["temperatures"] == distributions]
        style: dict[str, Any] = {
            "color": COLOURS[place],
            "marker": MARKERS[place],
            "linestyle": DASHES[place % len(DASHES)],
        }
        at = [record["mean q"] for record in part]
        rate = [record["acceptance"] for record in part]
        upper.errorbar(
            at, rate, yerr=reach(part, "acceptance"), capsize=3, label=distributions, **style
        )
        lower.plot(at, [record["tokens, %"] for record in part], **style)
    _label(upper, "mean acceptance")
    _label(lower, "tokens, %")
    upper.set_ylim(0, 1.02)
    upper.legend(loc="upper left")
    lower.set_ylim(bottom=0)
    lower.set_xlabel("q, the draft's probability of the drawn token")


def _label(axes: Axes, name: str) -> None:
    axes.set_ylabel(name)
    axes.grid(alpha=0.3)


def _builders(artifacts: Artifacts) -> list[Builder]:
    """One for each pair."""
    return [partial(_of_pair, read) for read in tokens_by_pair(artifacts)]


def _of_pair(read: Callable[[], Sequence[DraftTokens]]) -> Figure:
    return acceptance_by_probability(read())


FIGURES = (
    Entry(
        "Acceptance against draft probability",
        "DySpec's trees take q for the probability of acceptance: its guess is the dashed line."
        " Above it they grow too little at such tokens, below it too much. Acceptance is min(1,"
        " p/q), given what was drawn before.",
        _builders,
    ),
)
