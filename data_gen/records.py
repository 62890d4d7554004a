"""The records of prompts, top to bottom: mixed sequences, rounds, and what both refer to.

Every function takes the models as `data_gen.joined` leaves them: each holds the prompts and
responses, one text after another, but for the last token of each response. It leaves them so."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from data_gen import labels
from data_gen.own_tokens import Warps, own_tokens
from data_gen.requests import Request
from data_gen.responses.generate import Answer, Distributions, uniforms
from data_gen.responses.surprisal import given_row
from data_gen.rollouts import Drawn, Places, Rollouts, Texts, candidate_states, roll, roll_greedy
from data_gen.room import Room
from data_gen.settings import HarvestSettings
from data_gen.siblings import MORE
from data_gen.storage.shards import pack_features
from data_gen.verdicts import Coins, greedy_verdicts, sampled_verdicts
from decoding.models.cached_lm import CachedLM
from decoding.models.loading import ModelPair
from predictors.features.draft_statistics import Q_STATS, history_rows

Row = dict[str, Any]
"""One prompt's columns of one kind of record."""


@dataclass(frozen=True)
class Text:
    """A prompt and its answer. response: [T], on the host; start: row of its first token in both
    caches; anchors: [A], positions of the response."""

    request: Request
    answer: Answer
    response: Tensor
    start: int
    anchors: Tensor

    def coins(self, purpose: str, settings: HarvestSettings, *shape: int) -> Tensor:
        """[A, gamma, ...]"""
        count = len(self.anchors)
        return uniforms(
            settings.seed, self.request.prompt_id, purpose, count, settings.gamma, *shape
        )


@torch.inference_mode()
def label(
    pair: ModelPair,
    requests: Sequence[Request],
    answers: Sequence[Answer],
    settings: HarvestSettings,
    room: Room,
) -> list[dict[str, Row]]:
    """All records of some prompts, each by kind (`data_gen.storage.shards.SCHEMAS`)."""
    texts, start = list[Text](), 0
    for request, answer in zip(requests, answers, strict=True):
        response = answer.distributions.response.cpu()
        anchors = torch.arange(0, len(response), settings.stride)
        texts.append(Text(request, answer, response, start, anchors))
        start += len(request.tokens) + len(response) - 1
    found = list[dict[str, Row]]()
    kinds = rounds(pair, texts, settings, room), mixed(pair.draft, texts, settings, room)
    for text, *rows in zip(texts, *kinds, strict=True):
        request = text.request
        head = {"prompt_id": request.prompt_id, "dataset": request.dataset, "split": request.split}
        named = [request.tokens[-1:], text.response, *(row["token"].flatten() for row in rows)]
        responses = {
            "prompt_tokens": request.tokens,
            "response_tokens": text.response,
            **embeddings(pair.target, torch.cat(named), settings),
        }
        if request.response is not None:
            responses["given"] = given_row(text.answer.distributions.excess.cpu())
        by_kind = {"rounds": rows[0], "mixed": rows[1], "responses": responses}
        found.append({kind: head | row for kind, row in by_kind.items()})
    return found


def embeddings(target: CachedLM, tokens: Tensor, settings: HarvestSettings) -> Row:
    """The input embedding of each token that occurs in `tokens`, once."""
    ids = tokens.unique() if settings.features_stored else tokens[:0]
    vectors = [target.embed(token) for token in ids.tolist()]
    return {"embedded": ids, "embedding": packed(torch.stack(vectors), settings) if vectors else []}


def after_prompts(texts: Sequence[Text], following: Sequence[Tensor]) -> Texts:
    """following: tokens after each prompt."""
    start = torch.tensor([text.start for text in texts])
    prompts = torch.tensor([len(text.request.tokens) for text in texts])
    return Texts(Places(start + prompts - 1, start), following)


