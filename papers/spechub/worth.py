"""The value of second and third candidates of a position, from recorded rollouts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_gen.storage.dataset import Harvest
from data_gen.verdicts import NEGLIGIBLE
from evaluation.table import divided
from predictors.base import Records
from reports.artifacts import grouped
from reports.figure import Entry, Figure, Record, each, estimated
from reports.harvest_data import NEEDS, NO_VERDICT, by_pair, distributions, of_each
from runtime.errors import TooFewRows
from runtime.intervals import Array, bootstrap

CANDIDATES = ("first", "second", "third")
ANY = "one of them"


@dataclass(frozen=True)
class Worth:
    """The value of candidates in one harvest. warps: of the target and of the draft; tokens: number
    with positive weight; sums: by sibling law and candidate, [prompts, 2] each: the weight of the
    positions at which that candidate is the accepted one, and of all positions."""

    warps: Any
    distributions: str
    tokens: int
    sums: Mapping[tuple[str, str], Array]


def sibling_worth(harvests: Sequence[Harvest]) -> Figure:
    """Return the figure of harvests of one pair, those of the same distributions together."""
    measured = of_each(harvests, worth)
    alike = grouped(measured, lambda one: one.warps)
    prompts = sum(len(next(iter(one.sums.values()))) for one in measured)
    tokens = sum(one.tokens for one in measured)
    return Figure(
        name="sibling-worth",
        title="What siblings are worth",
        source="SpecHub, tables 1 to 3: acceptance of the first and second draft, over all steps",
        kind="measured",
        n=f"{harvests[0].pair.name}, {prompts:,} prompts, {tokens:,} draft tokens",
        records=[record for several in alike for record in _accepted(several)],
    )


def worth(harvest: Harvest) -> Worth:
    """Return the values in one harvest: a position of a rollout is weighted by the probability that
    the path to it is accepted. Raises TooFewRows if all weights are 0."""
    names = ["known", "drafted", "accept_prob", "q_drawn"]
    names += ["rrsw_accept", "hub_accept", "top_accept"]
    records = harvest.rounds("all", names)
    path, first = _reached(records), records["accept_prob"].double()
    if not path.any():
        raise TooFewRows(NO_VERDICT)
    beside = records["rrsw_accept"].double()
    accepted = {
        "RRS": torch.stack([first, _with_replacement(beside, records["q_drawn"].double())], -1),
        "RRSw": torch.cat([first[..., None], beside], -1),
        "SpecHub": records["hub_accept"].double(),
        "point masses": records["top_accept"].double(),
    }
    sums = {
        (law, candidate): _by_prompt(torch.stack(both, -1).sum(1), records["group"])
        for law, accept in accepted.items()
        for candidate, *both in _each(path, accept)
    }
    return Worth(harvest.warps, distributions(harvest), int((path > 0).sum()), sums)


def _reached(records: Records) -> Tensor:
    """Return the probability that all tokens before are accepted, [rounds, gamma]; 0 where the
    target was not run."""
    accept = records["accept_prob"].double()
    before = torch.cat([torch.ones_like(accept[:, :1]), accept.cumprod(1)[:, :-1]], 1)
    most = torch.minimum(records["drafted"], records["known"])[:, None]
    asked = (torch.arange(accept.shape[1]) < most) & (before >= NEGLIGIBLE)
    return torch.where(asked, before, 0.0)


def _with_replacement(accept: Tensor, q: Tensor) -> Tensor:
    """Return the acceptance of an i.i.d. second candidate if the first is rejected, [rounds,
    gamma], from that of one drawn without replacement.

    accept: [rounds, gamma, 2], of the latter, whose first entry is min(1, r (1 - q) / q') for the
    residual r and q' of its token; q: [rounds, gamma], of the first candidate. An i.i.d. draw is
    the first candidate again with probability q, and is then rejected again; else it is distributed
    like the draw without replacement, accepted with probability min(1, r / q')."""
    return torch.minimum(accept[..., 0], 1 - q)


def _each(path: Tensor, accept: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield for every candidate, and for any of them, the weight [rounds, gamma] of its being the
    accepted one, and the weight of the position. accept: [rounds, gamma, k], of each given that
    those before it are rejected."""
    left = path
    for candidate, chance in zip(CANDIDATES, accept.unbind(-1), strict=False):
        yield candidate, left * chance, path
        left = left * (1 - chance)
    yield ANY, path - left, path


def _by_prompt(sums: Tensor, group: Tensor) -> Array:
    """Return [prompts, 2], the sums of [rounds, 2]."""
    _, prompt = torch.unique(group, return_inverse=True)
    measured = torch.zeros(int(prompt.max()) + 1, sums.shape[1], dtype=torch.float64)
    return measured.index_add_(0, prompt, sums).numpy()


def _accepted(alike: Sequence[Worth]) -> Iterator[Record]:
    for law, candidate in alike[0].sums:
        table = np.concatenate([one.sums[law, candidate] for one in alike])
        yield {
            **{"temperatures": alike[0].distributions, "candidates": law, "candidate": candidate},
            **estimated("accepted", bootstrap(partial(_share, table), len(table))),
        }


def _share(table: Array, times: Array) -> Array:
    sums = times @ table
    share: Array = divided(sums[..., 0], sums[..., 1])
    return share


FIGURES = (
    Entry(
        "What siblings are worth",
        "The probability that a candidate is the one that is accepted: its elder ones are rejected,"
        " and it is not, so that the rows of a rule add up to the last one; positions weigh as much"
        " as the path to them is likely to be accepted. From first to one of them is what further"
        " rows of the target's call can buy. Point masses are the draft's most probable tokens; a"
        " greedy draft has no second candidate under the other rules.",
        lambda artifacts: each(by_pair(artifacts.harvests), sibling_worth, NEEDS),
    ),
)
