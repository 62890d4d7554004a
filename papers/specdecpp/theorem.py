"""Whether the best stop rule is a threshold on survival, on recorded rollouts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from data_gen.storage.dataset import Harvest
from papers.specdecpp.optimal_stopping import BINS, Rule, best, fixed, survival, threshold, totals
from reports.artifacts import Artifacts
from reports.figure import Builder, Cell, Entry, Figure, Missing
from reports.harvest_data import by_pair, distributions, of_each
from runtime.errors import TooFewRows
from runtime.intervals import METHOD, Array, bootstrap, columns

RATIOS = (5.0, 10.0)
NAMES = ("best by depth and survival", "one threshold on survival", "one length")
SPEED, GAIN = "tokens per draft forward's time", "over the best by depth and survival"
NEEDS = "needs a harvest of a sampled target: python scripts/gen_data.py"


@dataclass(frozen=True)
class Rollouts:
    """Of one harvest, its rounds without an end token. warps: of the target and of the draft;
    accept: [n, G], min(1, p / q); group: [n], the prompt of each."""

    warps: Any
    distributions: str
    accept: Array
    group: NDArray[np.int64]


def threshold_rules(harvests: Sequence[Harvest]) -> Figure:
    """Harvests of one pair, those of the same distributions together."""
    sampled = [one for one in harvests if one.warps.target.temperature]
    if not sampled:
        raise Missing(NEEDS)
    found = of_each(sampled, _rollouts)
    warps = [one.warps for one in found]
    first = [one for place, one in enumerate(found) if one.warps not in warps[:place]]
    alike = [[other for other in found if other.warps == one.warps] for one in first]
    rows = [row for each in alike for row in _rows(each)]
    prompts = sum(len(np.unique(one.group)) for one in found)
    rounds = sum(len(one.accept) for one in found)
    return Figure(
        name="threshold-rules",
        title="Whether the best stop rule is a threshold on survival",
        source="SpecDec++, theorem 4.3",
        kind="modelled",
        n=f"{harvests[0].pair.name}, {prompts:,} prompts, {rounds:,} rounds",
        interval=METHOD,
        columns=["temperatures", "target call, draft forwards", "rule", *columns(SPEED)]
        + [*columns(GAIN), "threshold or length"],
        rows=rows,
    )


def _rollouts(harvest: Harvest) -> Rollouts:
    """Raises TooFewRows where there are not two prompts of them for each half."""
    records = harvest.rounds("all", ("drafted", "accept_prob"))
    accept, group = records["accept_prob"].double(), records["group"]
    whole = records["drafted"] == accept.shape[1]
    if len(torch.unique(group[whole])) < 4:
        raise TooFewRows("data: there are no four prompts with whole rounds. Harvest more prompts")
    return Rollouts(
        harvest.warps, distributions(harvest), accept[whole].numpy(), group[whole].numpy()
    )


def _rows(alike: Sequence[Rollouts]) -> Iterator[list[Cell]]:
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
        settings = [None, _first(rules[1]) / BINS, int(rules[2].go_on[:, 0].sum())]
        for name, setting, sums in zip(NAMES, settings, judged, strict=True):
            speed = bootstrap(partial(_ratio, sums), len(sums))
            gain = bootstrap(partial(_gain, sums, judged[0]), len(sums))
            yield [alike[0].distributions, ratio, name, *speed, *gain, setting]


def _first(rule: Rule) -> int:
    """The lowest bin from which on it draws another token."""
    return BINS - int(rule.go_on[0].sum())


def _by_prompt(rule: Rule, survived: Array, group: Array, ratio: float) -> Array:
    """[prompts, 2]: tokens and time."""
    _, prompt = np.unique(group, return_inverse=True)
    parts = totals(rule.go_on, survived, ratio)
    return np.stack([np.bincount(prompt, part) for part in parts], -1)


def _ratio(sums: Array, times: Array) -> Array:
    found = times @ sums
    ratio: Array = found[..., 0] / found[..., 1]
    return ratio


def _gain(sums: Array, others: Array, times: Array) -> Array:
    return _ratio(sums, times) / _ratio(others, times)


def _builders(artifacts: Artifacts) -> list[Builder]:
    """One for each pair."""
    return [partial(threshold_rules, harvests) for harvests in by_pair(artifacts.harvests) or [[]]]


FIGURES = (
    Entry(
        "Whether the best stop rule is a threshold on survival",
        "Rules that are told with which probability all tokens drawn so far are accepted, found on"
        " one half of the prompts and judged on the other; every recorded round counts once. The"
        " first looks at depth and survival (in 20 bins), found by dynamic programming; where one"
        " threshold does as well, the theorem holds on these rounds. How far a length is behind"
        " is all that such knowledge can be worth.",
        _builders,
    ),
)
