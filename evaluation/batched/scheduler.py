"""The scheduler of serving engines, simulated: requests decoded together share a budget of rows.

In every step every request drafts the same number of tokens; a policy says how many of them are
verified. Serving engines use the budget of most expected tokens per second, give it to the
positions of highest survival (the probability that the draft up to there is accepted), and discard
tokens drawn beyond. The gain over one length for all depends on the confidences from which survival
is computed: as logged, calibrated, or known (the oracle).

**Exactness.** Greedy target and draft: all policies are exact, since the text is the target's
choice, however much of a draft is verified. Sampled: whether a token is verified must not depend on
that token. `Budget` therefore is *not* exact, as the engines' are not: survival through a position
is computed with the token there (a draw of low probability is cut off, which changes the
distribution of the output), and the budget of a step depends on all its draws. It is exact in
sampled mode only if a position competes with the survival through the position *before* it
(`before`), and the budget was settled without this step's draws (`lag` of a step or more): later
positions of the same draft rank below it, so nothing that its token decides can push it out, and
other requests are independent. The tests enumerate two requests of two drafted tokens. Simulated
tokens per second of other settings belong to a text that does not have the target's
distribution.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import pandas as pd
import torch
from hydra.utils import instantiate
from numpy.typing import NDArray
from omegaconf import DictConfig
from torch import Tensor

from data_gen.storage.dataset import Harvest
from decoding.batch_cost import BatchCost
from decoding.stopping.rollout_table import RolloutTable
from evaluation.replay.read import replayer
from evaluation.table import markdown, over, prompts, ratio, with_interval
from evaluation.table import table as measurements
from predictors.calibration import Calibration
from predictors.confidences.maps import PositionMaps, fit_maps
from predictors.confidences.table import Confidences, table
from runtime.intervals import Estimate

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
LEAST = 1e-6  # survival below which the engines verify nothing
NOTHING = -1.0  # in place of a survival where no token is drafted


class Policy(Protocol):
    def lengths(self, survival: Array) -> Ints:
        """Return the number of tokens to verify of each draft, [R]. survival: [R, gamma], predicted
        survival, `NOTHING` where no token is drafted."""


@dataclass(frozen=True)
class FixedLength:
    length: int

    def lengths(self, survival: Array) -> Ints:
        return np.full(len(survival), self.length)


class Budget:
    """SGLang's policy: b = argmax (R + sum of the b largest survivals) / seconds(R + b) tokens,
    those of largest survival (dspark_planner.py); ties by position, then request.

    seconds: [R gamma + 1], of a step by the number of draft tokens verified; lag: age in steps of
    the survivals that settle the budget (SGLang: 2; before any is known, all are 1); before:
    positions compete with the survival through the position before them"""

    def __init__(self, seconds: Array, lag: int = 0, before: bool = False) -> None:
        self.seconds, self.lag, self.before = seconds, lag, before
        self._past: list[Array] = []

    def lengths(self, survival: Array) -> Ints:
        if self.before:
            ahead = np.concatenate([np.ones((len(survival), 1)), survival[:, :-1]], 1)
            survival = np.where(survival == NOTHING, NOTHING, ahead)
        self._past = [*self._past, survival][-self.lag - 1 :]
        settles = self._past[0] if len(self._past) > self.lag else np.ones_like(survival)
        return filled(survival, best_budget(settles, self.seconds))


def best_budget(survival: Array, seconds: Array) -> int:
    """Return the number of draft tokens to verify in a step for most expected tokens per second.
    survival: [R, gamma]; seconds: [R gamma + 1]."""
    ranked = np.sort(survival[survival >= LEAST])[::-1]
    expected = len(survival) + np.concatenate([[0.0], np.cumsum(ranked)])
    return int(np.argmax(expected / seconds[: len(expected)]))


def filled(survival: Array, budget: int) -> Ints:
    """Count the tokens of each draft, [R], among the `budget` of highest survival [R, gamma], which
    must not rise along a draft, so that they are a prefix of it."""
    requests, gamma = survival.shape
    order = np.argsort(-survival.T.ravel(), kind="stable")[:budget]  # by position, then request
    return np.bincount(order % requests, minlength=requests)


@dataclass(frozen=True)
class Texts:
    """Responses to N prompts. accept, confidence: [N, T, gamma], the probability that a token is
    accepted given those before it, and its prediction; most: [N, T], tokens drafted; length:
    [N]"""

    accept: Array
    confidence: Array
    most: Ints
    length: Ints


@dataclass(frozen=True)
class Served:
    """Totals of each prompt, [N]: tokens committed, and its share (1 / R) of the steps' seconds."""

    tokens: Array
    seconds: Array

    @property
    def rate(self) -> float:
        """Tokens per second of all requests together."""
        return float(self.tokens.sum() / self.seconds.sum())


