"""Which stop rule with which threshold decodes fastest, judged by replay: sweeps, frontiers,
intervals."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from decoding.cost import CostTable, Counts
from decoding.stopping.policy import Policy
from decoding.stopping.rollout_table import RolloutTable
from evaluation.replay.simulate import Replayer
from evaluation.table import counted
from runtime.intervals import bootstrap

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Candidate:
    """A rule at one threshold and what it counts, by column [B]; prompts [B]: their ids."""

    rule: str
    threshold: float
    counts: Counts
    prompts: Sequence[str] = ()

    @property
    def rates(self) -> tuple[float, float]:
        """Discard rate and verification rate: draft tokens not accepted, and target forwards, per
        committed token."""
        counts, tokens = self.counts, self.counts["emitted"].sum()
        discarded = (counts["drafted"] - counts["accepted"]).sum()
        return float(discarded / tokens), float(counts["rounds"].sum() / tokens)


def sweep(
    replayer: Replayer, policies: Mapping[str, Policy], grid: Mapping[str, Sequence[float]]
) -> list[Candidate]:
    """Every rule at every threshold of its grid. Any number of cost tables can price the result."""
    return [
        Candidate(rule, threshold, replayer.replay(policy, threshold), replayer.table.prompt_ids)
        for rule, policy in policies.items()
        for threshold in grid[rule]
    ]


def candidate_rows(
    candidates: Sequence[Candidate], split: str, greedy: bool = False
) -> pd.DataFrame:
    """Return the measurements of all candidates on the prompts of a split."""
    kind = "counted" if greedy else "expected"
    parts = [counted(kind, one.rule, one.counts, one.prompts, one.threshold) for one in candidates]
    return pd.concat(parts, ignore_index=True).assign(split=split)


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
class Pick:
    """A rule at the threshold that is best on the prompts of `chosen`, judged on others."""

    chosen: Candidate
    judged: Candidate

    @property
    def rule(self) -> str:
        return self.judged.rule


def picks(
    chosen_on: Sequence[Candidate], judged_on: Sequence[Candidate], cost: CostTable
) -> list[Pick]:
    """One per rule, the fastest on the prompts of `chosen_on` first. Both lists hold the same
    candidates, counted on different prompts."""
    found = []
    for rule in dict.fromkeys(candidate.rule for candidate in chosen_on):
        pick = best((candidate for candidate in chosen_on if candidate.rule == rule), cost)
        same = (rule, pick.threshold)
        found.append(Pick(pick, next(c for c in judged_on if (c.rule, c.threshold) == same)))
    return sorted(found, key=lambda pick: -speedup(pick.chosen, cost))


@dataclass(frozen=True)
class Choice:
    """The best threshold of a rule under one cost table, judged on prompts it was not chosen on.

    speculate: whether it pays on the prompts it was chosen on: whether the whole 95 % interval of
    its speed-up there is above 1; expected: that speed-up, modelled, where the best of many looks
    too good; speedup: on those it is judged on, with its 95 % interval over prompts; regret:
    seconds over those of `hindsight` there, minus 1; other: the rule to compare it with, None where
    there is none; gain: the seconds of that one over its own, prompt by prompt, with its 95 %
    interval"""

    rule: str
    threshold: float
    speculate: bool
    expected: float
    speedup: float
    interval: tuple[float, float]
    regret: float
    discard_rate: float
    verification_rate: float
    other: str | None = None
    gain: float = math.nan
    gain_interval: tuple[float, float] = (math.nan, math.nan)


def choose(
    chosen_on: Sequence[Candidate], judged_on: Sequence[Candidate], cost: CostTable, least: Array
) -> list[Choice]:
    """One choice per rule, the one to advise first: fastest on the prompts of `chosen_on`. least:
    `hindsight` of the prompts of `judged_on`."""
    found = picks(chosen_on, judged_on, cost)
    return judge(found, found, cost, least)


def judge(
    found: Iterable[Pick], rivals: Sequence[Pick], cost: CostTable, least: Array
) -> list[Choice]:
    """Each compared with the first of `rivals` that is another rule."""
    return [
        _judge(pick, next((r for r in rivals if r.rule != pick.rule), None), cost, least)
        for pick in found
    ]


def _judge(pick: Pick, rival: Pick | None, cost: CostTable, least: Array) -> Choice:
    candidate = pick.judged
    spent, expected, (low, _) = (
        cost.price(candidate.counts, candidate.rule),
        speedup(pick.chosen, cost),
        spread(pick.chosen, cost),
    )
    alone = Choice(
        candidate.rule,
        candidate.threshold,
        (expected if math.isnan(low) else low) > 1,
        expected,
        speedup(candidate, cost),
        spread(candidate, cost),
        float(spent.sum() / least.sum() - 1),
        *candidate.rates,
    )
    if rival is None:
        return alone
    other = cost.price(rival.judged.counts, rival.rule)
    gain = float(other.sum() / spent.sum())
    return replace(alone, other=rival.rule, gain=gain, gain_interval=interval(other, spent))


# What no rule beats -------------------------------------------------------------------------------


KNOWING = "knows p"


def knowing(table: RolloutTable) -> Policy:
    """A rule that is told, once a token is drawn, with which probability all of them and the next
    one are accepted: the most that can be known before the coins fall. The first token is always
    drawn."""
    reached = np.cumprod(table.accept, axis=-1, dtype=np.float64)
    reached[..., 0] = np.inf
    return Policy(reached)


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
    round_cost = np.arange(gamma + 1) * cost.draft + cost.target.of(np.arange(1, gamma + 2))
    left = np.zeros((batch, positions + gamma + 2))  # cost from each position on
    for start in range(positions - 1, -1, -1):
        tried = round_cost + left[:, start + 1 : start + gamma + 2]
        tried[np.arange(gamma + 1) > most[:, start, None]] = np.inf
        left[:, start] = np.where(start < table.length, tried.min(1), 0)
    return left[:, 0]
