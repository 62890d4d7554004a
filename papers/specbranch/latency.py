"""Time per token in theory, for this pair's acceptance and speed ratio, and where the pair is.

Times are in plain decoding's time per token. c: a plain token of the target over a draft forward;
g: draft tokens a round; a: acceptance per token; rounds follow the truncated geometric distribution
(`papers.specbranch.accepted_lengths`)."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure as Canvas

from decoding.models.machine import in_words, other_machine
from evaluation.table import SPEEDUP, ratio_of
from reports.artifacts import Artifacts, Evaluation, Json
from reports.drawing import COLOURS, DASHES, Record, reach, records
from reports.figure import Builder, Cell, Entry, Figure, Missing, lacking
from reports.harvest_data import Rounds, models, of_pair, rounds
from reports.row_means import mean
from reports.runs import Method, Run, pooled, runs
from runtime.intervals import METHOD, Estimate
from runtime.intervals import columns as estimate_columns

COSTS = "needs measured costs: python scripts/tune.py"
HARVEST = "needs a harvest: python scripts/gen_data.py anchors.stride=1 out=data/rounds"
LATENCY = "time per token (plain decoding = 1)"
LONGEST = 16


def ideal_sequential(g: int, c: float, a: float) -> float:
    """Everything is accepted, and one more token comes from the target."""
    return (g + c) / (g + 1) / c


def sequential(g: int, c: float, a: float) -> float:
    """Draft, then verify: (g + c) draft forwards for E[n] + 1 tokens (2211.17192)."""
    return (g + c) / (expected(g, a) + 1) / c


def ideal_parallel(g: int, c: float, a: float) -> float:
    """Draft while the target verifies, everything is accepted."""
    return max(g, c) / g / c


def theorem_1(g: int, c: float, a: float) -> float:
    """The same with rollback (2506.01979, Theorem 1): 2 max(g, c) / ((1 + a^g) E[n])."""
    accepted = expected(g, a)
    return 2 * max(g, c) / ((1 + a**g) * accepted) / c if accepted else math.inf


def _cell(time: float) -> Cell:
    return time if math.isfinite(time) else None


def expected(g: int, a: float) -> float:
    """E[n] of the truncated geometric distribution, a (1 - a^g) / (1 - a)."""
    return sum(a**k for k in range(1, g + 1))


CURVES: Mapping[str, Callable[[int, float, float], float]] = {
    "one after the other, all accepted": ideal_sequential,
    "one after the other": sequential,
    "side by side, all accepted": ideal_parallel,
    "side by side with rollback (Theorem 1)": theorem_1,
}
COUNTED, DECODED = "one after the other, counted", "fixed length, decoded"


def latency(rounds: Sequence[Rounds], cost: Json, evaluations: Sequence[Evaluation] = ()) -> Figure:
    """Curves for the fitted acceptance, and where this pair is: rounds counted at every length,
    priced with measured forwards, and what fixed lengths took when they were decoded on that
    machine.

    rounds: of one temperature; cost: what cost=measure wrote.
    """
    if not rounds:
        raise Missing(HARVEST)
    a, c = acceptance(rounds), cost["seconds"]["autoregressive"] / cost["seconds"]["draft"]
    columns = ["curve", "draft tokens a round", *estimate_columns(LATENCY)]
    lengths, temperature = range(1, LONGEST + 1), rounds[0].temperature
    rows: list[list[Cell]] = [
        [name, g, _cell(curve(g, c, a.value)), None, None]
        for name, curve in CURVES.items()
        for g in lengths
    ]
    rows += [row for g in lengths if (row := _counted(rounds, c, g))]
    rows += _decoded(evaluations, cost, rounds)
    fitted = f"{a.value:.3f}" + (f" ({a.low:.3f}-{a.high:.3f})" if a.low is not None else "")
    return Figure(
        name=f"latency-T{temperature:g}",
        title=f"Time per token by draft length, a = {fitted}, c = {c:.2f}, T = {temperature:g}",
        source="SpecBranch, figure 2 and Theorem 1",
        kind="modelled",
        n=f"{_counts(rounds)} of {cost['pair']['name']}; c on {machine(cost)}",
        interval=f"{METHOD} of a, of what is counted and of what was decoded",
        columns=columns,
        rows=rows,
        draw=partial(_draw_latency, records(columns, rows)),
    )


def acceptance(rounds: Sequence[Rounds]) -> Estimate:
    """a of the greatest likelihood, accepted / (accepted + rejected)."""
    sums = [
        [part.accepted[rows].sum().item(), (part.accepted < part.most)[rows].sum().item()]
        for part in rounds
        for prompt in part.group.unique().tolist()
        for rows in [part.group == prompt]
    ]
    accepted, rejected = np.array(sums, dtype=np.float64).T
    return ratio_of(accepted, accepted + rejected)


def _counted(rounds: Sequence[Rounds], c: float, g: int) -> list[Cell] | None:
    """Of the rounds in which a verdict on g tokens could be given; None where there is none. A
    shorter round tells its outcome only where it was rejected: to count it would make acceptance
    look worse than it is."""
    kept = [part.most >= g for part in rounds]
    offset = max(int(part.group.max()) for part in rounds) + 1
    accepted = torch.cat(
        [part.accepted[rows] for part, rows in zip(rounds, kept, strict=True)]
    ).clamp(max=g)
    groups = [
        part.group[rows] + offset * place
        for place, (part, rows) in enumerate(zip(rounds, kept, strict=True))
    ]
    if not len(accepted):
        return None
    value, low, high = mean(accepted + 1, torch.cat(groups))
    ends = [(g + c) / float(end) / c if end else None for end in (value, high, low)]
    return [COUNTED, g, *ends]


def _decoded(
    evaluations: Sequence[Evaluation], cost: Json, rounds: Sequence[Rounds]
) -> list[list[Cell]]:
    """Fixed lengths against plain decoding of the same evaluation, where it ran at this temperature
    and as the costs were measured."""
    rows: list[list[Cell]] = []
    for evaluation in evaluations:
        alike = evaluation.temperature == rounds[0].temperature
        if alike and not other_machine(cost["measured_on"], evaluation.results["run"]):
            rows += [
                _decoded_row(run) for run in pooled(runs([evaluation], _fixed)) if run.baseline
            ]
    return rows


def _fixed(how: Method) -> bool:
    return (how.engine, how.structure, how.verifier, how.stop) == (
        "SerialEngine",
        "Chain",
        "TokenVerifier",
        "Fixed",
    )


def _decoded_row(run: Run) -> list[Cell]:
    value, low, high = run.estimate(SPEEDUP)
    ends = [None if end is None else 1 / end for end in (value, high, low)]
    return [DECODED, int(run.method.settings["stop.gamma"]), *ends]


def _counts(rounds: Sequence[Rounds]) -> str:
    prompts = sum(len(part.group.unique()) for part in rounds)
    return f"{prompts} prompts, {sum(len(part.accepted) for part in rounds):,} rounds"


def machine(cost: Json) -> str:
    on = cost["measured_on"]
    return f"{in_words(on['hardware'])}, {in_words(on['dtypes'])}, {on['threads']} threads"


def _draw_latency(found: Sequence[Record], canvas: Canvas) -> None:
    canvas.set_size_inches(7.4, 4.6)
    axes = canvas.subplots()
    axes.axhline(1, color="grey", linewidth=0.8)
    for place, name in enumerate(CURVES):
        part = [record for record in found if record["curve"] == name]
        x, y = ([record[column] for record in part] for column in ("draft tokens a round", LATENCY))
        axes.plot(x, y, DASHES[place], color=COLOURS[place], label=name)
    for name, marker in ((COUNTED, "o"), (DECODED, "D")):
        part = [record for record in found if record["curve"] == name]
        if part:
            x, y = (
                [record[column] for record in part] for column in ("draft tokens a round", LATENCY)
            )
            style: dict[str, Any] = {"color": "black", "markerfacecolor": "white", "capsize": 3}
            axes.errorbar(x, y, yerr=reach(part, LATENCY), fmt=marker, label=name, **style)
    axes.set_xlabel("draft tokens a round")
    axes.set_ylabel(LATENCY)
    axes.set_ylim(0, min(axes.get_ylim()[1], 6))
    canvas.legend(loc="outside upper center", ncols=2, fontsize=8)


def _builders(artifacts: Artifacts) -> list[Builder]:
    """One for each file of costs and temperature of the harvests of its pair."""
    return [one for cost in artifacts.costs for one in _of_cost(cost, artifacts)] or [
        partial(lacking, COSTS)
    ]


def _of_cost(cost: Json, artifacts: Artifacts) -> list[Builder]:
    harvests = of_pair(cost["pair"], artifacts.harvests)
    decoded = [
        one
        for one in artifacts.evaluations
        if models(one.results["run"]["pair"]) == models(cost["pair"])
    ]

    def build(temperature: float) -> Figure:
        key = ("rounds", *(harvest.folder for harvest in harvests))
        return latency(
            artifacts.once(key, lambda: rounds(harvests)).get(temperature, []), cost, decoded
        )

    temperatures = {harvest.warps.target.temperature for harvest in harvests}
    return [partial(build, temperature) for temperature in sorted(temperatures, reverse=True)] or [
        partial(latency, [], cost)
    ]


FIGURES = (
    Entry(
        "Time per token by draft length",
        "Below 1 is faster than plain decoding. Theorem 1 leaves out the token that every rejected"
        " round still commits, which makes it too pessimistic for a low acceptance. Counted points"
        " off their curve show that acceptance is not the same everywhere.",
        _builders,
    ),
)