def step_seconds(cost: BatchCost, requests: int, gamma: int, drafted: int) -> Array:
    """Return the seconds of a step by the number of draft tokens verified, [R gamma + 1], when
    every request draws `drafted` tokens."""
    rows = range(requests, requests * (gamma + 1) + 1)
    drafting = drafted * cost.draft(requests)
    return np.array([cost.target(requests, count) + drafting for count in rows])


def serve(
    texts: Texts, policy: Policy, seconds: Array, requests: int, rounds: int, seed: int = 0
) -> Served:
    """Serve `requests` at once for at least `rounds` answers of every prompt. Slots take prompts in
    turn; a slot that finishes takes the next. The accept draws of a position of the n-th answer are
    the same for all policies (common random numbers). seconds: `step_seconds` for this many
    requests."""
    count, gamma = len(texts.length), texts.accept.shape[-1]
    answers = max(rounds * count, 4 * requests)
    coins = np.random.default_rng(seed).random((answers, *texts.accept.shape[1:]))
    answer, start, following = np.arange(requests), np.zeros(requests, np.int64), requests
    tokens, spent, column = np.zeros(count), np.zeros(count), np.arange(gamma)
    while following < answers:
        prompt = answer % count
        most = texts.most[prompt, start]
        can = column < most[:, None]
        survival = np.where(can, texts.confidence[prompt, start].cumprod(1), NOTHING)
        length = np.minimum(policy.lengths(survival), most)
        right = coins[answer, start] < texts.accept[prompt, start]
        accepted = (right & (column < length[:, None])).cumprod(1).sum(1)
        committed = np.minimum(accepted + 1, texts.length[prompt] - start)
        np.add.at(tokens, prompt, committed)
        np.add.at(spent, prompt, seconds[length.sum()] / requests)
        start = start + accepted + 1
        done = np.flatnonzero(start >= texts.length[prompt])
        fresh = min(len(done), answers - following)
        if fresh < len(done):
            break
        answer[done] = np.arange(following, following + fresh)
        start[done], following = 0, following + fresh
    return Served(tokens, spent)


# Confidences for the scheduler --------------------------------------------------------------------


LOGGED, POSITION, ORACLE = "as logged", "position alone", "oracle"
Maps = Mapping[str, PositionMaps | None]
"""Calibrations by name; None: nothing is fitted, so that nothing is told."""


def confidences(rounds: RolloutTable, gamma: int) -> Confidences:
    """Return the draft's own probability of each of the first `gamma` tokens of every round, as
    log-odds; labels are expected. Prompts are the groups."""
    inside = torch.from_numpy(np.arange(rounds.tokens.shape[1]) < rounds.length[:, None])
    labels = torch.from_numpy(rounds.accept[..., :gamma]).double().cumprod(-1)
    length = torch.from_numpy(rounds.limit(gamma))
    group = torch.arange(len(rounds.length))[:, None].expand_as(inside)
    columns = (logits(rounds, gamma), labels, length, group)
    return table("data", "harvest", *(each[inside] for each in columns))


def logits(rounds: RolloutTable, gamma: int) -> Tensor:
    """Return the log-odds of confidences, [B, T, gamma]."""
    return torch.logit(torch.from_numpy(rounds.confidence[..., :gamma]).double(), 1e-7)


