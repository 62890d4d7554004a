"""What a shared budget of rows is worth over one length for all, by what it is filled by."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from decoding.batch_cost import BatchCost
from decoding.stopping.rollout_table import Array, RolloutTable
from evaluation.batched.confidences import LOGGED, said
from evaluation.batched.scheduler import Budget, FixedLength, Served, Texts, serve, step_seconds
from predictors.confidences.maps import PositionMaps
from runtime.intervals import Estimate, bootstrap

PLAIN, FIXED = "no draft", "one length"
STALE = 2  # steps, as in SGLang
ROUNDS = 4  # answers of every prompt, at least


@dataclass(frozen=True)
class Way:
    """To spend the rows of a step. confidences: those that fill a budget, "" for none; lag: steps
    that they are old when they settle its size; drafted: tokens of every request"""

    name: str
    confidences: str = ""
    lag: int = 0
    drafted: int = 0


@dataclass(frozen=True)
class Scheduled:
    """Of one way on prompts that neither its length nor its calibration was chosen on, all of it
    modelled. tokens_per_second: of all requests together; over_fixed: that over one length for all;
    over_logged: over the budget filled by confidences as logged, of the same age (a fresh one for
    what has no budget); over_fresh: over the same with fresh confidences. 95 % intervals over
    prompts, paired."""

    requests: int
    way: Way
    tokens_per_second: Estimate
    over_fixed: Estimate
    over_logged: Estimate
    over_fresh: Estimate

    def to_dict(self) -> dict[str, Any]:
        ratios = ("tokens_per_second", "over_fixed", "over_logged", "over_fresh")
        facts = {name: getattr(self, name)._asdict() for name in ratios}
        return {"requests": self.requests, **asdict(self.way), **facts}


class Simulation:
    """So many requests at once, of the prompts of one table. maps: as in `said`"""

    def __init__(
        self,
        rounds: RolloutTable,
        maps: Mapping[str, PositionMaps | None],
        cost: BatchCost,
        requests: int,
        gamma: int,
    ) -> None:
        self.requests, self.gamma = requests, gamma
        self.limit, self.length = rounds.limit(gamma), rounds.length
        self.said = said(rounds, gamma, maps)
        self.accept = rounds.accept[..., :gamma].astype(np.float64)
        self.seconds = [step_seconds(cost, requests, gamma, count) for count in range(gamma + 1)]

    def served(self, way: Way) -> Served:
        texts = Texts(
            self.accept, self._said(way), np.minimum(self.limit, way.drafted), self.length
        )
        seconds = self.seconds[way.drafted]
        policy = Budget(seconds, way.lag) if way.confidences else FixedLength(way.drafted)
        return serve(texts, policy, seconds, self.requests, ROUNDS)

    def _said(self, way: Way) -> Array:
        return self.said[way.confidences] if way.confidences else self.accept

    def ways(self) -> list[Way]:
        """What is compared, each with as many drafted tokens as are fastest here, the fewest of
        equals; stale budgets with those of fresh ones, so that age alone tells them apart."""
        found = [Way(PLAIN), self._best(Way(FIXED), 0)]
        for name in self.said:
            fresh = self._best(Way(f"budget, {name}", name), 1)
            stale = replace(fresh, name=f"{fresh.name}, {STALE} steps old", lag=STALE)
            found += [fresh, stale]
        return found

    def _best(self, way: Way, least: int) -> Way:
        each = [replace(way, drafted=count) for count in range(least, self.gamma + 1)]
        return max(each, key=lambda one: self.served(one).rate)


def chosen(
    rounds: RolloutTable,
    maps: Mapping[str, PositionMaps | None],
    cost: BatchCost,
    sizes: Sequence[int],
    gamma: int,
) -> dict[int, list[Way]]:
    """By number of requests, what is compared, each drafting what is fastest."""
    return {size: Simulation(rounds, maps, cost, size, gamma).ways() for size in sizes}


def judged(
    rounds: RolloutTable,
    maps: Mapping[str, PositionMaps | None],
    cost: BatchCost,
    ways: Mapping[int, Sequence[Way]],
    gamma: int,
) -> list[Scheduled]:
    """Those of `chosen`, on other prompts."""
    found = []
    for requests, each in ways.items():
        simulation = Simulation(rounds, maps, cost, requests, gamma)
        served = {way: simulation.served(way) for way in each}
        found += [_scheduled(requests, way, served) for way in each]
    return found


def _scheduled(requests: int, way: Way, served: Mapping[Way, Served]) -> Scheduled:
    by = {(one.confidences or one.name, one.lag): found for one, found in served.items()}
    mine = served[way]
    others = (by[FIXED, 0], by[LOGGED, way.lag], by[way.confidences or way.name, 0])
    rate = bootstrap(lambda w: (w @ mine.tokens) / (w @ mine.seconds), len(mine.tokens))
    return Scheduled(requests, way, rate, *(ratio(mine, other) for other in others))


def ratio(one: Served, other: Served) -> Estimate:
    """Of their tokens per second, with the interval over prompts, paired."""

    def statistic(times: Array) -> Array:
        rates = [(times @ each.tokens) / (times @ each.seconds) for each in (one, other)]
        return rates[0] / rates[1]

    return bootstrap(statistic, len(one.tokens))
