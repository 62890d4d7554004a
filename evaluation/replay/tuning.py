"""Choice of the fastest stop rule and threshold by replay, compared with bounds that no rule beats
and with drafts grown by value against cost."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import pandas as pd
from hydra.utils import instantiate
from numpy.typing import NDArray
from omegaconf import DictConfig

from decoding.cost import CostTable, Counts
from decoding.stopping.base import TunableRule
from decoding.stopping.policy import Policy
from decoding.stopping.rollout_table import RolloutTable
from decoding.structures.comb import Worth, grow
from evaluation.page import lower
from evaluation.replay.read import Asks
from evaluation.replay.simulate import Replayer
from evaluation.replay.thresholds import NO_ADVICE
from evaluation.table import counted, ratio_of
from runtime.intervals import Estimate
from runtime.workers import LOCAL, Workers

Array = NDArray[np.float64]
Interval = tuple[float | None, float | None]


@dataclass(frozen=True)
class Candidate:
    """A rule at one threshold and its counts, by column [B]; prompts [B]: their ids."""

    rule: str
    threshold: float
    counts: Counts
    prompts: Sequence[str] = ()

    @property
    def rates(self) -> tuple[float, float]:
        """Return discard rate and verification rate: draft tokens not accepted, and target
        forwards, per committed token."""
        counts, tokens = self.counts, self.counts["emitted"].sum()
        discarded = (counts["drafted"] - counts["accepted"]).sum()
        return float(discarded / tokens), float(counts["rounds"].sum() / tokens)


def sweep(
    replayer: Replayer,
    policies: Mapping[str, Policy],
    grid: Mapping[str, Sequence[float]],
    workers: Workers = LOCAL,
) -> list[Candidate]:
    """Replay every rule at every threshold of its grid. Any number of cost tables can price the
    result."""
    asked = [(rule, threshold) for rule in policies for threshold in grid[rule]]
    counts = dict(workers.all(partial(tuple, (replayer, policies)), replayed, asked))
    prompts = replayer.table.prompt_ids
    return [Candidate(*each, counts[each], prompts) for each in asked]


def replayed(state: tuple[Replayer, Mapping[str, Policy]], asked: tuple[str, float]) -> Counts:
    """Replay one rule at one threshold."""
    (replayer, policies), (rule, threshold) = state, asked
    return replayer.replay(policies[rule], threshold)


def candidates_of(
    cfg: DictConfig,
    stops: Mapping[str, TunableRule],
    replayer: Replayer,
    thresholds: Sequence[float] | None = None,
) -> list[Candidate]:
    """Replay every rule at every threshold of its grid, or at those given: the same for every
    split."""
    workers = instantiate(cfg.workers) if "workers" in cfg else LOCAL
    policies = {name: stop.policy(replayer.table) for name, stop in stops.items()}
    grid = {
        name: list(thresholds or stop.grid(cfg.points, replayer.gamma_max))
        for name, stop in stops.items()
    }
    return sweep(replayer, policies, grid, workers)


def candidate_rows(
    candidates: Sequence[Candidate], split: str, greedy: bool = False
) -> pd.DataFrame:
    """Return the measurements of all candidates on the prompts of a split."""
    kind = "counted" if greedy else "expected"
    parts = [
        counted(kind, each.rule, each.counts, each.prompts, each.threshold) for each in candidates
    ]
    return pd.concat(parts, ignore_index=True).assign(split=split)


def speedup(candidate: Candidate, cost: CostTable) -> float:
    """Return the modelled speed over decoding without a draft: a ratio of sums over responses."""
    counts = candidate.counts
    return float(cost.plain(counts).sum() / cost.price(counts, candidate.rule).sum())


def over_plain(candidate: Candidate, cost: CostTable) -> Estimate:
    """Return `speedup` with its 95 % interval over responses."""
    counts = candidate.counts
    return ratio(cost.plain(counts), cost.price(counts, candidate.rule))


def ratio(above: Array, below: Array) -> Estimate:
    """Return the ratio of sums of two columns [B], with its 95 % interval over responses."""
    return Estimate(float(above.sum() / below.sum()), *ratio_of(above, below)[1:])


def best(candidates: Iterable[Candidate], cost: CostTable) -> Candidate:
    """Return the fastest candidate, the first of equals."""
    return max(candidates, key=lambda candidate: speedup(candidate, cost))


# Frontiers ----------------------------------------------------------------------------------------


def frontiers(candidates: Sequence[Candidate]) -> dict[str, Any]:
    """Return by rule the discard and verification rates of its frontier, and the share of the fixed
    lengths' frontier that it dominates."""
    edges = {
        rule: frontier([each for each in candidates if each.rule == rule])
        for rule in dict.fromkeys(each.rule for each in candidates)
    }
    fixed = edges.get("fixed", [])
    return {
        rule: {
            "points": [[each.threshold, *each.rates] for each in edge],
            "fixed_dominated": dominated_share(edge, fixed) if fixed and rule != "fixed" else None,
        }
        for rule, edge in edges.items()
    }