def mixed(
    draft: CachedLM, texts: Sequence[Text], settings: HarvestSettings, room: Room
) -> list[Row]:
    """Draft tokens in a mix of response and candidates, SpecDec++'s records (2405.19715, section
    3.2), of each text.

    Z_t is the response token with probability r = `mixing`, else the candidate Y_t; the record of t
    is kept where Z_t = Y_t. Its label belongs to the unmixed context, as in the paper; so do the
    hidden states of a draft that reads its target's (`candidate_states`)."""
    sequences, positions, found = list[Tensor](), list[Tensor](), list[Row]()
    for text in texts:
        distributions, length = text.answer.distributions, len(text.response)
        coins = uniforms(settings.seed, text.request.prompt_id, "mixing", length)
        kept = coins >= settings.mixing
        sequences.append(torch.where(kept, distributions.candidate.cpu(), text.response))
        positions.append(torch.arange(length)[kept])
        names = ("q", *Q_STATS, "overlap")
        row = {
            "position": positions[-1],
            "token": sequences[-1][kept],
            "accept_prob": distributions.accept.cpu()[kept],
            **{name: getattr(distributions, name).cpu()[kept] for name in names},
        }
        found.append(row)
    layers = settings.layers.of("draft_hidden")
    where = after_prompts(texts, sequences)
    hidden = candidate_states(draft, where, positions, layers, room.rollouts)
    for row, states in zip(found, hidden.split([len(some) for some in positions]), strict=True):
        row["draft_hidden"] = packed(states, settings)
    return found


@dataclass(frozen=True)
class Anchors:
    """What is known of A rollouts before they are made. first: at their first token; coins: of
    verdicts; known: [A], tokens whose verdict can be told; said: [A], where each begins in `text`,
    the responses with gamma times -2 behind each."""

    first: Distributions
    coins: Coins
    known: Tensor
    said: Tensor
    text: Tensor

    @classmethod
    def of(cls, texts: Sequence[Text], eos_ids: Collection[int], how: HarvestSettings) -> "Anchors":
        gamma, known, said, start = how.gamma, list[Tensor](), list[Tensor](), 0
        for text in texts:
            anchors, response = text.anchors, text.response
            cut = how.warp.temperature == 0 and int(response[-1]) not in eos_ids
            far = torch.full_like(anchors, gamma)
            known.append(labels.known_depth(anchors, len(response), gamma) if cut else far)
            said.append(start + anchors)
            start += len(response) + gamma
        return cls(
            Distributions.join([text.answer.distributions.take(text.anchors) for text in texts]),
            Coins(
                torch.cat([text.coins("verdicts", how) for text in texts]),
                torch.cat([text.coins("siblings", how, MORE) for text in texts]),
            ),
            torch.cat(known),
            torch.cat(said),
            torch.cat([pad(text.response, (0, gamma), value=-2) for text in texts]),
        )

    def take(self, some: Tensor) -> "Anchors":
        coins = Coins(self.coins.verdicts[some], self.coins.siblings[some])
        first, known = self.first.take(some), self.known[some]
        return Anchors(first, coins, known, self.said[some], self.text)


def rounds(
    pair: ModelPair, texts: Sequence[Text], settings: HarvestSettings, room: Room
) -> list[Row]:
    """Return of each text the round of gamma draft tokens that would follow each anchor of the
    response, never cut short."""
    anchors, parts, start = Anchors.of(texts, pair.eos_ids, settings), list[Row](), 0
    for made in rollouts(pair.draft, texts, anchors.first, settings, room):
        for rolled in made.parts(room.rollouts):
            some = torch.arange(start, start := start + len(rolled.places.row))
            parts.append(judged(pair, rolled, anchors.take(some), settings))
    counts = [len(text.anchors) for text in texts]
    columns = {name: torch.cat([part[name] for part in parts]).split(counts) for name in parts[0]}
    coins, found = anchors.coins.verdicts.split(counts), list[Row]()
    for place, text in enumerate(texts):
        own = {name: column[place] for name, column in columns.items()}
        own["draft_hidden"] = packed(own["draft_hidden"], settings)
        found.append(before(text, coins[place][:, 0], settings) | own)
    return found