def by_position(rows: Confidences) -> PositionMaps:
    """Return maps that ignore confidences: the acceptance rate of the tokens that are reached, at
    each position. A gain over them is due to the confidences of single drafts, and not to a budget
    that, unlike one length, need not be a multiple of the requests."""
    inside = torch.arange(rows.gamma) < rows.length[:, None]
    accepted, came = ((each * inside).sum(0) for each in (rows.labels, rows.before()))
    odds = torch.logit(accepted / came.clamp_min(1e-9), 1e-7).tolist()
    constants = (Calibration("constant", scale=(0.0, 0.0), bias=(0.0, each)) for each in odds)
    return PositionMaps(tuple(constants))


def calibrated(cfg: DictConfig, rounds: RolloutTable, gamma: int) -> Maps:
    """Fit the maps as train.py fits the calibrations of imported confidences."""
    rows, maps = confidences(rounds, gamma), dict[str, PositionMaps | None]()
    maps[POSITION] = by_position(rows)
    for name, each in cfg.calibrations.items():
        fit, sts = instantiate(each.fit), instantiate(each.sequential)
        fitted = fit is not None or sts is not None
        maps[str(name)] = fit_maps(rows, fit, sts, each.survival) if fitted else None
    return maps


def told(rounds: RolloutTable, gamma: int, maps: Maps) -> dict[str, Array]:
    """Return P(a token is accepted, if those before it are), [B, T, gamma], by its source: the
    draft's probability as logged, each of `maps`, and min(1, p/q) itself (the oracle)."""
    z = logits(rounds, gamma)
    confidence = {LOGGED: rounds.confidence[..., :gamma].astype(np.float64)}
    for name, each in maps.items():
        if each is not None:
            survival = each.surviving(z.reshape(-1, gamma))
            confidence[name] = conditional(survival).reshape(z.shape).numpy()
    return {**confidence, ORACLE: rounds.accept[..., :gamma].astype(np.float64)}


def conditional(survival: Tensor) -> Tensor:
    """Return c_i of the survival of prefixes, both [n, gamma]; 0 where none is left."""
    before = torch.cat([torch.ones_like(survival[:, :1]), survival[:, :-1]], 1)
    return torch.where(before > 0, survival / before.clamp_min(1e-300), 0.0).clamp_max(1)


# Ways to spend the rows of a step -----------------------------------------------------------------


PLAIN, FIXED = "no draft", "one length"
RATE = ("emitted", "modelled")  # tokens per second of all requests together
STALE = 2  # steps, as in SGLang
ROUNDS = 4  # answers of every prompt, at least


@dataclass(frozen=True)
class Way:
    """A way to spend the rows of a step. confidences: those that fill a budget, "" for none; lag:
    their age in steps when they settle its size; drafted: tokens of every request"""

    name: str
    confidences: str = ""
    lag: int = 0
    drafted: int = 0


class Simulation:
    """A number of requests served at once, from the prompts of one table. maps: as in `told`"""

    def __init__(
        self, rounds: RolloutTable, maps: Maps, cost: BatchCost, requests: int, gamma: int
    ) -> None:
        self.rounds, self.requests, self.gamma = rounds, requests, gamma
        self.limit, self.told = rounds.limit(gamma), told(rounds, gamma, maps)
        self.seconds = [step_seconds(cost, requests, gamma, count) for count in range(gamma + 1)]

    def served(self, way: Way) -> Served:
        accept, drafted = self.told[ORACLE], np.minimum(self.limit, way.drafted)
        texts = Texts(accept, self.told[way.confidences or ORACLE], drafted, self.rounds.length)
        seconds = self.seconds[way.drafted]
        policy = Budget(seconds, way.lag) if way.confidences else FixedLength(way.drafted)
        return serve(texts, policy, seconds, self.requests, ROUNDS)

    def ways(self) -> list[Way]:
        """Return the ways to compare, each with its fastest number of drafted tokens (the fewest of
        equals); stale budgets with that of fresh ones, so that only their age differs."""
        ways = [Way(PLAIN), self._best(Way(FIXED), 0)]
        for name in self.told:
            fresh = self._best(Way(f"budget, {name}", name), 1)
            stale = replace(fresh, name=f"{fresh.name}, {STALE} steps old", lag=STALE)
            ways += [fresh, stale]
        return ways

    def _best(self, way: Way, least: int) -> Way:
        each = [replace(way, drafted=count) for count in range(least, self.gamma + 1)]
        return max(each, key=lambda way: self.served(way).rate)

    def measured(self, ways: Sequence[Way]) -> pd.DataFrame:
        """Return the measurements of these ways, all modelled."""
        parts = []
        for way in ways:
            served = self.served(way)
            columns = {
                "prompt": list(self.rounds.prompt_ids),
                "emitted": served.tokens,
                "modelled": served.seconds,
            }
            facts = {"confidences": way.confidences, "lag": way.lag, "setting": way.drafted}
            rows = pd.DataFrame(columns).assign(policy=way.name, requests=self.requests, **facts)
            parts.append(rows)
        return measurements("expected", pd.concat(parts, ignore_index=True))


