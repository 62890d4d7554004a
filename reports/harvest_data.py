"""What figures are drawn from, read from harvests."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from data_gen.storage.dataset import Harvest
from predictors.base import Records
from reports.artifacts import Artifacts
from reports.figure import Missing
from runtime.errors import TooFewRows

Read = TypeVar("Read")
DRAWN = ("known", "drafted", "accepted", "q", "q_max", "q_entropy", "accept_prob")


@dataclass(frozen=True)
class DraftTokens:
    """Draft tokens with a verdict: of each round those accepted and the first one rejected. Columns
    [n].

    pair, dataset: names; temperature, draft_temperature: of the distributions that were sampled
    from
    q: of the drawn token under the distribution it was drawn from; where the draft is greedy, what
    it has at temperature 1. max_q, entropy (nats): of the draft at temperature 1. accept: min(1,
    p/q); accepted: whether it was; group: prompt"""

    pair: str
    dataset: str
    temperature: float
    draft_temperature: float
    q: Tensor
    max_q: Tensor
    entropy: Tensor
    accept: Tensor
    accepted: Tensor
    group: Tensor

    @property
    def distributions(self) -> str:
        return _at(self.temperature, self.draft_temperature)


@dataclass(frozen=True)
class Rounds:
    """Rounds of a harvest [n]: accepted draft tokens, those a verdict could be given on, and the
    prompt of each."""

    temperature: float
    accepted: Tensor
    most: Tensor
    group: Tensor


def distributions(harvest: Harvest) -> str:
    """What a harvest was sampled from."""
    return _at(*(warp.temperature for warp in harvest.warps))


def _at(target: float, draft: float) -> str:
    return f"T = {target:g}" if target == draft else f"T = {target:g}, draft {draft:g}"


def by_pair(harvests: Sequence[Harvest]) -> list[list[Harvest]]:
    """Harvests of one pair together, whatever it was called."""
    found: dict[str, list[Harvest]] = {}
    for harvest in harvests:
        found.setdefault(models(harvest.context["pair"]), []).append(harvest)
    return list(found.values())


def of_pair(pair: Mapping[str, str], harvests: Sequence[Harvest]) -> list[Harvest]:
    return [harvest for harvest in harvests if models(harvest.context["pair"]) == models(pair)]


def models(pair: Mapping[str, str]) -> str:
    """Of a pair, whatever it is called."""
    return json.dumps({**pair, "name": ""}, sort_keys=True)


def tokens_by_pair(artifacts: Artifacts) -> list[Callable[[], list[DraftTokens]]]:
    """What reads the draft tokens of each pair, once for all figures; without a harvest one that
    finds none."""

    def reader(harvests: Sequence[Harvest]) -> Callable[[], list[DraftTokens]]:
        key = ("draft tokens", *(harvest.folder for harvest in harvests))
        return lambda: artifacts.once(key, lambda: draft_tokens(harvests))

    return [reader(harvests) for harvests in by_pair(artifacts.harvests) or [[]]]


def counted(found: Sequence[DraftTokens]) -> str:
    """How much a figure rests on."""
    prompts = sum(len(tokens.group.unique()) for tokens in found)
    tokens = sum(len(tokens.q) for tokens in found)
    return f"{found[0].pair}, {prompts:,} prompts, {tokens:,} draft tokens"


def draft_tokens(harvests: Sequence[Harvest]) -> list[DraftTokens]:
    """The draft tokens that a verdict was given on, by dataset and distributions. Raises Missing
    where there is none in any harvest."""
    return merged(tokens for found in of_each(harvests, _draft_tokens) for tokens in found)


def of_each(harvests: Sequence[Harvest], read: Callable[[Harvest], Read]) -> list[Read]:
    """What is read of every harvest that has rows of it. Raises Missing, naming them, where none of
    them has any."""
    found, needs = list[Read](), list[str]()
    for harvest in harvests:
        try:
            found.append(read(harvest))
        except TooFewRows as error:
            reason = str(error).partition(": ")[2].partition(". ")[0]
            needs.append(f"more than {harvest.folder} holds ({reason})")
    if needs and not found:
        raise Missing(f"needs {', '.join(needs)}: python scripts/gen_data.py with more prompts")
    return found


def _draft_tokens(harvest: Harvest) -> list[DraftTokens]:
    """Raises TooFewRows where there is none."""
    found = [tokens for tokens in _of_datasets(harvest) if len(tokens.q)]
    if not found:
        raise TooFewRows("data: there is no draft token with a verdict. Harvest more prompts")
    return found


def _of_datasets(harvest: Harvest) -> Iterator[DraftTokens]:
    records = harvest.rounds("all", DRAWN)
    target, draft = (warp.temperature for warp in harvest.warps)
    names = [prompt.dataset for prompt in harvest.prompts("all")]
    kept, accepted = verdicts(records)
    columns = {
        "q": records["q" if draft else "q_max"],
        "max_q": records["q_max"],
        "entropy": records["q_entropy"],
        "accept": records["accept_prob"],
        "accepted": accepted,
        "group": records["group"][:, None].expand_as(kept),
    }
    for name in dict.fromkeys(names):
        of_dataset = torch.tensor([other == name for other in names])
        rows = kept & of_dataset[records["group"]][:, None]
        yield DraftTokens(
            harvest.pair.name,
            name,
            target,
            draft,
            **{column: values[rows] for column, values in columns.items()},
        )


def merged(found: Iterable[DraftTokens]) -> list[DraftTokens]:
    """One for each dataset and pair of distributions: harvests may share a dataset."""
    parts: dict[tuple[str, str, str], list[DraftTokens]] = {}
    for tokens in found:
        parts.setdefault((tokens.pair, tokens.dataset, tokens.distributions), []).append(tokens)
    return [_joined(alike) for alike in parts.values()]


def _joined(parts: Sequence[DraftTokens]) -> DraftTokens:
    names = ("q", "max_q", "entropy", "accept", "accepted")
    columns: dict[str, Any] = {
        name: torch.cat([getattr(tokens, name) for tokens in parts]) for name in names
    }
    return replace(parts[0], **columns, group=distinct_groups(parts))


def distinct_groups(parts: Sequence[DraftTokens]) -> Tensor:
    """Prompts of all parts, numbered through."""
    firsts = [0]
    for tokens in parts:
        firsts.append(firsts[-1] + int(tokens.group.max()) + 1)
    return torch.cat([tokens.group + first for tokens, first in zip(parts, firsts, strict=False)])


def verdicts(records: Records) -> tuple[torch.Tensor, torch.Tensor]:
    """[rounds, gamma] bool each: tokens a verdict was given on, and those of them that were
    accepted."""
    depth = torch.arange(records["accept_prob"].shape[1])
    accepted = depth < records["accepted"][:, None]
    most = torch.minimum(records["drafted"], records["known"])[:, None]
    return (depth <= records["accepted"][:, None]) & (depth < most), accepted


def rounds(harvests: Sequence[Harvest]) -> dict[float, list[Rounds]]:
    """Accepted lengths by the target's temperature."""
    found: dict[float, list[Rounds]] = {}
    for one in of_each(harvests, _rounds):
        found.setdefault(one.temperature, []).append(one)
    return found


def _rounds(harvest: Harvest) -> Rounds:
    """Raises TooFewRows where nothing was drafted, or no verdict was given."""
    records = harvest.rounds("all", ("known", "drafted", "accepted"))
    temperature = harvest.warps.target.temperature
    most = torch.minimum(records["drafted"], records["known"])
    if not most.any():
        raise TooFewRows("data: there is no draft token with a verdict. Harvest more prompts")
    return Rounds(temperature, records["accepted"], most, records["group"])
