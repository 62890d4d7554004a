"""What the draft's own probabilities say about acceptance, by verdict, dataset and temperature."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from torch import Tensor

from reports.artifacts import Artifacts
from reports.drawing import COLOURS, Record, reach, records
from reports.figure import Builder, Cell, Entry, Figure, Missing
from reports.harvest_data import DraftTokens, counted, tokens_by_pair
from reports.row_means import mean
from runtime.intervals import METHOD
from runtime.intervals import columns as estimate_columns

QUANTILES = {"5 %": 0.05, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "95 %": 0.95}
NEEDS = "needs a harvest: python scripts/gen_data.py"
BEHIND = "Tokens behind a rejected one are left out: nothing was decided about them."


@dataclass(frozen=True)
class Quantity:
    """One number per draft token. column: with its unit; read: off the tokens; said: what to look
    for."""

    name: str
    title: str
    column: str
    read: Callable[[DraftTokens], Tensor]
    said: str


QUANTITIES = (
    Quantity(
        "confidence-drawn",
        "Draft probability of accepted and rejected tokens",
        "q of the drawn token",
        lambda tokens: tokens.q,
        "Where the boxes of a pair lie apart, a threshold on q tells rejections before the target"
        " is asked.",
    ),
    Quantity(
        "confidence-highest",
        "Highest draft probability at accepted and rejected tokens",
        "highest q",
        lambda tokens: tokens.max_q,
        "The same, of what is known before a token is drawn: the number the confidence rule"
        " stops on.",
    ),
    Quantity(
        "entropy",
        "Entropy of the draft at accepted and rejected tokens",
        "entropy (nats)",
        lambda tokens: tokens.entropy,
        "Rejected tokens come from flatter distributions; AdaEDL stops on a bound in this number.",
    ),
)


def by_verdict(found: Sequence[DraftTokens], quantity: Quantity) -> Figure:
    """Quantiles and mean of one quantity, accepted and rejected tokens apart, for every dataset and
    temperature."""
    if not found:
        raise Missing(NEEDS)
    columns = ["dataset", "temperatures", "verdict", "prompts", "tokens", *QUANTILES]
    columns += estimate_columns(f"mean {quantity.column}")
    rows = [row for tokens in found for row in _verdict_rows(tokens, quantity.read(tokens))]
    return Figure(
        name=quantity.name,
        title=quantity.title,
        source="SpecBranch, figures 14-16",
        kind="measured",
        n=counted(found),
        interval=f"{METHOD} of the means (diamonds); boxes are quartiles, whiskers 5 % and 95 %",
        columns=columns,
        rows=rows,
        draw=partial(_draw_boxes, records(columns, rows), quantity.column),
    )


def _verdict_rows(tokens: DraftTokens, values: Tensor) -> Iterator[list[Cell]]:
    for verdict, rows in (("accepted", tokens.accepted), ("rejected", ~tokens.accepted)):
        if rows.any():
            part, group = values[rows].double(), tokens.group[rows]
            quantiles = part.quantile(part.new_tensor(list(QUANTILES.values()))).tolist()
            about: list[Cell] = [
                tokens.dataset,
                tokens.distributions,
                verdict,
                len(group.unique()),
                len(part),
            ]
            yield [*about, *quantiles, *mean(part, group)]


def _draw_boxes(found: Sequence[Record], column: str, canvas: Canvas) -> None:
    groups = list(dict.fromkeys((record["dataset"], record["temperatures"]) for record in found))
    canvas.set_size_inches(max(6.4, 1.1 * len(groups) + 1.5), 4)
    axes = canvas.subplots()
    for place, verdict in enumerate(("accepted", "rejected")):
        part = [record for record in found if record["verdict"] == verdict]
        shift = 0.4 * place - 0.2
        spots = [groups.index((one["dataset"], one["temperatures"])) + shift for one in part]
        _boxes(
            axes, part, spots, verdict, {"facecolor": COLOURS[place], "hatch": ("", "//")[place]}
        )
        means: dict[str, Any] = {"fmt": "D", "color": "black", "mfc": "white", "ms": 4}
        name = f"mean {column}"
        values = [record[name] for record in part]
        axes.errorbar(spots, values, yerr=reach(part, name), capsize=3, **means)
    names = [f"{dataset}\n{temperatures}" for dataset, temperatures in groups]
    axes.set_xticks(range(len(groups)), names)
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.set_ylabel(column)
    canvas.legend(loc="outside upper center", ncols=2)


def _boxes(
    axes: Axes, part: Sequence[Record], spots: Sequence[float], label: str, style: dict[str, Any]
) -> None:
    ends = ("whislo", "q1", "med", "q3", "whishi")
    stats = [dict(zip(ends, map(record.get, QUANTILES), strict=True)) for record in part]
    style = {**style, "alpha": 0.5}
    lines: dict[str, Any] = {"medianprops": {"color": "black"}, "manage_ticks": False}
    lines |= {"showfliers": False, "patch_artist": True, "boxprops": style}
    axes.bxp(stats, spots, widths=0.34, **lines)
    axes.bar([0], [0], label=label, **style)


def _builders(quantity: Quantity, artifacts: Artifacts) -> list[Builder]:
    """One for each pair."""
    return [partial(_of_pair, read, quantity) for read in tokens_by_pair(artifacts)]


def _of_pair(read: Callable[[], Sequence[DraftTokens]], quantity: Quantity) -> Figure:
    return by_verdict(read(), quantity)


FIGURES = tuple(
    Entry(quantity.title, f"{quantity.said} {BEHIND}", partial(_builders, quantity))
    for quantity in QUANTITIES
)
