"""The draft's own probabilities and acceptance, by verdict, dataset and temperature."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.figure import Figure as Canvas

from reports.artifacts import Artifacts
from reports.drawing import COLOURS, reach, where
from reports.figure import Builder, Entry, Figure, Record, mean
from reports.harvest_data import DraftTokens, counted, tokens_by_pair
from runtime.intervals import METHOD

QUANTILES = {"5 %": 0.05, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "95 %": 0.95}
WHISKERS = dict(zip(QUANTILES, ("whislo", "q1", "med", "q3", "whishi"), strict=True))
BEHIND = "Tokens behind a rejected one are left out: nothing was decided about them."


@dataclass(frozen=True)
class Quantity:
    """A number for each draft token. column: its name with the unit; values: the field of
    `DraftTokens`; how_to_read: advice on reading its figure."""

    name: str
    title: str
    column: str
    values: str
    how_to_read: str


QUANTITIES = (
    Quantity(
        "confidence-drawn",
        "Draft probability of accepted and rejected tokens",
        "q of the drawn token",
        "q",
        "Where the boxes of a pair lie apart, a threshold on q tells rejections before the target"
        " is asked.",
    ),
    Quantity(
        "confidence-highest",
        "Highest draft probability at accepted and rejected tokens",
        "highest q",
        "max_q",
        "The same, of what is known before a token is drawn: the number the confidence rule"
        " stops on.",
    ),
    Quantity(
        "entropy",
        "Entropy of the draft at accepted and rejected tokens",
        "entropy (nats)",
        "entropy",
        "Rejected tokens come from flatter distributions; AdaEDL stops on a bound in this number.",
    ),
)


def by_verdict(parts: Sequence[DraftTokens], quantity: Quantity) -> Figure:
    """Return quantiles and mean of one quantity, accepted and rejected tokens apart, for every
    dataset and temperature."""
    return Figure(
        name=quantity.name,
        title=quantity.title,
        source="SpecBranch, figures 14-16",
        kind="measured",
        n=counted(parts),
        interval=f"{METHOD} of the means (diamonds); boxes are quartiles, whiskers 5 % and 95 %",
        records=[record for tokens in parts for record in _verdicts(tokens, quantity)],
        draw=partial(_draw_boxes, column=quantity.column),
    )


def _verdicts(tokens: DraftTokens, quantity: Quantity) -> Iterator[Record]:
    for verdict, rows in (("accepted", tokens.accepted), ("rejected", ~tokens.accepted)):
        if rows.any():
            values = getattr(tokens, quantity.values)[rows].double()
            quantiles = values.quantile(values.new_tensor(list(QUANTILES.values()))).tolist()
            yield {
                **{"dataset": tokens.dataset, "temperatures": tokens.distributions},
                "verdict": verdict,
                "prompts": len(tokens.group[rows].unique()),
                "tokens": len(values),
                **dict(zip(QUANTILES, quantiles, strict=True)),
                **mean(f"mean {quantity.column}", values, tokens.group[rows]),
            }


def _draw_boxes(records: Sequence[Record], canvas: Canvas, column: str) -> None:
    groups = list(dict.fromkeys((record["dataset"], record["temperatures"]) for record in records))
    canvas.set_size_inches(max(6.4, 1.1 * len(groups) + 1.5), 4)
    axes, name = canvas.subplots(), f"mean {column}"
    for place, (verdict, hatch) in enumerate((("accepted", ""), ("rejected", "//"))):
        part = where(records, verdict=verdict)
        shift = 0.4 * place - 0.2
        spots = [groups.index((one["dataset"], one["temperatures"])) + shift for one in part]
        box: dict[str, Any] = {"facecolor": COLOURS[place], "hatch": hatch, "alpha": 0.5}
        axes.bxp(
            [{end: record[quantile] for quantile, end in WHISKERS.items()} for record in part],
            spots,
            widths=0.34,
            medianprops={"color": "black"},
            manage_ticks=False,
            showfliers=False,
            patch_artist=True,
            boxprops=box,
        )
        axes.bar([0], [0], label=verdict, **box)
        means: dict[str, Any] = {"fmt": "D", "color": "black", "mfc": "white", "ms": 4}
        values = [record[name] for record in part]
        axes.errorbar(spots, values, yerr=reach(part, name), capsize=3, **means)
    names = [f"{dataset}\n{temperatures}" for dataset, temperatures in groups]
    axes.set_xticks(range(len(groups)), names)
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.set_ylabel(column)
    canvas.legend(loc="outside upper center", ncols=2)


def _builders(quantity: Quantity, artifacts: Artifacts) -> list[Builder]:
    return tokens_by_pair(artifacts, partial(by_verdict, quantity=quantity))


FIGURES = tuple(
    Entry(quantity.title, f"{quantity.how_to_read} {BEHIND}", partial(_builders, quantity))
    for quantity in QUANTITIES
)
