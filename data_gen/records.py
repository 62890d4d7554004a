"""The records of prompts: mixed sequences, rounds, and the responses both refer to.

Every function expects the models' caches as `data_gen.room.joined` leaves them, and leaves them
so: each holds the prompts and responses, one text after another, without the last token of each
response."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from data_gen.answers import Answer, Distributions, uniforms
from data_gen.columns import Warps
from data_gen.labels import accepted_length, drafted_length
from data_gen.requests import Request
from data_gen.rollouts import Places, Read, Rollouts, Texts, candidate_states, roll, roll_greedy
from data_gen.room import Room
from data_gen.settings import HarvestSettings
from data_gen.statistics import given_row
from data_gen.storage.shards import MORE, pack_features
from data_gen.verdicts import Uniforms, greedy_verdicts, sampled_verdicts
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

    def uniforms(self, purpose: str, settings: HarvestSettings, *shape: int) -> Tensor:
        """Return uniform numbers, [A, gamma, ...]."""
        shape = (len(self.anchors), settings.gamma, *shape)
        return uniforms(settings.seed, self.request.prompt_id, purpose, *shape)


@torch.inference_mode()
def label(
    pair: ModelPair,
    requests: Sequence[Request],
    answers: Sequence[Answer],
    settings: HarvestSettings,
    room: Room,
) -> list[dict[str, Row]]:
    """Return all records of each prompt by kind (`data_gen.storage.shards.SCHEMAS`)."""
    texts, start = list[Text](), 0
    for request, answer in zip(requests, answers, strict=True):
        response = answer.distributions.response.cpu()
        anchors = torch.arange(0, len(response), settings.stride)
        texts.append(Text(request, answer, response, start, anchors))
        start += len(request.tokens) + len(response) - 1
    records = list[dict[str, Row]]()
    kinds = rounds(pair, texts, settings, room), mixed(pair.draft, texts, settings, room)
    for text, *rows in zip(texts, *kinds, strict=True):
        request = text.request
        head = {"prompt_id": request.prompt_id, "dataset": request.dataset, "split": request.split}
        named = [request.tokens[-1:], text.response, *(row["token"].flatten() for row in rows)]
        ids = torch.cat(named).unique() if settings.features_stored else torch.zeros(0).long()
        vectors = [pair.target.embed(token) for token in ids.tolist()]
        responses: Row = {
            "prompt_tokens": request.tokens,
            "response_tokens": text.response,
            "embedded": ids,
            "embedding": packed(torch.stack(vectors), settings) if vectors else [],
        }
        if request.response is not None:
            responses["given"] = given_row(text.answer.distributions.excess.cpu())
        by_kind = {"rounds": rows[0], "mixed": rows[1], "responses": responses}
        records.append({kind: head | row for kind, row in by_kind.items()})
    return records


def after_prompts(texts: Sequence[Text], following: Sequence[Tensor]) -> Texts:
    """Return the texts as they lie in the cache. following: tokens after each prompt."""
    start = torch.tensor([text.start for text in texts])
    prompts = torch.tensor([len(text.request.tokens) for text in texts])
    return Texts(Places(start + prompts - 1, start), following)


def read_by(texts: Sequence[Text], eos_ids: Collection[int]) -> Read:
    """Return what the caches hold."""
    tokens = [torch.cat([text.request.tokens, text.response[:-1]]) for text in texts]
    prompts = {text.start: len(text.request.tokens) for text in texts}
    return Read(torch.cat(tokens), prompts, eos_ids)


def mixed(
    draft: CachedLM, texts: Sequence[Text], settings: HarvestSettings, room: Room
) -> list[Row]:
    """Return for each text SpecDec++'s records (2405.19715, section 3.2): draft tokens in a mix of
    response and candidates.

    Z_t is the response token with probability r = `mixing`, else the candidate Y_t; the record of t
    is kept where Z_t = Y_t. Its label belongs to the unmixed context, as in the paper; so do the
    hidden states of a draft that reads its target's (`candidate_states`)."""
    sequences, rows = list[Tensor](), list[Row]()
    for text in texts:
        distributions, length = text.answer.distributions, len(text.response)
        uniform = uniforms(settings.seed, text.request.prompt_id, "mixing", length)
        kept = uniform >= settings.mixing
        sequences.append(torch.where(kept, distributions.token.cpu(), text.response))
        names = ("q", *Q_STATS, "overlap")
        row = {
            "position": torch.arange(length)[kept],
            "token": sequences[-1][kept],
            "accept_prob": distributions.accept.cpu()[kept],
            **{name: getattr(distributions, name).cpu()[kept] for name in names},
        }
        rows.append(row)
    positions, layers = [row["position"] for row in rows], settings.layers.of("draft_hidden")
    texts_mixed = after_prompts(texts, sequences)
    hidden = candidate_states(draft, texts_mixed, positions, layers, room.rollouts)
    for row, states in zip(rows, hidden.split([len(some) for some in positions]), strict=True):
        row["draft_hidden"] = packed(states, settings)
    return rows


