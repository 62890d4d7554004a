"""Which stop rule with which threshold decodes fastest, judged by replay: sweeps, bounds,
frontiers, intervals."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decoding.cost import CostTable
from decoding.stopping.policy import Policy
from decoding.stopping.rollout_table import RolloutTable
from evaluation.replay.simulate import Counts, Replayer
from runtime.intervals import bootstrap

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Candidate:
    """A rule at one threshold and what it counts."""

    rule: str
    threshold: float
    counts: Counts

    @property
    def rates(self) -> tuple[float, float]:
        """Discard rate and verification rate: draft tokens not accepted, and target forwards, per
        committed token."""
        tokens = self.counts.tokens.sum()
        return float(self.counts.discarded.sum() / tokens), float(self.counts.rounds.sum() / tokens)


def sweep(
    replayer: Replayer, policies: Mapping[str, Policy], grid: Mapping[str, Sequence[float]]
) -> list[Candidate]:
    """Every rule at every threshold of its grid. Any number of cost tables can price the result."""
    return [
        Candidate(rule, threshold, replayer.replay(policy, threshold))
        for rule, policy in policies.items()
        for threshold in grid[rule]
    ]


def speedup(candidate: Candidate, cost: CostTable) -> float:
    """Modelled, over decoding without a draft: a ratio of sums over responses."""
    counts = candidate.counts
    return float(cost.plain(counts).sum() / cost.price(counts, candidate.rule).sum())


def spread(candidate: Candidate, cost: CostTable) -> tuple[float, float]:
    """95 % bootstrap interval of `speedup` over responses."""
    return interval(cost.plain(candidate.counts), cost.price(candidate.counts, candidate.rule))


def best(candidates: Iterable[Candidate], cost: CostTable) -> Candidate:
    """The fastest; the first of equals."""
    return max(candidates, key=lambda candidate: speedup(candidate, cost))


def interval(above: Array, below: Array, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval over responses of sum(above) / sum(below), both [B]. NaN for a single
    one."""
    found = bootstrap(lambda times: (times @ above) / (times @ below), len(above), seed)
    if found.low is None or found.high is None:
        return math.nan, math.nan
    return found.low, found.high


def span(ends: Sequence[float | None]) -> str:
    """An interval as text; "-" where it is not known (NaN, or None as JSON has it)."""
    known = [end for end in ends if end is not None and not math.isnan(end)]
    return "-".join(f"{end:.3f}" for end in known) or "-"


# Bounds -------------------------------------------------------------------------------------------


def oracle_calls(differs: Sequence[bool]) -> tuple[int, int]:
    """Draft and target calls of SpecDec++'s oracle (2405.19715, Theorem 4.1) for one greedy
    response.

    differs: [N], where the draft's choice is not the response's token. The oracle stops drafting
    right before each of
    them: nothing is discarded, and each costs one target call. One more brings the last token,
    where that is none of them. (The theorem's |S| + 1 calls are |S| where it is. A last token that
    is an end token could be drafted, which would save no call.)"""
    target = sum(differs) + (not differs[-1])
    return len(differs) - target, target


def oracle_totals(table: RolloutTable) -> tuple[int, int]:
    """`oracle_calls`, summed over the responses of a greedy target."""
    rows = [table.accept[row, :length, 0] == 0 for row, length in enumerate(table.length)]
    draft, target = zip(*(oracle_calls(differs.tolist()) for differs in rows), strict=True)
    return sum(draft), sum(target)


def hindsight(replayer: Replayer, cost: CostTable) -> Array:
    """[B], least any choice of draft lengths costs each response when it knows what will be
    accepted.

    A draft beyond the accepted length costs more and goes no further, so only lengths up to it are
    tried, backwards from the end. Where a draft token is cheaper than a target call, whatever its
    rows, this is the oracle of Theorem 4.1 with at most gamma_max tokens a round; elsewhere it may
    draft less, down to not at all. For a sampled target the recorded verdicts are what is known.
    """
    table = replayer.table
    batch, positions, gamma = table.tokens.shape
    most = np.minimum(table.accepted, replayer.limit)
    rows = np.interp(np.arange(1, gamma + 2), cost.target.rows, cost.target.seconds)
    round_cost = np.arange(gamma + 1) * cost.draft + rows
    left = np.zeros((batch, positions + gamma + 2))  # cost from each position on
    for start in range(positions - 1, -1, -1):
        tried = round_cost + left[:, start + 1 : start + gamma + 2]
        tried[np.arange(gamma + 1) > most[:, start, None]] = np.inf
        left[:, start] = np.where(start < table.length, tried.min(1), 0)
    return left[:, 0]


# Frontiers ----------------------------------------------------------------------------------------


def frontier(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those no other one beats in discard and verification rate at once, by discard rate."""
    kept, lowest = list[Candidate](), float("inf")
    for candidate in sorted(candidates, key=lambda candidate: candidate.rates):
        if candidate.rates[1] < lowest:
            kept.append(candidate)
            lowest = candidate.rates[1]
    return kept


def dominated_share(ours: Sequence[Candidate], theirs: Sequence[Candidate]) -> float:
    """Share of `theirs` that one of `ours` beats: at most the same rates, one of them lower."""
    beaten = [any(dominates(a.rates, b.rates) for a in ours) for b in theirs]
    return sum(beaten) / len(beaten)


def dominates(ours: tuple[float, float], theirs: tuple[float, float]) -> bool:
    return ours != theirs and all(a <= b for a, b in zip(ours, theirs, strict=True))


# Results ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The best threshold of a rule under one cost table, judged on prompts it was not chosen on.

    speculate: whether it pays on the prompts it was chosen on: whether the whole 95 % interval of
    its speed-up there is above 1; expected: that speed-up, modelled, where the best of many looks
    too good; speedup: on those it is judged on, with its 95 % interval over prompts; regret:
    seconds over those of `hindsight` there, minus 1"""

    rule: str
    threshold: float
    speculate: bool
    expected: float
    speedup: float
    interval: tuple[float, float]
    regret: float
    discard_rate: float
    verification_rate: float


def choose(
    chosen_on: Sequence[Candidate], judged_on: Sequence[Candidate], cost: CostTable, least: Array
) -> list[Choice]:
    """One choice per rule, the one to advise first: fastest on the prompts of `chosen_on`. Both
    lists hold the same candidates, counted on different prompts; least: `hindsight` of the
    second."""
    rules = dict.fromkeys(candidate.rule for candidate in chosen_on)
    found = []
    for rule in rules:
        pick = best((candidate for candidate in chosen_on if candidate.rule == rule), cost)
        judged = next(c for c in judged_on if (c.rule, c.threshold) == (rule, pick.threshold))
        found.append(_judge(judged, pick, cost, least))
    return sorted(found, key=lambda choice: -choice.expected)


def _judge(candidate: Candidate, pick: Candidate, cost: CostTable, least: Array) -> Choice:
    """pick: the same candidate on the prompts it was chosen on."""
    spent, expected, (low, _) = (
        cost.price(candidate.counts, candidate.rule),
        speedup(pick, cost),
        spread(pick, cost),
    )
    return Choice(
        candidate.rule,
        candidate.threshold,
        (expected if math.isnan(low) else low) > 1,
        expected,
        speedup(candidate, cost),
        spread(candidate, cost),
        float(spent.sum() / least.sum() - 1),
        *candidate.rates,
    )
