"""Answers whose responses are given: both models run once along prompt and response, nothing is
generated.

The given tokens are taken to be drawn from the target under the same warp, by whatever engine.
Engines round differently, so now and then the target would never have said a given token (of a
greedy target: says another one). The response is taken up to there, and ends with a token that
the target draws itself, as a generated one would have."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from data_gen.columns import blockwise
from data_gen.own_tokens import Warps, own_tokens
from data_gen.responses.generate import Answer, Distributions, compare
from data_gen.settings import HarvestSettings
from decoding.models.cached_lm import CachedLM
from decoding.models.loading import ModelPair
from predictors.features.layers import side_by_side

MAX_BYTES = 100 << 20  # of the logits of one forward


def teacher_forced_answers(
    pair: ModelPair,
    prompts: Sequence[Tensor],
    responses: Sequence[Tensor],
    uniform: Tensor,
    settings: HarvestSettings,
) -> Iterator[Answer]:
    """Yield answers as `read_answers` does, one prompt after another. responses: token ids, [1 <=
    T_b <= max_new_tokens] each."""
    for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        coins = uniform[:, index, : len(response)].T
        yield Answer(index, *teacher_force(pair, prompt, response, coins, settings))


def teacher_force(
    pair: ModelPair, prompt: Tensor, response: Tensor, uniform: Tensor, settings: HarvestSettings
) -> tuple[Distributions, Tensor, Tensor]:
    """Distributions, `Answer.target_hidden` and `Answer.draft_first` of one answer. uniform: [T,
    4], for a token of the target's own, for candidates and their siblings.

    Logits take at most `MAX_BYTES` at a time. Afterwards both caches hold what
    `read_answers` says."""
    target, draft, layers = pair.target, pair.draft, settings.layers
    hidden, parts = [_open(target, draft, prompt, layers.target_layers)], list[Distributions]()
    first, warps = list[Tensor](), Warps(settings.warp, settings.draft_warp, own_tokens(draft))
    before = torch.cat([prompt[-1:], response[:-1]])  # the token before each position
    for rows in torch.arange(len(response)).split(max(1, MAX_BYTES // (4 * target.vocab_size))):
        ours = target.forward(before[rows], **_at(rows + 1, layers.target_layers, settings))
        theirs = draft.forward(before[rows], **_at(rows, layers.draft_layers, settings))
        given = response[rows].to(ours.logits.device)
        parts.append(
            blockwise(partial(compare, warps), ours.logits, theirs.logits, uniform[rows], given)
        )
        for noted, states in ((hidden, ours.hidden), (first, theirs.hidden)):
            if states is not None:
                noted.append(side_by_side(states))
        if not torch.equal(parts[-1].response, given):
            break
    distributions = Distributions.join(parts)
    length = _agreed(distributions.response.cpu(), response)
    for lm in (target, draft):
        lm.crop(len(prompt) + length - 1)
    anchors = -(-length // settings.stride)
    return (
        distributions.take(slice(length)),
        torch.cat(hidden)[:anchors],
        torch.cat(first)[:anchors],
    )


def _at(tokens: Tensor, layers: Sequence[int], settings: HarvestSettings) -> dict[str, Any]:
    """What of the hidden states is wanted where so many `tokens` [n] are out."""
    rows = (tokens % settings.stride == 0).nonzero()[:, 0].tolist()
    return {"hidden": layers if rows else (), "hidden_rows": rows}


def _agreed(said: Tensor, given: Tensor) -> int:
    """Tokens up to and including the first in which the two differ."""
    same = int((said == given[: len(said)]).int().cumprod(0).sum())
    return min(same + 1, len(given))


def _open(target: CachedLM, draft: CachedLM, prompt: Tensor, layers: Sequence[int]) -> Tensor:
    """Run both models on the prompt but for its last token. Returns the target's hidden states
    before the first anchor, [1, L * H]."""
    for lm in (target, draft):
        lm.reset()
        if len(prompt) > 2:
            lm.forward(prompt[:-2], logits="none")
    draft.forward(prompt[-2:-1], logits="none")
    hidden = target.forward(prompt[-2:-1], hidden=layers, logits="none").hidden
    assert hidden is not None
    return side_by_side(hidden)
