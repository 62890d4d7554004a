"""Acceptance, and the target's probability, in bins of the draft's."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from matplotlib.figure import Figure as Canvas
from torch import Tensor

from reports.artifacts import Evaluation, grouped
from reports.drawing import distinct, reach, style, where
from reports.figure import Entry, Figure, Missing, Record, mean
from reports.harvest_data import DraftTokens, counted, joined, tokens_by_pair
from reports.runs import Method, each_setting, extent, runs, with_method
from runtime.intervals import METHOD

BINS = 10
ACCEPTANCE, TARGET = "acceptance", "p, the target's probability"
NEEDS = "needs drafts in one path: python scripts/evaluate.py methods=[fixed]"


def acceptance_by_probability(parts: Sequence[DraftTokens]) -> Figure:
    """Return mean acceptance in bins of q, and the share of tokens in each bin, prompts of all
    datasets together."""
    alike = (joined(group) for group in grouped(parts, lambda tokens: tokens.distributions))
    return Figure(
        name="acceptance-by-probability",
        title="Acceptance against draft probability",
        source="DySpec, figure 2, left",
        kind="measured",
        n=counted(parts),
        interval=f"{METHOD} within each bin of q",
        records=[
            record
            for each in alike
            for record in _bins(each.distributions, ACCEPTANCE, each.q, each.accept, each.group)
        ],
        draw=partial(_draw, name=ACCEPTANCE),
    )


def target_by_probability(evaluations: Sequence[Evaluation]) -> Figure:
    """Return the target's mean probability of draft tokens in bins of q: of those whose p was read,
    each up to the first rejected one of its round. Methods and datasets are taken together."""
    selected = runs(with_method(evaluations, _drafted, NEEDS), _drafted)
    records = list[Record]()
    for alike in grouped(selected, lambda run: run.temperature):
        named = dict[tuple[str, str], int]()
        rows = [
            (q, p, named.setdefault((run.dataset, trace.prompt_id), len(named)))
            for run in alike
            for trace in run.traces
            for each in trace.rounds
            for q, p in zip(each.draft_q, each.draft_p, strict=False)
            if p is not None
        ]
        if rows:
            q, p, group = torch.tensor(rows, dtype=torch.float64).T
            together = float(torch.corrcoef(torch.stack([q, p]))[0, 1])
            for record in _bins(f"T = {alike[0].temperature:g}", TARGET, q, p, group.long()):
                records.append({**record, "correlation of p and q": together})
    if not records:
        raise Missing(NEEDS)
    return Figure(
        name="target-by-probability",
        title="Target against draft probability",
        source="DySpec, figure 2, right",
        kind="measured",
        n=f"{extent(selected)}, {sum(record['tokens'] for record in records):,} draft tokens",
        interval=f"{METHOD} within each bin of q",
        records=records,
        draw=partial(_draw, name=TARGET),
    )


def _drafted(how: Method) -> bool:
    return how.chain


def _bins(
    distributions: str, name: str, q: Tensor, values: Tensor, group: Tensor
) -> Iterator[Record]:
    q, values = q.double(), values.double()
    bins = (q * BINS).long().clamp(max=BINS - 1)
    for number in bins.unique().tolist():
        rows = bins == number
        count = int(rows.sum())
        yield {
            **{"temperatures": distributions},
            **{"q from": number / BINS, "q to": (number + 1) / BINS},
            "mean q": float(q[rows].mean()),
            **{"tokens": count, "tokens, %": 100 * count / len(q)},
            **mean(name, values[rows], group[rows]),
        }


def _draw(records: Sequence[Record], canvas: Canvas, name: str) -> None:
    canvas.set_size_inches(6.4, 5)
    upper, lower = canvas.subplots(2, sharex=True, height_ratios=[3, 1])
    upper.plot([0, 1], [0, 1], "--", color="grey", label=f"{name.partition(',')[0]} = q")
    for place, distributions in enumerate(distinct(records, "temperatures")):
        part = where(records, temperatures=distributions)
        at = [record["mean q"] for record in part]
        upper.errorbar(
            at,
            [record[name] for record in part],
            yerr=reach(part, name),
            capsize=3,
            label=distributions,
            **style(place),
        )
        lower.plot(at, [record["tokens, %"] for record in part], **style(place))
    for axes, label in ((upper, f"mean {name}"), (lower, "tokens, %")):
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
    Entry(
        "Target against draft probability",
        "The target's probability of drawn draft tokens, on average over those of about one q; on"
        " the dashed line the draft is right on average. Tokens below are drawn too often, and"
        " rejected; those above are drawn too seldom.",
        each_setting(target_by_probability),
    ),
)
