"""The records of one prompt, top to bottom: mixed sequences, rounds, and what both refer to.

Every function takes the models as they are while an answer is out (`data_gen.responses.generate`):
each holds the prompt and the response but for its last token. It leaves them so."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_gen import labels
from data_gen.requests import Request
from data_gen.responses.generate import Answer, Distributions, uniforms
from data_gen.rollouts import (
    Drawn,
    Rollouts,
    candidate_states,
    roll,
    roll_greedy,
    rollout_acceptance,
)
from data_gen.settings import HarvestSettings
from data_gen.storage.shards import pack_features
from decoding.models.cached_lm import CachedLM
from decoding.models.loading import ModelPair
from predictors.draft_statistics import Q_STATS, history_rows

Row = dict[str, Any]
"""One prompt's columns of one kind of record."""


@torch.inference_mode()
def label(
    pair: ModelPair, request: Request, answer: Answer, settings: HarvestSettings
) -> dict[str, Row]:
    """All records of one prompt, by kind (`data_gen.storage.shards.SCHEMAS`)."""
    head = {"prompt_id": request.prompt_id, "dataset": request.dataset, "split": request.split}
    response = answer.distributions.response.cpu()
    found = {
        "rounds": rounds(pair, request, answer, settings),
        "mixed": mixed(pair.draft, request, answer, settings),
    }
    named = [request.tokens[-1:], response, *(row["token"].flatten() for row in found.values())]
    found["responses"] = {
        "prompt_tokens": request.tokens,
        "response_tokens": response,
        **embeddings(pair.target, torch.cat(named), settings),
    }
    return {kind: head | row for kind, row in found.items()}


def embeddings(target: CachedLM, tokens: Tensor, settings: HarvestSettings) -> Row:
    """The input embedding of each token that occurs in `tokens`, once."""
    ids = tokens.unique() if settings.features_stored else tokens[:0]
    vectors = [target.embed(token) for token in ids.tolist()]
    return {"embedded": ids, "embedding": packed(torch.stack(vectors), settings) if vectors else []}


def mixed(draft: CachedLM, request: Request, answer: Answer, settings: HarvestSettings) -> Row:
    """Draft tokens in a mix of response and candidates, SpecDec++'s records (2405.19715, section
    3.2).

    Z_t is the response token with probability r = `mixing`, else the candidate Y_t; the record of t
    is kept where Z_t = Y_t. Its label belongs to the unmixed context, as in the paper; so do the
    hidden states of a draft that reads its target's (`candidate_states`)."""
    distributions, length = answer.distributions, len(answer.distributions.response)
    kept = uniforms(settings.seed, request.prompt_id, "mixing", length) >= settings.mixing
    sequence = torch.where(kept, distributions.candidate.cpu(), distributions.response.cpu())
    position = torch.arange(length)[kept]
    layers = settings.layers.of("draft_hidden")
    hidden = candidate_states(draft, len(request.tokens), sequence, position, layers)
    names = ("q", *Q_STATS, "overlap")
    return {
        "position": position,
        "token": sequence[kept],
        "accept_prob": distributions.accept.cpu()[kept],
        **{name: getattr(distributions, name).cpu()[kept] for name in names},
        "draft_hidden": packed(hidden, settings),
    }


def rounds(pair: ModelPair, request: Request, answer: Answer, settings: HarvestSettings) -> Row:
    """The round of gamma draft tokens that would follow each anchor of the response, never cut
    short."""
    response = answer.distributions.response.cpu()
    anchors = torch.arange(0, len(response), settings.stride)
    coins = uniforms(settings.seed, request.prompt_id, "verdicts", len(anchors), settings.gamma)
    rolled = rollouts(pair.draft, request, answer, anchors, settings)
    before = torch.cat([request.tokens[-1:], response])
    return {
        "anchor": anchors,
        "committed": before[anchors],
        "history": history(request, answer, anchors, coins[:, 0], settings),
        "target_hidden": packed(answer.target_hidden[: len(anchors)], settings),
        "draft_hidden": packed(rolled.draft_hidden, settings),
        "token": rolled.drawn.token.cpu(),
        **{name: getattr(rolled.drawn, name) for name in ("q", *Q_STATS)},
        **verdicts(pair, answer, rolled, anchors, coins, settings),
    }


def rollouts(
    draft: CachedLM, request: Request, answer: Answer, anchors: Tensor, settings: HarvestSettings
) -> Rollouts:
    """gamma draft tokens from each anchor, the first of which are the candidates of the answer."""
    first, layers = candidates(answer.distributions, anchors), settings.layers.of("draft_hidden")
    shared = not draft.reads_target  # else a context drafted and the same one verified are two
    if shared and settings.stride == 1 and settings.draft_warp.temperature == 0:
        response = answer.distributions.response.cpu()
        return roll_greedy(draft, response, first, settings.gamma, layers)
    shape = (len(anchors), settings.gamma)
    uniform = uniforms(settings.seed, request.prompt_id, "rollouts", *shape)[:, 1:]
    last = anchors + len(request.tokens) - 1  # cache row of the last committed token
    return roll(draft, last, first, uniform, settings.draft_warp, layers)


def candidates(distributions: Distributions, anchors: Tensor) -> Drawn:
    """The first draft token at each anchor."""
    names = ("q", *Q_STATS)
    return Drawn(
        distributions.candidate[anchors],
        **{name: getattr(distributions, name)[anchors] for name in names},
    )


def verdicts(
    pair: ModelPair,
    answer: Answer,
    rolled: Rollouts,
    anchors: Tensor,
    coins: Tensor,
    settings: HarvestSettings,
) -> Mapping[str, Tensor]:
    """What the target says of the rollouts. coins: [A, gamma]."""
    response, tokens = answer.distributions.response.cpu(), rolled.drawn.token.cpu()
    known = torch.full_like(anchors, settings.gamma)
    drafted = labels.drafted_length(tokens, pair.eos_ids)
    if settings.warp.temperature == 0:
        accept = labels.greedy_acceptance(tokens, response, anchors)
        if int(response[-1]) not in pair.eos_ids:
            known = labels.known_depth(anchors, len(response), settings.gamma)
    else:
        first = answer.distributions.accept[anchors]
        accept = rollout_acceptance(pair.target, rolled, first, drafted, coins, settings.warp).cpu()
    accepted = labels.accepted_length(accept, coins, drafted)
    return {"known": known, "drafted": drafted, "accepted": accepted, "accept_prob": accept}


def history(
    request: Request, answer: Answer, anchors: Tensor, coins: Tensor, settings: HarvestSettings
) -> Tensor:
    """[A, 3], what `predictors.draft_statistics.history_row` says before each anchor: verdicts on
    the candidates of all earlier positions, by the coin of their round where there is one. coins:
    [A]."""
    accept = answer.distributions.accept.cpu()
    everywhere = uniforms(settings.seed, request.prompt_id, "history", len(accept))
    everywhere[anchors] = coins
    return history_rows(everywhere < accept)[anchors]


def packed(hidden: Tensor, settings: HarvestSettings) -> np.ndarray:
    """Hidden states [..., D] as they are stored, if they are."""
    return pack_features(hidden if settings.features_stored else hidden.new_empty(0))
