"""What the draft's own probabilities say about acceptance: by verdict, dataset and temperature, and
in bins of q."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from torch import Tensor

from reports.drawing import COLOURS, DASHES, MARKERS, Record, distinct, reach, records
from reports.estimates import mean
from reports.figure import Cell, Figure, Missing
from runtime.intervals import METHOD
from runtime.intervals import columns as estimate_columns

BINS = 10
QUANTILES = {"5 %": 0.05, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "95 %": 0.95}
NEEDS = "needs a harvest: python scripts/gen_data.py"


@dataclass(frozen=True)
class DraftTokens:
    """Draft tokens with a verdict: of each round those accepted and the first one rejected. Columns
    [n].

    pair, dataset: names; temperature, draft_temperature: of the distributions that were sampled
    from
    q: of the drawn token under the distribution it was drawn from; where the draft is greedy, what
    it has at temperature 1. max_q, entropy (nats): of the draft at temperature 1. accept: min(1,
    p/q); accepted: whether it was; group: prompt"""

    pair: str
    dataset: str
    temperature: float
    draft_temperature: float
    q: Tensor
    max_q: Tensor
    entropy: Tensor
    accept: Tensor
    accepted: Tensor
    group: Tensor

    @property
    def distributions(self) -> str:
        if self.temperature == self.draft_temperature:
            return f"T = {self.temperature:g}"
        return f"T = {self.temperature:g}, draft {self.draft_temperature:g}"


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


def merged(found: Iterable[DraftTokens]) -> list[DraftTokens]:
    """One for each dataset and pair of distributions: harvests may share a dataset."""
    parts: dict[tuple[str, str, str], list[DraftTokens]] = {}
    for tokens in found:
        parts.setdefault((tokens.pair, tokens.dataset, tokens.distributions), []).append(tokens)
    return [_joined(alike) for alike in parts.values()]


def _joined(parts: Sequence[DraftTokens]) -> DraftTokens:
    names = ("q", "max_q", "entropy", "accept", "accepted")
    columns: dict[str, Any] = {
        name: torch.cat([getattr(tokens, name) for tokens in parts]) for name in names
    }
    return replace(parts[0], **columns, group=distinct_groups(parts))


# By verdict ---------------------------------------------------------------------------------------


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
        n=_counted(found),
        interval=f"{METHOD} of the means (diamonds); boxes are quartiles, whiskers 5 % and 95 %",
        reading=(
            f"{quantity.said} Tokens behind a rejected one are left out: nothing was decided about"
            " them."
        ),
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
        spots = [
            groups.index((record["dataset"], record["temperatures"])) + 0.4 * place - 0.2
            for record in part
        ]
        stats = [
            dict(zip(("whislo", "q1", "med", "q3", "whishi"), map(r.get, QUANTILES), strict=True))
            for r in part
        ]
        style: dict[str, Any] = {
            "facecolor": COLOURS[place],
            "alpha": 0.5,
            "hatch": ("", "//")[place],
        }
        lines: dict[str, Any] = {"medianprops": {"color": "black"}, "manage_ticks": False}
        axes.bxp(
            stats, spots, widths=0.34, showfliers=False, patch_artist=True, boxprops=style, **lines
        )
        name = f"mean {column}"
        means = [record[name] for record in part]
        axes.errorbar(
            spots,
            means,
            yerr=reach(part, name),
            fmt="D",
            color="black",
            mfc="white",
            ms=4,
            capsize=3,
        )
        axes.bar([0], [0], label=verdict, **style)
    axes.set_xticks(
        range(len(groups)), [f"{dataset}\n{distributions}" for dataset, distributions in groups]
    )
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.set_ylabel(column)
    canvas.legend(loc="outside upper center", ncols=2)


# By draft probability -----------------------------------------------------------------------------


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
        n=_counted(found),
        interval=f"{METHOD} within each bin of q",
        reading=(
            "DySpec's trees take q for the probability of acceptance: its guess is the dashed line."
            " Above it they grow too little at such tokens, below it too much. Acceptance is min(1,"
            " p/q), given what was drawn before."
        ),
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


def distinct_groups(parts: Sequence[DraftTokens]) -> Tensor:
    """Prompts of all parts, numbered through."""
    firsts = [0]
    for tokens in parts:
        firsts.append(firsts[-1] + int(tokens.group.max()) + 1)
    return torch.cat([tokens.group + first for tokens, first in zip(parts, firsts, strict=False)])


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


def _counted(found: Sequence[DraftTokens]) -> str:
    prompts = sum(len(tokens.group.unique()) for tokens in found)
    return (
        f"{found[0].pair}, {prompts:,} prompts, {sum(len(tokens.q) for tokens in found):,} draft"
        " tokens"
    )
