"""Drafts grown by worth against cost, as replay counts them, and the rate that they ask of a draw.

The rate is what decoding reaches with the drafts that are worth it: a fixed point."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from decoding.cost import CostTable, Counts
from decoding.stopping.rollout_table import RolloutTable
from decoding.structures.comb import Worth, grow
from evaluation.replay.simulate import Replayer
from evaluation.replay.tuning import KNOWING, Candidate, knowing, sweep
from predictors.base import Records
from predictors.features.layers import RecordedLayers

MOVES, ROUNDS = 1e-4, 40  # share by which a rate still moves; rates tried at most
FACTORS = [1.2**power for power in range(-6, 7)]
"""Of the rate, tried where it is tuned after all."""


@runtime_checkable
class GrowsByWorth(Protocol):
    """A structure that can be replayed. columns: of a harvest's round records, that `predictions`
    reads; budget: most nodes of a draft."""

    columns: Sequence[str]
    budget: int

    def predictions(self, records: Records, layers: RecordedLayers) -> dict[str, Tensor]:
        """As of stop rules (`TunableRule.predictions`)."""
        ...

    def worth(self, table: RolloutTable) -> Worth:
        """Of every draw, as its predictor says."""
        ...


@dataclass(frozen=True)
class Grower:
    """A structure on some prompts."""

    name: str
    replayer: Replayer
    worth: Worth
    budget: int

    def at(self, cost: CostTable, rate: float) -> Candidate:
        """rate: tokens per second of `cost` that a draw must beat."""
        found = grow(self.worth, self.replayer.limit, cost, rate, self.budget)
        return Candidate(
            self.name, rate, self.replayer.combs(found), self.replayer.table.prompt_ids
        )

    def settled(self, cost: CostTable) -> Candidate:
        """At the rate that it reaches itself, by its own account: without the questions it asks."""
        return settled(lambda rate: self.at(cost, rate), replace(cost, calls={}))

    def regret(self, cost: CostTable, rate: float) -> float:
        """Seconds at this rate over those at the best one for these prompts, minus 1."""
        spent = [seconds(self.at(cost, rate * factor), cost) for factor in FACTORS]
        return seconds(self.at(cost, rate), cost) / min(spent) - 1

    def chain(self) -> "Grower":
        """The same without leaves."""
        return replace(self, worth=self.worth.up_to(0))


def settled(at: Callable[[float], Candidate], cost: CostTable) -> Candidate:
    """`at` the rate that no longer moves, from that of plain decoding on; the fastest of all tried
    where it never comes to rest."""
    tried, rate = [at(1 / cost.autoregressive)], 1 / cost.autoregressive
    for _ in range(ROUNDS):
        reached = tokens(tried[-1].counts) / seconds(tried[-1], cost)
        if abs(reached - rate) < MOVES * rate:
            return tried[-1]
        rate = reached
        tried.append(at(rate))
    return min(tried, key=lambda candidate: seconds(candidate, cost))


def seconds(candidate: Candidate, cost: CostTable) -> float:
    return float(cost.price(candidate.counts, candidate.rule).sum())


def tokens(counts: Counts) -> float:
    return float(counts["emitted"].sum())


# All that is compared -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """Some prompts, replayed. candidates: rules at thresholds; bounds: what no rule beats, at
    thresholds; growers: structures, by name."""

    replayer: Replayer
    candidates: Sequence[Candidate]
    bounds: Sequence[Candidate]
    growers: Mapping[str, Grower]

    @property
    def table(self) -> RolloutTable:
        return self.replayer.table


def sample(
    replayer: Replayer,
    candidates: Sequence[Candidate],
    structures: Mapping[str, GrowsByWorth],
    points: int,
) -> Sample:
    """points: thresholds of the bounds, besides 0."""
    table = replayer.table
    grid = {KNOWING: np.linspace(0, 1, points + 1).tolist()}
    bounds = sweep(replayer, {KNOWING: knowing(table)}, grid)
    growers = {
        name: Grower(name, replayer, structure.worth(table), structure.budget)
        for name, structure in structures.items()
    }
    return Sample(replayer, candidates, bounds, growers)


def settled_rates(chosen_on: Sample, cost: CostTable) -> dict[str, float]:
    """Of every structure."""
    return {name: grower.settled(cost).threshold for name, grower in chosen_on.growers.items()}


def untuned(
    chosen_on: Sample, judged_on: Sample, cost: CostTable, rates: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """By structure, the `regret` of having no setting but the cost table, and that of the same
    without leaves."""
    found = {}
    for name, rate in rates.items():
        alone = chosen_on.growers[name].chain().settled(cost).threshold
        grower = judged_on.growers[name]
        found[name] = {
            "rate": rate,
            "regret": grower.regret(cost, rate),
            "chain_regret": grower.chain().regret(cost, alone),
        }
    return found