def frontier(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that no other beats in both discard and verification rate, by discard
    rate."""
    kept, lowest = list[Candidate](), float("inf")
    for candidate in sorted(candidates, key=lambda candidate: candidate.rates):
        if candidate.rates[1] < lowest:
            kept.append(candidate)
            lowest = candidate.rates[1]
    return kept


def dominated_share(candidates: Sequence[Candidate], others: Sequence[Candidate]) -> float:
    """Return the share of `others` that a candidate beats: at most the same rates, one of them
    lower."""
    rates, beaten = {candidate.rates for candidate in candidates}, 0
    for discard, verification in (other.rates for other in others):
        no_higher = {rate for rate in rates if rate[0] <= discard and rate[1] <= verification}
        beaten += bool(no_higher - {(discard, verification)})
    return beaten / len(others)


# Choosing and judging -----------------------------------------------------------------------------


class Pick(NamedTuple):
    """A rule at the threshold that is best on the prompts of `chosen`, judged on others."""

    chosen: Candidate
    judged: Candidate


def picks(
    chosen_on: Sequence[Candidate], judged_on: Sequence[Candidate], cost: CostTable
) -> list[Pick]:
    """Return one pick per rule, the fastest on the prompts of `chosen_on` first. Both lists hold
    the same candidates, counted on different prompts."""
    judged = {(each.rule, each.threshold): each for each in judged_on}
    picked = []
    for rule in dict.fromkeys(candidate.rule for candidate in chosen_on):
        pick = best((candidate for candidate in chosen_on if candidate.rule == rule), cost)
        picked.append(Pick(pick, judged[rule, pick.threshold]))
    return sorted(picked, key=lambda pick: -speedup(pick.chosen, cost))


@dataclass(frozen=True)
class Choice:
    """The best threshold of a rule under one cost table, judged on prompts it was not chosen on.

    speculate: whether it pays on the prompts it was chosen on, i.e. the whole 95 % interval of its
    speed-up there is above 1; expected: that speed-up, modelled and, as the best of many,
    optimistic; speedup: on the prompts it is judged on, with its 95 % interval over prompts;
    regret: seconds over those of `hindsight` there, minus 1; other: the rule to compare it with,
    None if there is none; gain: the seconds of that rule over its own, paired over prompts, with
    its 95 % interval"""

    rule: str
    threshold: float
    speculate: bool
    expected: float
    speedup: float
    interval: Interval
    regret: float
    discard_rate: float
    verification_rate: float
    other: str | None = None
    gain: float = math.nan
    gain_interval: Interval = (None, None)


def choose(
    chosen_on: Sequence[Candidate], judged_on: Sequence[Candidate], cost: CostTable, least: Array
) -> list[Choice]:
    """Return one choice per rule, the one to advise first: fastest on the prompts of `chosen_on`.
    least: `hindsight` of the prompts of `judged_on`."""
    picked = picks(chosen_on, judged_on, cost)
    return judge(picked, picked, cost, least)


def judge(
    picked: Iterable[Pick], rivals: Sequence[Pick], cost: CostTable, least: Array
) -> list[Choice]:
    """Return the choices, each compared with the first of `rivals` that is another rule."""
    choices = []
    for chosen, judged in picked:
        expected, speed = over_plain(chosen, cost), over_plain(judged, cost)
        spent = cost.price(judged.counts, judged.rule)
        choice = Choice(
            judged.rule,
            judged.threshold,
            lower(expected) > 1,
            expected.value,
            speed.value,
            (speed.low, speed.high),
            float(spent.sum() / least.sum() - 1),
            *judged.rates,
        )
        rival = next((pick.judged for pick in rivals if pick.judged.rule != judged.rule), None)
        if rival is not None:
            gain = ratio(cost.price(rival.counts, rival.rule), spent)
            choice = replace(
                choice, other=rival.rule, gain=gain.value, gain_interval=(gain.low, gain.high)
            )
        choices.append(choice)
    return choices


# Bounds -------------------------------------------------------------------------------------------


KNOWING = "knows p"


def knowing(table: RolloutTable) -> Policy:
    """Return a rule that knows, once a token is drawn, the probability that all drawn tokens and
    the next one are accepted: the most that can be known before the verdict. The first token is
    always drawn."""
    reached = np.cumprod(table.accept, axis=-1, dtype=np.float64)
    reached[..., 0] = np.inf
    return Policy(reached)


def oracle_calls(differs: Sequence[bool]) -> tuple[int, int]:
    """Count draft and target calls of SpecDec++'s oracle (2405.19715, Theorem 4.1) for one greedy
    response.

    differs: [N], whether the draft's choice is not the response's token. The oracle stops drafting
    right before each such token: nothing is discarded, and each costs one target call. If the last
    token is not one of them, it takes one more call (so the theorem's |S| + 1 calls are |S| if it
    is). A last token that is an end token could be drafted, which would save no call."""
    target = sum(differs) + (not differs[-1])
    return len(differs) - target, target


def oracle_totals(table: RolloutTable) -> tuple[int, int]:
    """Sum `oracle_calls` over the responses of a greedy target."""
    rows = [table.accept[row, :length, 0] == 0 for row, length in enumerate(table.length)]
    draft, target = zip(*(oracle_calls(differs.tolist()) for differs in rows), strict=True)
    return sum(draft), sum(target)


def hindsight(replayer: Replayer, cost: CostTable) -> Array:
    """Return the least cost of each response, [B], over all choices of draft lengths that know what
    will be accepted.

    A draft beyond the accepted length costs more and commits no more, so only lengths up to it are
    tried, backwards from the end. Where a draft token is cheaper than a target call of any number
    of rows, this is the oracle of Theorem 4.1 with at most gamma_max tokens a round; elsewhere it
    may draft less, down to nothing. For a sampled target it knows the recorded verdicts.
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


# Drafts grown by value against cost ---------------------------------------------------------------


MOVES, ROUNDS = 1e-4, 40  # relative change of a rate that is not settled; most rates tried
FACTORS = [1.2**power for power in range(-6, 7)]
"""Of the rate, tried where it is tuned after all."""


@runtime_checkable
class GrowsByWorth(Asks, Protocol):
    """A structure that can be replayed. budget: most nodes of a draft."""

    budget: int

    def worth(self, table: RolloutTable) -> Worth:
        """Return the value of every draw by its predictor."""
        ...


@dataclass(frozen=True)
class Grower:
    """A structure on some prompts. Its rate, the tokens per second that a draw must exceed, is a
    fixed point: the speed that decoding reaches with the drafts grown at that rate."""

    name: str
    replayer: Replayer
    worth: Worth
    budget: int

    def at(self, cost: CostTable, rate: float) -> Candidate:
        """Return the counts of drafts grown at a rate, in tokens per second of `cost`."""
        comb = grow(self.worth, self.replayer.limit, cost, rate, self.budget)
        prompts = self.replayer.table.prompt_ids
        return Candidate(self.name, rate, self.replayer.combs(comb), prompts)

    def settled(self, cost: CostTable) -> Candidate:
        """Return the drafts at the fixed point of the rate, starting from that of plain decoding;
        the fastest tried if it does not converge. The price of a structure's questions does not
        enter its rate."""
        cost = replace(cost, calls={})
        rate = 1 / cost.autoregressive
        tried = [self.at(cost, rate)]
        for _ in range(ROUNDS):
            reached = float(tried[-1].counts["emitted"].sum()) / seconds(tried[-1], cost)
            if abs(reached - rate) < MOVES * rate:
                return tried[-1]
            rate = reached
            tried.append(self.at(cost, rate))
        return min(tried, key=lambda candidate: seconds(candidate, cost))

    def regret(self, cost: CostTable, rate: float) -> float:
        """Return the seconds at this rate over those at the best one for these prompts, minus 1."""
        spent = [seconds(self.at(cost, rate * factor), cost) for factor in FACTORS]
        return seconds(self.at(cost, rate), cost) / min(spent) - 1

    def chain(self) -> "Grower":
        """Return the same structure without leaves."""
        return replace(self, worth=self.worth.up_to(0))


def seconds(candidate: Candidate, cost: CostTable) -> float:
    return float(cost.price(candidate.counts, candidate.rule).sum())


# All that is compared -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """Some prompts, replayed. candidates: rules at thresholds; bounds: `knowing` at thresholds;
    growers: structures, by name."""

    replayer: Replayer
    candidates: Sequence[Candidate]
    bounds: Sequence[Candidate]
    growers: Mapping[str, Grower]


def sample(
    replayer: Replayer,
    candidates: Sequence[Candidate],
    structures: Mapping[str, GrowsByWorth],
    points: int,
) -> Sample:
    """Replay the bounds and structures to compare with `candidates`. points: thresholds of the
    bounds, besides 0."""
    table = replayer.table
    grid = {KNOWING: np.linspace(0, 1, points + 1).tolist()}
    bounds = sweep(replayer, {KNOWING: knowing(table)}, grid)
    growers = {
        name: Grower(name, replayer, structure.worth(table), structure.budget)
        for name, structure in structures.items()
    }
    return Sample(replayer, candidates, bounds, growers)


def settled_rates(chosen_on: Sample, cost: CostTable) -> dict[str, float]:
    """Return the rate of every structure, by name."""
    return {name: grower.settled(cost).threshold for name, grower in chosen_on.growers.items()}


def result(
    chosen_on: Sample, judged_on: Sample, cost: CostTable, rates: Mapping[str, float]
) -> dict[str, Any]:
    """Return the results for one cost table: the choices of rules, structures and bounds, and the
    regret of each structure, which has no setting besides the cost table.

    rates: of every structure, settled on the prompts of `chosen_on`."""
    least = hindsight(judged_on.replayer, cost)
    rules = picks(chosen_on.candidates, judged_on.candidates, cost)
    bounds = picks(chosen_on.bounds, judged_on.bounds, cost)
    grown = [
        Pick(*(each.growers[name].at(cost, rate) for each in (chosen_on, judged_on)))
        for name, rate in rates.items()
    ]
    untuned = {}
    for name, rate in rates.items():
        chain, grower = chosen_on.growers[name].chain(), judged_on.growers[name]
        untuned[name] = {
            "rate": rate,
            "regret": grower.regret(cost, rate),
            "chain_regret": grower.chain().regret(cost, chain.settled(cost).threshold),
        }
    by_kind = {
        kind: {choice.rule: asdict(choice) for choice in judge(picked, rules, cost, least)}
        for kind, picked in {"rules": rules, "structures": grown, "bounds": bounds}.items()
    }
    plain = float(cost.plain(judged_on.candidates[0].counts).sum())
    return {
        "cost": cost.to_dict(),
        "oracle_speedup": plain / float(least.sum()),
        "advice": next(
            (name for name, choice in by_kind["rules"].items() if choice["speculate"]), NO_ADVICE
        ),
        **by_kind,
        "untuned": untuned,
    }