def simulated(
    cfg: DictConfig, harvests: Sequence[Harvest], cost: BatchCost, gamma: int
) -> dict[str, pd.DataFrame]:
    """Return measurements by the data they are judged on. Lengths and calibrations are chosen on
    the `choose` prompts of the first harvest; the other harvests are judged on as a whole."""

    def rounds(harvest: Harvest, split: str) -> RolloutTable:
        return replayer(cfg, gamma, harvest, split).table

    home, *elsewhere = harvests
    chosen_on = rounds(home, cfg.choose)
    maps = calibrated(cfg, chosen_on, gamma)
    ways = {size: Simulation(chosen_on, maps, cost, size, gamma).ways() for size in cfg.batch}
    tables = {f"{cfg.data}, {cfg.judge} prompts": rounds(home, cfg.judge)}
    tables |= {str(other.folder): rounds(other, "all") for other in elsewhere}
    by_prompts = {}
    for name, judged_on in tables.items():
        parts = [
            Simulation(judged_on, maps, cost, size, gamma).measured(each)
            for size, each in ways.items()
        ]
        by_prompts[name] = pd.concat(parts, ignore_index=True)
    return by_prompts


def compared(measurements: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a row for each number of requests and way: tokens_per_second of all requests together,
    and its ratios over_fixed: to one length for all; over_logged: to the budget filled by
    confidences as logged, of the same age (fresh for ways without a budget); over_fresh: to the
    same way with fresh confidences. Intervals over prompts, paired."""
    rows = []
    for requests, part in measurements.groupby("requests", sort=False):
        ways = {
            (first["confidences"] or name, first["lag"]): (name, first, served)
            for name, group in part.groupby("policy", sort=False)
            for first in [group.iloc[0]]
            for served in [prompts(group, *RATE)]
        }
        for (source, lag), (name, first, mine) in ways.items():
            row = {"requests": int(requests), "name": name, "confidences": first["confidences"]}
            row |= {"lag": int(lag), "drafted": int(first["setting"])}
            row["tokens_per_second"] = ratio(part[part["policy"] == name], *RATE)
            row["over_fixed"] = over(mine, ways[FIXED, 0][2], *RATE)
            row["over_logged"] = over(mine, ways[LOGGED, lag][2], *RATE)
            row["over_fresh"] = over(mine, ways[source, 0][2], *RATE)
            rows.append(row)
    return rows


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table; intervals are of 95 % over prompts, paired."""

    def written(gain: Estimate) -> str:
        same = gain[1:] == (1, 1)  # the same in every step
        return "1" if same else with_interval(gain, ".3f")

    lines = [
        [
            *(str(row[key]) for key in ("requests", "name", "drafted")),
            f"{row['tokens_per_second'].value:.1f}",
            *(written(row[key]) for key in ("over_fixed", "over_logged", "over_fresh")),
        ]
        for row in rows
    ]
    header = ["requests", "rows go by", "drafted", "tokens/s", "over one length"]
    return markdown([*header, "over as logged", "over fresh"], lines)
