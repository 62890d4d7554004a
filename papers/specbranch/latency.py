"""Theoretical time per token for a pair's acceptance and speed ratio, and the pair's own times.

Times are in plain decoding's time per token. c: a plain token of the target over a draft forward;
g: draft tokens a round; a: acceptance per token; rounds follow the truncated geometric distribution
(`papers.specbranch.accepted_lengths`)."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from matplotlib.figure import Figure as Canvas

from decoding.models.machine import in_words, other_machine
from evaluation.table import SPEEDUP, ratio_of
from reports.artifacts import Artifacts, Evaluation, Json
from reports.drawing import COLOURS, DASHES, reach, where
from reports.figure import Builder, Entry, Figure, Missing, Record, each, estimated, mean
from reports.harvest_data import Rounds, models, rounds
from reports.runs import pooled, runs
from runtime.intervals import METHOD, Estimate

LATENCY = "time per token (plain decoding = 1)"
TOKENS = "draft tokens a round"
LONGEST = 16


def ideal_sequential(g: int, c: float, a: float) -> float:
    """Return the time if everything is accepted, with one more token from the target."""
    return (g + c) / (g + 1) / c


def sequential(g: int, c: float, a: float) -> float:
    """Return the time of drafting, then verifying: (g + c) draft forwards for E[n] + 1 tokens
    (2211.17192)."""
    return (g + c) / (expected(g, a) + 1) / c


def ideal_parallel(g: int, c: float, a: float) -> float:
    """Return the time of drafting while the target verifies, if everything is accepted."""
    return max(g, c) / g / c


def theorem_1(g: int, c: float, a: float) -> float:
    """Return the time of drafting while the target verifies, with rollback (2506.01979, Theorem 1):
    2 max(g, c) / ((1 + a^g) E[n])."""
    accepted = expected(g, a)
    return 2 * max(g, c) / ((1 + a**g) * accepted) / c if accepted else math.inf


def expected(g: int, a: float) -> float:
    """Return E[n] of the truncated geometric distribution, a (1 - a^g) / (1 - a)."""
    return sum(a**k for k in range(1, g + 1))


CURVES: Mapping[str, Callable[[int, float, float], float]] = {
    "one after the other, all accepted": ideal_sequential,
    "one after the other": sequential,
    "side by side, all accepted": ideal_parallel,
    "side by side with rollback (Theorem 1)": theorem_1,
}
COUNTED, DECODED = "one after the other, counted", "fixed length, decoded"


def latency(rounds: Sequence[Rounds], cost: Json, evaluations: Sequence[Evaluation] = ()) -> Figure:
    """Return curves for the fitted acceptance, and the pair's times: rounds counted at every
    length, priced with measured forwards, and those of fixed lengths decoded on that machine.

    rounds: of one temperature; cost: the file of cost=measure.
    """
    if not rounds:
        raise Missing(
            "needs a harvest: python scripts/gen_data.py anchors.stride=1 out=data/rounds"
        )
    a, c = acceptance(rounds), cost["seconds"]["autoregressive"] / cost["seconds"]["draft"]
    lengths, temperature = range(1, LONGEST + 1), rounds[0].temperature
    points: list[tuple[str, int, Sequence[float | None]]] = [
        (name, g, (time if math.isfinite(time) else None, None, None))
        for name, curve in CURVES.items()
        for g in lengths
        for time in [curve(g, c, a.value)]
    ]
    points += [(COUNTED, g, times) for g in lengths if (times := _counted(rounds, c, g))]
    points += [(DECODED, g, times) for g, times in _decoded(evaluations, cost, temperature)]
    fitted = f"{a.value:.3f}" + (f" ({a.low:.3f}-{a.high:.3f})" if a.low is not None else "")
    prompts = sum(len(part.group.unique()) for part in rounds)
    count = sum(len(part.accepted) for part in rounds)
    return Figure(
        name=f"latency-T{temperature:g}",
        title=f"Time per token by draft length, a = {fitted}, c = {c:.2f}, T = {temperature:g}",
        source="SpecBranch, figure 2 and Theorem 1",
        kind="modelled",
        n=f"{prompts} prompts, {count:,} rounds of {cost['pair']['name']}; c on {machine(cost)}",
        interval=f"{METHOD} of a, of what is counted and of what was decoded",
        records=[
            {"curve": curve, TOKENS: g, **estimated(LATENCY, times)} for curve, g, times in points
        ],
        draw=_draw,
    )


def acceptance(rounds: Sequence[Rounds]) -> Estimate:
    """Return the maximum likelihood estimate of a, accepted / (accepted + rejected)."""
    sums = [
        [part.accepted[rows].sum().item(), (part.accepted < part.most)[rows].sum().item()]
        for part in rounds
        for prompt in part.group.unique().tolist()
        for rows in [part.group == prompt]
    ]
    accepted, rejected = np.array(sums, dtype=np.float64).T
    return ratio_of(accepted, accepted + rejected)


def _counted(rounds: Sequence[Rounds], c: float, g: int) -> list[float | None]:
    """Return the time per token, with its interval, of the rounds with a verdict on g tokens; empty
    if there are none. A shorter round shows its outcome only if it was rejected: counting it would
    bias acceptance downwards."""
    first, groups, accepted = 0, list[torch.Tensor](), list[torch.Tensor]()
    for part in rounds:
        rows = part.most >= g
        accepted.append(part.accepted[rows])
        groups.append(part.group[rows] + first)
        first += int(part.group.max()) + 1
    tokens = torch.cat(accepted).clamp(max=g) + 1
    if not len(tokens):
        return []
    value, low, high = mean(LATENCY, tokens, torch.cat(groups)).values()
    return [(g + c) / float(end) / c if end else None for end in (value, high, low)]


def _decoded(
    evaluations: Sequence[Evaluation], cost: Json, temperature: float
) -> list[tuple[int, list[float | None]]]:
    """Return fixed lengths and their times relative to plain decoding of the same evaluation, for
    evaluations at this temperature and on the machine of the costs."""
    points = []
    for evaluation in evaluations:
        elsewhere = other_machine(cost["measured_on"], evaluation.results["run"])
        if evaluation.temperature != temperature or elsewhere:
            continue
        fixed = runs([evaluation], lambda how: how.chain and how.stop == "Fixed")
        for run in (run for run in pooled(fixed) if run.baseline):
            value, low, high = run.estimate(SPEEDUP)
            times = [None if end is None else 1 / end for end in (value, high, low)]
            points.append((int(run.method.settings["stop.gamma"]), times))
    return points


def machine(cost: Json) -> str:
    on = cost["measured_on"]
    return f"{in_words(on['hardware'])}, {in_words(on['dtypes'])}, {on['threads']} threads"


def _draw(records: Sequence[Record], canvas: Canvas) -> None:
    canvas.set_size_inches(7.4, 4.6)
    axes = canvas.subplots()
    axes.axhline(1, color="grey", linewidth=0.8)
    for place, name in enumerate((*CURVES, COUNTED, DECODED)):
        part = where(records, curve=name)
        x, y = ([record[column] for record in part] for column in (TOKENS, LATENCY))
        if name in CURVES:
            axes.plot(x, y, DASHES[place], color=COLOURS[place], label=name)
        elif part:
            axes.errorbar(
                x,
                y,
                yerr=reach(part, LATENCY),
                fmt="o" if name == COUNTED else "D",
                label=name,
                color="black",
                markerfacecolor="white",
                capsize=3,
            )
    axes.set_xlabel(TOKENS)
    axes.set_ylabel(LATENCY)
    axes.set_ylim(0, min(axes.get_ylim()[1], 6))
    canvas.legend(loc="outside upper center", ncols=2, fontsize=8)


def _builders(artifacts: Artifacts) -> list[Builder]:
    """Return the builder of each file of costs and temperature of the harvests of its pair."""

    def build(cost_and_temperature: tuple[Json, float | None]) -> Figure:
        cost, temperature = cost_and_temperature
        pair = models(cost["pair"])
        harvests = [one for one in artifacts.harvests if models(one.context["pair"]) == pair]
        decoded = [
            one for one in artifacts.evaluations if models(one.results["run"]["pair"]) == pair
        ]
        key = ("rounds", *(harvest.folder for harvest in harvests))
        by_temperature = artifacts.once(key, lambda: rounds(harvests))
        return latency(
            by_temperature.get(temperature, []) if temperature is not None else [], cost, decoded
        )

    wanted: list[tuple[Json, float | None]] = []
    for cost in artifacts.costs:
        temperatures = {
            harvest.warps.target.temperature
            for harvest in artifacts.harvests
            if models(harvest.context["pair"]) == models(cost["pair"])
        }
        priced: list[float | None] = [*sorted(temperatures, reverse=True)]
        wanted += [(cost, temperature) for temperature in priced or [None]]
    return each(wanted, build, "needs measured costs: python scripts/tune.py")


FIGURES = (
    Entry(
        "Time per token by draft length",
        "Below 1 is faster than plain decoding. Theorem 1 leaves out the token that every rejected"
        " round still commits, which makes it too pessimistic for a low acceptance. Counted points"
        " off their curve show that acceptance is not the same everywhere.",
        _builders,
    ),
)
