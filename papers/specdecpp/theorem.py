"""Test whether the best stop rule is a threshold on survival, on recorded rollouts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from data_gen.storage.dataset import Harvest
from papers.specdecpp.optimal_stopping import BINS, Rule, best, fixed, survival, threshold, totals
from reports.artifacts import grouped
from reports.figure import Entry, Figure, Missing, Record, each, estimated
from reports.harvest_data import by_pair, distributions, of_each
from runtime.errors import TooFewRows
from runtime.intervals import Array, bootstrap

RATIOS = (5.0, 10.0)
NAMES = ("best by depth and survival", "one threshold on survival", "one length")
SPEED, GAIN = "tokens per draft forward's time", "over the best by depth and survival"
NEEDS = "needs a harvest of a sampled target: python scripts/gen_data.py"


@dataclass(frozen=True)
class Rollouts:
    """The rounds of one harvest without an end token. warps: of the target and of the draft;
    accept: [n, G], min(1, p / q); group: [n], the prompt of each."""

    warps: Any
    distributions: str
    accept: Array
    group: NDArray[np.int64]


def threshold_rules(harvests: Sequence[Harvest]) -> Figure:
    """Return the figure of harvests of one pair, those of the same distributions together."""
    sampled = [one for one in harvests if one.warps.target.temperature]
    if not sampled:
        raise Missing(NEEDS)
    recorded = of_each(sampled, _rollouts)
    alike = grouped(recorded, lambda rollouts: rollouts.warps)
    prompts = sum(len(np.unique(one.group)) for one in recorded)
    rounds = sum(len(one.accept) for one in recorded)
    return Figure(
        name="threshold-rules",
        title="Whether the best stop rule is a threshold on survival",
        source="SpecDec++, theorem 4.3",
        kind="modelled",
        n=f"{harvests[0].pair.name}, {prompts:,} prompts, {rounds:,} rounds",
        records=[record for rollouts in alike for record in _judged(rollouts)],
    )


def _rollouts(harvest: Harvest) -> Rollouts:
    """Read the rounds of a harvest. Raises TooFewRows if there are fewer than two prompts for each
    half."""
    records = harvest.rounds("all", ("drafted", "accept_prob"))
    accept, group = records["accept_prob"].double(), records["group"]
    whole = records["drafted"] == accept.shape[1]
    if len(torch.unique(group[whole])) < 4:
        raise TooFewRows("data: there are no four prompts with whole rounds. Harvest more prompts")
    return Rollouts(
        harvest.warps, distributions(harvest), accept[whole].numpy(), group[whole].numpy()
    )


def _judged(alike: Sequence[Rollouts]) -> Iterator[Record]:
    depth = min(one.accept.shape[1] for one in alike)
    survived = survival(np.concatenate([one.accept[:, :depth] for one in alike]))
    starts = np.cumsum([0, *(one.group.max() + 1 for one in alike)])
    group = np.concatenate([one.group + at for one, at in zip(alike, starts, strict=False)])
    chosen_on = np.unique(group, return_inverse=True)[1] % 2 == 0
    for ratio in RATIOS:
        rules = [find(survived[chosen_on], ratio) for find in (best, threshold, fixed)]
        judged = [
            _by_prompt(rule, survived[~chosen_on], group[~chosen_on], ratio) for rule in rules
        ]
        lowest = BINS - int(rules[1].go_on[0].sum())  # lowest bin in which another token is drawn
        settings = [None, lowest / BINS, int(rules[2].go_on[:, 0].sum())]
        for name, setting, sums in zip(NAMES, settings, judged, strict=True):
            yield {
                "temperatures": alike[0].distributions,
                "target call, draft forwards": ratio,
                "rule": name,
                **estimated(SPEED, bootstrap(partial(_ratio, sums), len(sums))),
                **estimated(GAIN, bootstrap(partial(_gain, sums, judged[0]), len(sums))),
                "threshold or length": setting,
            }


def _by_prompt(rule: Rule, survived: Array, group: Array, ratio: float) -> Array:
    """Return [prompts, 2]: tokens and time."""
    _, prompt = np.unique(group, return_inverse=True)
    parts = totals(rule.go_on, survived, ratio)
    return np.stack([np.bincount(prompt, part) for part in parts], -1)


def _ratio(sums: Array, times: Array) -> Array:
    recorded = times @ sums
    ratio: Array = recorded[..., 0] / recorded[..., 1]
    return ratio


def _gain(sums: Array, others: Array, times: Array) -> Array:
    return _ratio(sums, times) / _ratio(others, times)


FIGURES = (
    Entry(
        "Whether the best stop rule is a threshold on survival",
        "Rules that are told with which probability all tokens drawn so far are accepted, found on"
        " one half of the prompts and judged on the other; every recorded round counts once. The"
        " first looks at depth and survival (in 20 bins), found by dynamic programming; where one"
        " threshold does as well, the theorem holds on these rounds. How far a length is behind"
        " is all that such knowledge can be worth.",
        lambda artifacts: each(by_pair(artifacts.harvests), threshold_rules, NEEDS),
    ),
)
