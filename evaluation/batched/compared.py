"""What a shared budget of rows is worth over one length for all, by what it is filled by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor

from data_gen.storage.dataset import Harvest
from decoding.batch_cost import BatchCost
from decoding.stopping.rollout_table import Array, RolloutTable
from evaluation.batched.scheduler import Budget, FixedLength, Served, Texts, serve, step_seconds
from evaluation.replay.candidates import replayer
from evaluation.replay.tuning import span
from evaluation.table import markdown, over, prompts, ratio
from evaluation.table import table as measurements
from predictors.calibration import Calibration, Fit
from predictors.confidences.maps import PositionMaps, fit_maps
from predictors.confidences.sts import Sts
from predictors.confidences.table import Confidences, table
from runtime.intervals import Estimate

LOGGED, POSITION, ORACLE = "as logged", "position alone", "oracle"


def confidences(rounds: RolloutTable, gamma: int) -> Confidences:
    """The draft's own probability of each of the first `gamma` tokens of every round, as log-odds;
    labels are expected. Prompts are the groups."""
    inside = torch.from_numpy(np.arange(rounds.tokens.shape[1]) < rounds.length[:, None])
    labels = torch.from_numpy(rounds.accept[..., :gamma]).double().cumprod(-1)
    length = torch.from_numpy(rounds.limit(gamma))
    group = torch.arange(len(rounds.length))[:, None].expand_as(inside)
    columns = (logits(rounds, gamma), labels, length, group)
    return table("data", "harvest", *(each[inside] for each in columns))


def fitted(
    rows: Confidences, fit: Fit | None, sts: Sts | None, survival: bool
) -> PositionMaps | None:
    """As train.py fits the calibrations of imported confidences; None where nothing is fitted."""
    return None if fit is None and sts is None else fit_maps(rows, fit, sts, survival)


def by_position(rows: Confidences) -> PositionMaps:
    """Maps that look at no confidence: how many of the tokens that are reached are accepted, at
    each position. What is gained beyond them is what confidences know of single drafts; not that a
    budget, unlike one length, need not be a multiple of the requests."""
    inside = torch.arange(rows.gamma) < rows.length[:, None]
    accepted, came = ((each * inside).sum(0) for each in (rows.labels, rows.before()))
    odds = torch.logit(accepted / came.clamp_min(1e-9), 1e-7).tolist()
    constants = (Calibration("constant", scale=(0.0, 0.0), bias=(0.0, one)) for one in odds)
    return PositionMaps(tuple(constants))


def said(
    rounds: RolloutTable, gamma: int, maps: Mapping[str, PositionMaps | None]
) -> dict[str, Array]:
    """By who says it: P(a token is accepted, if those before it are), [B, T, gamma]: the draft's
    probability as logged, by each of `maps`, and min(1, p/q) itself (the oracle)."""
    z = logits(rounds, gamma)
    found = {LOGGED: rounds.confidence[..., :gamma].astype(np.float64)}
    for name, one in maps.items():
        if one is not None:
            found[name] = conditional(one.surviving(z.reshape(-1, gamma))).reshape(z.shape).numpy()
    return {**found, ORACLE: rounds.accept[..., :gamma].astype(np.float64)}


def logits(rounds: RolloutTable, gamma: int) -> Tensor:
    """[B, T, gamma]"""
    return torch.logit(torch.from_numpy(rounds.confidence[..., :gamma]).double(), 1e-7)


def conditional(survival: Tensor) -> Tensor:
    """c_i of the survival of prefixes, both [n, gamma]; 0 where none is left."""
    before = torch.cat([torch.ones_like(survival[:, :1]), survival[:, :-1]], 1)
    return torch.where(before > 0, survival / before.clamp_min(1e-300), 0.0).clamp_max(1)


# Confidences that fill a budget -------------------------------------------------------------------


PLAIN, FIXED = "no draft", "one length"
RATE = ("emitted", "modelled")  # tokens per second of all requests together
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
) -> pd.DataFrame:
    """Return the measurements of those of `chosen` on other prompts, all of it modelled."""
    parts = []
    for requests, each in ways.items():
        simulation = Simulation(rounds, maps, cost, requests, gamma)
        for way in each:
            served = simulation.served(way)
            columns = {
                "prompt": list(rounds.prompt_ids),
                "emitted": served.tokens,
                "modelled": served.seconds,
            }
            facts = {"confidences": way.confidences, "lag": way.lag, "setting": way.drafted}
            rows = pd.DataFrame(columns).assign(policy=way.name, requests=requests, **facts)
            parts.append(rows)
    return measurements("expected", pd.concat(parts, ignore_index=True))


def compared(measurements: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a row for each number of requests and way: tokens_per_second of all requests together;
    over_fixed: that over one length for all; over_logged: over the budget filled by confidences as
    logged, of the same age (a fresh one for what has no budget); over_fresh: over the same with
    fresh confidences. Intervals over prompts, paired."""
    rows = []
    for requests, part in measurements.groupby("requests", sort=False):
        ways = {
            (first["confidences"] or name, first["lag"]): (name, first, served)
            for name, group in part.groupby("policy", sort=False)
            for first in [group.iloc[0]]
            for served in [prompts(group, *RATE)]
        }
        for (source, lag), (name, first, mine) in ways.items():
            others = {
                "over_fixed": (FIXED, 0),
                "over_logged": (LOGGED, lag),
                "over_fresh": (source, 0),
            }
            facts = {
                "requests": int(requests),
                "name": name,
                "confidences": first["confidences"],
                "lag": int(lag),
                "drafted": int(first["setting"]),
                "tokens_per_second": ratio(part[part["policy"] == name], *RATE),
            }
            rows.append(
                facts | {what: over(mine, ways[key][2], *RATE) for what, key in others.items()}
            )
    return rows


