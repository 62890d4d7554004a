"""Data of figures from harvests: draft tokens with a verdict, rounds, and predictions of
checkpoints for prompts they were not trained on."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from data_gen.samples import of_prompts, read_inputs, unseen
from data_gen.storage.dataset import Harvest
from predictors.base import Predictor, Records, load_predictor
from predictors.training.trainer import logits_in_chunks
from reports.artifacts import Artifacts, Checkpoint, grouped
from reports.figure import Builder, Figure, Missing, each
from runtime.errors import TooFewRows
from runtime.text import plural

T = TypeVar("T")
NEEDS = "needs a harvest: python scripts/gen_data.py"
NO_VERDICT = "data: there is no draft token with a verdict. Harvest more prompts"
DRAWN = ("known", "drafted", "accepted", "q", "q_max", "q_entropy", "accept_prob")


def at_temperatures(target: float, draft: float) -> str:
    """Return the distributions that were sampled from, in words."""
    return f"T = {target:g}" if target == draft else f"T = {target:g}, draft {draft:g}"


def distributions(harvest: Harvest) -> str:
    return at_temperatures(*(warp.temperature for warp in harvest.warps))


def models(pair: Mapping[str, str]) -> str:
    """Return the identity of a pair's models, independent of its name."""
    return json.dumps({**pair, "name": ""}, sort_keys=True)


def by_pair(harvests: Sequence[Harvest]) -> list[list[Harvest]]:
    """Return the harvests of each pair together, whatever the pair's name."""
    return grouped(harvests, lambda harvest: models(harvest.context["pair"]))


def of_each(harvests: Sequence[Harvest], read: Callable[[Harvest], T]) -> list[T]:
    """Return the results of `read` for the harvests that have rows for it. Raises Missing, naming
    the harvests, if none has any."""
    results, needs = list[T](), list[str]()
    for harvest in harvests:
        try:
            results.append(read(harvest))
        except TooFewRows as error:
            reason = str(error).partition(": ")[2].partition(". ")[0]
            needs.append(f"more than {harvest.folder} holds ({reason})")
    if needs and not results:
        raise Missing(f"needs {', '.join(needs)}: python scripts/gen_data.py with more prompts")
    return results


# Draft tokens -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DraftTokens:
    """Draft tokens with a verdict: those of each round up to the first rejected one. Columns [n].

    pair, dataset: names; temperature, draft_temperature: of the distributions that were sampled
    from
    q: of the drawn token under the distribution it was drawn from, for a greedy draft at
    temperature 1. max_q, entropy (nats): of the draft at temperature 1. accept: min(1, p/q);
    accepted: the verdict; group: prompt"""

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
        return at_temperatures(self.temperature, self.draft_temperature)


def tokens_by_pair(
    artifacts: Artifacts, build: Callable[[Sequence[DraftTokens]], Figure]
) -> list[Builder]:
    """Return the builders of a figure of the draft tokens of each pair, read once for all
    figures."""

    def figure(harvests: Sequence[Harvest]) -> Figure:
        key = ("draft tokens", *(harvest.folder for harvest in harvests))
        return build(artifacts.once(key, lambda: draft_tokens(harvests)))

    return each(by_pair(artifacts.harvests), figure, NEEDS)


def counted(parts: Sequence[DraftTokens]) -> str:
    """Return the size of a figure's data in words."""
    prompts = sum(len(tokens.group.unique()) for tokens in parts)
    tokens = sum(len(tokens.q) for tokens in parts)
    return f"{parts[0].pair}, {plural(prompts, 'prompt')}, {plural(tokens, 'draft token')}"


def draft_tokens(harvests: Sequence[Harvest]) -> list[DraftTokens]:
    """Return the draft tokens with a verdict, by dataset and distributions (harvests may share a
    dataset). Raises Missing if no harvest has any."""
    tables = [tokens for several in of_each(harvests, _draft_tokens) for tokens in several]
    alike = grouped(tables, lambda tokens: (tokens.pair, tokens.dataset, tokens.distributions))
    return [joined(parts) for parts in alike]


def joined(parts: Sequence[DraftTokens]) -> DraftTokens:
    """Return tokens of several harvests or datasets together, their prompts numbered through."""
    columns: dict[str, Any] = {
        name: torch.cat([getattr(tokens, name) for tokens in parts])
        for name in ("q", "max_q", "entropy", "accept", "accepted")
    }
    first, groups = 0, []
    for tokens in parts:
        groups.append(tokens.group + first)
        first += int(tokens.group.max()) + 1
    return replace(parts[0], **columns, group=torch.cat(groups))


def _draft_tokens(harvest: Harvest) -> list[DraftTokens]:
    """Return the tokens of each dataset. Raises TooFewRows if there are none."""
    records = harvest.rounds("all", DRAWN)
    target, draft = (warp.temperature for warp in harvest.warps)
    names = [prompt.dataset for prompt in harvest.prompts("all")]
    depth = torch.arange(records["accept_prob"].shape[1])
    most = torch.minimum(records["drafted"], records["known"])[:, None]
    judged = (depth <= records["accepted"][:, None]) & (depth < most)
    columns = {
        "q": records["q" if draft else "q_max"],
        "max_q": records["q_max"],
        "entropy": records["q_entropy"],
        "accept": records["accept_prob"],
        "accepted": depth < records["accepted"][:, None],
        "group": records["group"][:, None].expand_as(judged),
    }
    tables = []
    for name in dict.fromkeys(names):
        of_dataset = torch.tensor([other == name for other in names])
        rows = judged & of_dataset[records["group"]][:, None]
        if rows.any():
            values = {column: values[rows] for column, values in columns.items()}
            tables.append(DraftTokens(harvest.pair.name, name, target, draft, **values))
    if not tables:
        raise TooFewRows(NO_VERDICT)
    return tables