def rounds(
    pair: ModelPair, texts: Sequence[Text], settings: HarvestSettings, room: Room
) -> list[Row]:
    """Return for each text the rounds of gamma draft tokens that would follow each anchor of the
    response, never cut short."""
    gamma, greedy = settings.gamma, settings.warp.temperature == 0
    first = Distributions.join([text.answer.distributions.take(text.anchors) for text in texts])
    uniform = Uniforms(
        torch.cat([text.uniforms("verdicts", settings) for text in texts]),
        torch.cat([text.uniforms("siblings", settings, MORE) for text in texts]),
    )
    following = [pad(text.response, (0, gamma), value=-2).unfold(0, gamma, 1) for text in texts]
    says = torch.cat([windows[t.anchors] for windows, t in zip(following, texts, strict=True)])
    parts, start, read = list[Row](), 0, read_by(texts, pair.eos_ids)
    for made in rollouts(pair.draft, texts, first, settings, room, read):
        for rolled in made.parts(room.rollouts):
            some = torch.arange(start, start := start + len(rolled.places.row))
            facts = first.take(some), says[some], uniform.take(some)
            parts.append(judged(pair, rolled, *facts, settings, read))
    counts = [len(text.anchors) for text in texts]
    columns = {name: torch.cat([part[name] for part in parts]).split(counts) for name in parts[0]}
    rows, firsts = list[Row](), uniform.verdicts[:, 0].split(counts)
    for index, (text, first_uniform) in enumerate(zip(texts, firsts, strict=True)):
        answer, response, anchors = text.answer, text.response, text.anchors
        row = {name: column[index] for name, column in columns.items()}
        known = torch.full_like(anchors, gamma)
        if greedy and int(response[-1]) not in pair.eos_ids:  # it was cut
            known = (len(response) - anchors).clamp(max=gamma)
        # recent acceptance before each anchor: verdicts on the candidates of all earlier
        # positions, by the draw of their round if there is one
        everywhere = uniforms(settings.seed, text.request.prompt_id, "history", len(response))
        everywhere[anchors] = first_uniform
        accepted = everywhere < answer.distributions.accept.cpu()
        row |= {
            "anchor": anchors,
            "known": known,
            "committed": torch.cat([text.request.tokens[-1:], response])[anchors],
            "history": history_rows(accepted)[anchors],
            "target_hidden": packed(answer.target_hidden[: len(anchors)], settings),
            "draft_first": packed(answer.draft_first[: len(anchors)], settings),
            "draft_hidden": packed(row["draft_hidden"], settings),
        }
        rows.append(row)
    return rows


def rollouts(
    draft: CachedLM,
    texts: Sequence[Text],
    first: Distributions,
    settings: HarvestSettings,
    room: Room,
    read: Read,
) -> Iterator[Rollouts]:
    """Yield gamma draft tokens from each anchor, the first of which are the candidates of the
    answers; a part of the anchors at a time, in order."""
    layers, warp = settings.layers.of("draft_hidden"), settings.draft_warp
    shared = not draft.reads_target  # else its states differ between drafted and verified contexts
    if shared and settings.stride == 1 and warp.temperature == 0:
        responses = after_prompts(texts, [text.response for text in texts])
        sizes = settings.gamma, layers, room.rollouts
        yield roll_greedy(draft, responses, first, *sizes, warp, read)
        return
    uniform = torch.cat([text.uniforms("rollouts", settings)[:, 1:] for text in texts])
    rows = [text.start + len(text.request.tokens) - 1 + text.anchors for text in texts]
    starts = [torch.full_like(text.anchors, text.start) for text in texts]
    places = Places(torch.cat(rows), torch.cat(starts))
    for some in torch.arange(len(uniform)).split(room.rollouts):
        drawn = first.take(some), uniform[some]
        yield roll(draft, places.take(some), *drawn, warp, layers, read)


def judged(
    pair: ModelPair,
    rolled: Rollouts,
    first: Distributions,
    says: Tensor,
    uniform: Uniforms,
    settings: HarvestSettings,
    read: Read,
) -> Row:
    """Return some rollouts with the target's verdicts; hidden states as tensors."""
    tokens, warps = rolled.drawn.token.cpu(), Warps.of(settings, pair.draft)
    drafted = drafted_length(tokens, pair.eos_ids)
    if settings.warp.temperature == 0:
        verdicts = greedy_verdicts(rolled, first, says, uniform, warps)
    else:
        verdicts = sampled_verdicts(pair.target, rolled, first, drafted, uniform, warps, read)
    columns = dict(vars(verdicts))
    accept = columns.pop("accept")
    stored = slice(None if settings.features_stored else 0)
    return {
        "draft_hidden": rolled.draft_hidden[..., stored].bfloat16().cpu(),
        **{name: column.cpu() for name, column in vars(rolled.drawn).items()},
        "drafted": drafted,
        "accepted": accepted_length(accept, uniform.verdicts, drafted),
        "accept_prob": accept,
        **columns,
    }


def packed(hidden: Tensor, settings: HarvestSettings) -> np.ndarray:
    """Return hidden states [..., D] in the form in which they are stored, if they are stored."""
    return pack_features(hidden if settings.features_stored else hidden.new_empty(0))