# Of tune.py, with scheduler=true ------------------------------------------------------------------


def simulated(
    cfg: DictConfig, harvests: Sequence[Harvest], cost: BatchCost, gamma: int
) -> dict[str, pd.DataFrame]:
    """Return measurements by what is judged on. Lengths and calibrations are of the `choose`
    prompts of the first of the harvests, the others are judged on whole."""

    def rounds(harvest: Harvest, split: str) -> RolloutTable:
        return replayer(cfg, gamma, harvest, split, []).table

    home, *elsewhere = harvests
    known = rounds(home, cfg.choose)
    maps = calibrated(cfg, known, gamma)
    ways = chosen(known, maps, cost, cfg.batch, gamma)
    tables = {f"{cfg.data}, {cfg.judge} prompts": rounds(home, cfg.judge)}
    tables |= {str(other.folder): rounds(other, "all") for other in elsewhere}
    return {name: judged(table, maps, cost, ways, gamma) for name, table in tables.items()}


def calibrated(
    cfg: DictConfig, rounds: RolloutTable, gamma: int
) -> Mapping[str, PositionMaps | None]:
    rows = confidences(rounds, gamma)
    return {POSITION: by_position(rows)} | {
        str(name): fitted(rows, instantiate(one.fit), instantiate(one.sequential), one.survival)
        for name, one in cfg.calibrations.items()
    }


def facts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what the file of a schedule says of each way."""
    return [
        {
            key: value._asdict() if isinstance(value, Estimate) else value
            for key, value in row.items()
        }
        for row in rows
    ]


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table; intervals are of 95 % over prompts, paired."""
    ratios = ("over_fixed", "over_logged", "over_fresh")
    lines = [
        [
            *(str(row[key]) for key in ("requests", "name", "drafted")),
            f"{row['tokens_per_second'].value:.1f}",
            *(written(row[key]) for key in ratios),
        ]
        for row in rows
    ]
    header = ["requests", "rows go by", "drafted", "tokens/s", "over one length"]
    return markdown([*header, "over as logged", "over fresh"], lines)


def written(ratio: Estimate) -> str:
    same = ratio[1:] == (1, 1)  # step by step
    return "1" if same else f"{ratio.value:.3f} ({span(ratio[1:])})"
