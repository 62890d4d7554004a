"""Responses of a batch that are labelled together: their cached rows wait until there are enough,
and lie one after another in the caches of both models then."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from data_gen.responses.generate import Answer
from data_gen.room import Room
from data_gen.settings import HarvestSettings
from decoding.models.cached_lm import CachedLM, Held
from decoding.models.loading import ModelPair


@dataclass(frozen=True)
class _Waiting:
    """An answer, and what the models that label it held when it was out."""

    answer: Answer
    held: list[Held]
    rollouts: int
    rows: int


def joined(
    pair: ModelPair, answers: Iterable[Answer], settings: HarvestSettings, room: Room
) -> Iterator[list[Answer]]:
    """Answers as they come, as many together as `room` allows. While they are out, the draft, and a
    sampled target, hold their texts one after another, each without its last token."""
    models = labelling(pair, settings)
    waiting = list[_Waiting]()
    for answer in answers:
        count = -(-len(answer.distributions.response) // settings.stride)
        if not waiting and (count >= room.joined or pair.draft.length >= room.rows):
            yield [answer]  # both caches hold it as it is
            continue
        held = [lm.held() for lm in models]
        one = _Waiting(answer, held, count, pair.draft.length)
        rollouts = count + sum(each.rollouts for each in waiting)
        rows = one.rows + sum(each.rows for each in waiting)
        if waiting and (rollouts > room.joined or rows > room.rows):
            group, waiting = _together(models, waiting), []  # their copies are not needed any more
            yield group
        waiting.append(one)
    if waiting:
        group, waiting = _together(models, waiting), []
        yield group


def labelling(pair: ModelPair, settings: HarvestSettings) -> list[CachedLM]:
    """The models that run on rollouts: a greedy target has said everything before."""
    return [pair.draft] if settings.warp.temperature == 0 else [pair.draft, pair.target]


def _together(models: list[CachedLM], waiting: list[_Waiting]) -> list[Answer]:
    for lm, parts in zip(models, zip(*(one.held for one in waiting), strict=True), strict=True):
        if len(parts) == 1:
            lm.load(*parts[0])
            continue
        rows = [part.rows for part in parts]
        layers = [
            (
                torch.cat([keys for keys, _ in layer], 2),
                torch.cat([values for _, values in layer], 2),
            )
            for layer in zip(*rows, strict=True)
        ]
        states = [part.states for part in parts if part.states is not None]
        lm.load(layers, torch.cat(states) if states else None)
    return [one.answer for one in waiting]
