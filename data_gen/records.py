"""The records of one prompt, top to bottom: mixed sequences, rounds, and what both refer to.

Every function takes the models as they are while an answer is out (`data_gen.responses.generate`):
each holds the prompt and the response but for its last token. It leaves them so."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_gen import labels
from data_gen.requests import Request
from data_gen.responses.generate import Answer, Distributions, uniforms
from data_gen.rollouts import Drawn, Rollouts, at_once, candidate_states, roll, roll_greedy
from data_gen.settings import HarvestSettings
from data_gen.siblings import MORE
from data_gen.storage.shards import pack_features
from data_gen.verdicts import Coins, Warps, greedy_verdicts, sampled_verdicts
from decoding.models.cached_lm import CachedLM
from decoding.models.loading import ModelPair
from predictors.features.draft_statistics import Q_STATS, history_rows

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
    coins = coins_of(request, len(anchors), settings)
    before = torch.cat([request.tokens[-1:], response])
    parts, start = list[Row](), 0
    for rolled in rollouts(pair.draft, request, answer, anchors, settings):
        some = torch.arange(start, start := start + len(rolled.rows))
        parts.append(judged(pair, answer, rolled, anchors[some], take(coins, some), settings))
    return {
        "anchor": anchors,
        "committed": before[anchors],
        "history": history(request, answer, anchors, coins.verdicts[:, 0], settings),
        "target_hidden": packed(answer.target_hidden[: len(anchors)], settings),
        "draft_first": packed(answer.draft_first[: len(anchors)], settings),
        **{name: joined([part[name] for part in parts]) for name in parts[0]},
    }


def coins_of(request: Request, anchors: int, settings: HarvestSettings) -> Coins:
    shape = (anchors, settings.gamma)
    return Coins(
        uniforms(settings.seed, request.prompt_id, "verdicts", *shape),
        uniforms(settings.seed, request.prompt_id, "siblings", *shape, MORE),
    )


def take(coins: Coins, some: Tensor) -> Coins:
    return Coins(coins.verdicts[some], coins.siblings[some])


def joined(parts: list[Any]) -> Any:
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else torch.cat(parts)


def rollouts(
    draft: CachedLM, request: Request, answer: Answer, anchors: Tensor, settings: HarvestSettings
) -> Iterator[Rollouts]:
    """gamma draft tokens from each anchor, the first of which are the candidates of the answer; a
    part of the anchors at a time, in order."""
    first, layers = candidates(answer.distributions, anchors), settings.layers.of("draft_hidden")
    shared = not draft.reads_target  # else a context drafted and the same one verified are two
    if shared and settings.stride == 1 and settings.draft_warp.temperature == 0:
        response = answer.distributions.response.cpu()
        yield roll_greedy(draft, response, first, settings.gamma, layers)
        return
    shape = (len(anchors), settings.gamma)
    uniform = uniforms(settings.seed, request.prompt_id, "rollouts", *shape)[:, 1:]
    last = anchors + len(request.tokens) - 1  # cache row of the last committed token
    for some in torch.arange(len(anchors)).split(at_once(draft)):
        warp, coins = settings.draft_warp, uniform[some]
        yield roll(draft, last[some], first.take(some), coins, warp, layers)


def candidates(distributions: Distributions, anchors: Tensor) -> Drawn:
    """The first draft token at each anchor."""
    names = ("q", *Q_STATS, "top_token")
    anchors = anchors.to(distributions.candidate.device)  # once for all columns
    return Drawn(
        distributions.candidate[anchors],
        **{name: getattr(distributions, name)[anchors] for name in names},
    )


def judged(
    pair: ModelPair,
    answer: Answer,
    rolled: Rollouts,
    anchors: Tensor,
    coins: Coins,
    settings: HarvestSettings,
) -> Row:
    """Some rollouts, and what the target says of them."""
    response, tokens = answer.distributions.response.cpu(), rolled.drawn.token.cpu()
    known = torch.full_like(anchors, settings.gamma)
    drafted = labels.drafted_length(tokens, pair.eos_ids)
    first, warps = answer.distributions.take(anchors), Warps(settings.warp, settings.draft_warp)
    if settings.warp.temperature == 0:
        found = greedy_verdicts(rolled, first, (response, anchors), coins, warps.draft)
        if int(response[-1]) not in pair.eos_ids:
            known = labels.known_depth(anchors, len(response), settings.gamma)
    else:
        found = sampled_verdicts(pair.target, rolled, first, drafted, coins, warps)
    verdicts = vars(found)
    accept = verdicts.pop("accept")
    return {
        "draft_hidden": packed(rolled.draft_hidden, settings),
        **{name: column.cpu() for name, column in vars(rolled.drawn).items()},
        "known": known,
        "drafted": drafted,
        "accepted": labels.accepted_length(accept, coins.verdicts, drafted),
        "accept_prob": accept,
        **verdicts,
    }


def history(
    request: Request, answer: Answer, anchors: Tensor, coins: Tensor, settings: HarvestSettings
) -> Tensor:
    """[A, 3], what `predictors.features.draft_statistics.history_row` says before each anchor:
    verdicts on the candidates of all earlier positions, by the coin of their round where there is
    one. coins: [A]."""
    accept = answer.distributions.accept.cpu()
    everywhere = uniforms(settings.seed, request.prompt_id, "history", len(accept))
    everywhere[anchors] = coins
    return history_rows(everywhere < accept)[anchors]


def packed(hidden: Tensor, settings: HarvestSettings) -> np.ndarray:
    """Hidden states [..., D] as they are stored, if they are."""
    return pack_features(hidden if settings.features_stored else hidden.new_empty(0))