def before(text: Text, coins: Tensor, settings: HarvestSettings) -> Row:
    """What is known before each round. coins: [A], of the first verdicts."""
    committed = torch.cat([text.request.tokens[-1:], text.response])
    answer, count = text.answer, len(text.anchors)
    return {
        "anchor": text.anchors,
        "committed": committed[text.anchors],
        "history": history(text, coins, settings),
        "target_hidden": packed(answer.target_hidden[:count], settings),
        "draft_first": packed(answer.draft_first[:count], settings),
    }


def rollouts(
    draft: CachedLM,
    texts: Sequence[Text],
    known: Distributions,
    settings: HarvestSettings,
    room: Room,
) -> Iterator[Rollouts]:
    """gamma draft tokens from each anchor, the first of which are the candidates of the answers,
    `known`; a part of the anchors at a time, in order."""
    first, layers = candidates(known), settings.layers.of("draft_hidden")
    shared = not draft.reads_target  # else a context drafted and the same one verified are two
    if shared and settings.stride == 1 and settings.draft_warp.temperature == 0:
        where = after_prompts(texts, [text.response for text in texts])
        yield roll_greedy(draft, where, first, settings.gamma, layers, room.rollouts)
        return
    uniform = torch.cat([text.coins("rollouts", settings)[:, 1:] for text in texts])
    rows = [text.start + len(text.request.tokens) - 1 + text.anchors for text in texts]
    starts = [torch.full_like(text.anchors, text.start) for text in texts]
    places = Places(torch.cat(rows), torch.cat(starts))
    for some in torch.arange(len(uniform)).split(room.rollouts):
        coins, there = uniform[some], places.take(some)
        yield roll(draft, there, first.take(some), coins, settings.draft_warp, layers)


def candidates(distributions: Distributions) -> Drawn:
    """The first draft token at each anchor."""
    names = ("q", *Q_STATS, "top_token")
    about = {name: getattr(distributions, name) for name in names}
    return Drawn(distributions.candidate, **about)


def judged(pair: ModelPair, rolled: Rollouts, anchors: Anchors, settings: HarvestSettings) -> Row:
    """Some rollouts, and what the target says of them; hidden states as tensors."""
    tokens = rolled.drawn.token.cpu()
    warps = Warps(settings.warp, settings.draft_warp, own_tokens(pair.draft))
    drafted = labels.drafted_length(tokens, pair.eos_ids)
    first, coins = anchors.first, anchors.coins
    if settings.warp.temperature == 0:
        said = anchors.text, anchors.said
        found = greedy_verdicts(rolled, first, said, coins, warps)
    else:
        found = sampled_verdicts(pair.target, rolled, first, drafted, coins, warps)
    verdicts = vars(found)
    accept = verdicts.pop("accept")
    stored = slice(None if settings.features_stored else 0)
    return {
        "draft_hidden": rolled.draft_hidden[..., stored].bfloat16().cpu(),
        **{name: column.cpu() for name, column in vars(rolled.drawn).items()},
        "known": anchors.known,
        "drafted": drafted,
        "accepted": labels.accepted_length(accept, coins.verdicts, drafted),
        "accept_prob": accept,
        **verdicts,
    }


def history(text: Text, coins: Tensor, settings: HarvestSettings) -> Tensor:
    """[A, 3], what `predictors.features.draft_statistics.history_row` says before each anchor:
    verdicts on the candidates of all earlier positions, by the coin of their round where there is
    one. coins: [A]."""
    accept = text.answer.distributions.accept.cpu()
    everywhere = uniforms(settings.seed, text.request.prompt_id, "history", len(accept))
    everywhere[text.anchors] = coins
    return history_rows(everywhere < accept)[text.anchors]


def packed(hidden: Tensor, settings: HarvestSettings) -> np.ndarray:
    """Hidden states [..., D] as they are stored, if they are."""
    return pack_features(hidden if settings.features_stored else hidden.new_empty(0))
