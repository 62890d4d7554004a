"""Acceptance in bins of the draft's probability."""

from collections.abc import Iterator, Sequence

from matplotlib.figure import Figure as Canvas

from reports.artifacts import grouped
from reports.drawing import distinct, reach, style, where
from reports.figure import Entry, Figure, Record, mean
from reports.harvest_data import DraftTokens, counted, joined, tokens_by_pair
from runtime.intervals import METHOD

BINS = 10


def acceptance_by_probability(parts: Sequence[DraftTokens]) -> Figure:
    """Return mean acceptance in bins of q, and the share of tokens in each bin, prompts of all
    datasets together."""
    alike = grouped(parts, lambda tokens: tokens.distributions)
    return Figure(
        name="acceptance-by-probability",
        title="Acceptance against draft probability",
        source="DySpec, figure 2",
        kind="measured",
        n=counted(parts),
        interval=f"{METHOD} within each bin of q",
        records=[record for group in alike for record in _bins(joined(group))],
        draw=_draw,
    )


def _bins(tokens: DraftTokens) -> Iterator[Record]:
    q, accept = tokens.q.double(), tokens.accept.double()
    bins = (q * BINS).long().clamp(max=BINS - 1)
    for number in bins.unique().tolist():
        rows = bins == number
        count = int(rows.sum())
        yield {
            **{"temperatures": tokens.distributions},
            **{"q from": number / BINS, "q to": (number + 1) / BINS},
            "mean q": float(q[rows].mean()),
            **{"tokens": count, "tokens, %": 100 * count / len(q)},
            **mean("acceptance", accept[rows], tokens.group[rows]),
        }


def _draw(records: Sequence[Record], canvas: Canvas) -> None:
    canvas.set_size_inches(6.4, 5)
    upper, lower = canvas.subplots(2, sharex=True, height_ratios=[3, 1])
    upper.plot([0, 1], [0, 1], "--", color="grey", label="acceptance = q")
    for place, distributions in enumerate(distinct(records, "temperatures")):
        part = where(records, temperatures=distributions)
        at = [record["mean q"] for record in part]
        upper.errorbar(
            at,
            [record["acceptance"] for record in part],
            yerr=reach(part, "acceptance"),
            capsize=3,
            label=distributions,
            **style(place),
        )
        lower.plot(at, [record["tokens, %"] for record in part], **style(place))
    for axes, label in ((upper, "mean acceptance"), (lower, "tokens, %")):
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    upper.set_ylim(0, 1.02)
    upper.legend(loc="upper left")
    lower.set_ylim(bottom=0)
    lower.set_xlabel("q, the draft's probability of the drawn token")


FIGURES = (
    Entry(
        "Acceptance against draft probability",
        "DySpec's trees take q for the probability of acceptance: its guess is the dashed line."
        " Above it they grow too little at such tokens, below it too much. Acceptance is min(1,"
        " p/q), given what was drawn before.",
        lambda artifacts: tokens_by_pair(artifacts, acceptance_by_probability),
    ),
)