# Rounds -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rounds:
    """Rounds of a harvest [n]: accepted draft tokens, those with a possible verdict, and the prompt
    of each."""

    temperature: float
    accepted: Tensor
    most: Tensor
    group: Tensor


def rounds(harvests: Sequence[Harvest]) -> dict[float, list[Rounds]]:
    """Return the rounds of each harvest by the target's temperature."""
    alike = grouped(of_each(harvests, _rounds), lambda part: part.temperature)
    return {parts[0].temperature: parts for parts in alike}


def _rounds(harvest: Harvest) -> Rounds:
    """Read the rounds of a harvest. Raises TooFewRows if nothing was drafted, or no verdict was
    given."""
    records = harvest.rounds("all", ("known", "drafted", "accepted"))
    most = torch.minimum(records["drafted"], records["known"])
    if not most.any():
        raise TooFewRows(NO_VERDICT)
    temperature = harvest.warps.target.temperature
    return Rounds(temperature, records["accepted"], most, records["group"])


# Predictions --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predicted:
    """A predictor's predictions for prompts it was not trained on.

    checkpoint, predictor: names; temperature: of the target; trained_on, dataset: harvests;
    in_domain: whether both are the same, and the prompts its test split; as_trained, calibrated,
    targets: [n, C] distributions; group: [n] prompts"""

    checkpoint: str
    predictor: str
    temperature: float
    trained_on: str
    dataset: str
    in_domain: bool
    as_trained: Tensor
    calibrated: Tensor
    targets: Tensor
    group: Tensor

    @property
    def where(self) -> str:
        return f"{self.dataset}, test split" if self.in_domain else self.dataset

    @property
    def prompts(self) -> int:
        return len(self.group.unique())


def one_of_each(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the first checkpoint for each predictor, training harvest and non-numeric settings:
    from a sweep over numbers, only one is shown."""

    def kind(checkpoint: Checkpoint) -> tuple[str, ...]:
        config = checkpoint.config
        words = (value for value in config["settings"].values() if isinstance(value, str))
        return config["predictor"], checkpoint.training_data, *words

    return [alike[0] for alike in grouped(checkpoints, kind)]


def predicted(checkpoint: Checkpoint, artifacts: Artifacts) -> list[Predicted]:
    """Return a checkpoint's predictions on every harvest it fits, for prompts it was not trained
    on; its training harvest first.

    Empty if its training harvest is not among the artifacts, since its training prompts are then
    unknown. Harvests of other pairs, distributions or layers are left out, and those without hidden
    states. Raises Missing if none of them has samples for it."""

    def read() -> list[Predicted]:
        predictor, fitting = on_harvests(checkpoint, artifacts.harvests)

        def of_harvest(harvest: Harvest) -> Predicted:
            home = fitting[0]
            samples = predictor.samples(held_out(predictor, harvest, home))
            logits = logits_in_chunks(predictor.head, samples["inputs"])
            return Predicted(
                checkpoint=checkpoint.folder.name,
                predictor=predictor.name,
                temperature=home.warps.target.temperature,
                trained_on=home.name,
                dataset=harvest.name,
                in_domain=harvest is home,
                as_trained=torch.softmax(logits, -1),
                calibrated=predictor.calibration.apply(logits),
                targets=predictor.targets(samples),
                group=samples["group"],
            )

        return of_each(fitting, of_harvest)

    return artifacts.once(("predicted", checkpoint.folder), read)


def on_harvests(
    checkpoint: Checkpoint, harvests: Sequence[Harvest]
) -> tuple[Predictor, list[Harvest]]:
    """Return the predictor and the harvests it fits, its training harvest first."""
    predictor = load_predictor(checkpoint.folder, key="run")
    home = next((one for one in harvests if one.identity == checkpoint.training_data), None)
    if home is None or not home.features_stored:
        return predictor, []

    def fits(other: Harvest) -> bool:
        """Return whether `other` differs only in its prompts, and has some that `home` does not
        have."""
        return (
            models(other.context["pair"]) == models(home.context["pair"])
            and (other.warps, other.inputs) == (home.warps, home.inputs)
            and other.features_stored
            and (predictor.gamma or 0) <= other.gamma
            and bool(unseen(other, home).any())
        )

    return predictor, [home, *(one for one in harvests if one is not home and fits(one))]


def held_out(
    predictor: Predictor, harvest: Harvest, home: Harvest, kind: str | None = None
) -> Records:
    """Return the rows of the test split of the training harvest `home`, or of those prompts of
    another harvest that are not in it. kind: "rounds" or "mixed", by default that of the
    predictor."""
    which, columns = kind or predictor.kind, predictor.columns
    if harvest is home:
        return read_inputs(home, predictor, which, "test", columns)
    return of_prompts(read_inputs(harvest, predictor, which, "all", columns), unseen(harvest, home))
