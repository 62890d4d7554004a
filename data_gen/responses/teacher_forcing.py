"""Answers whose responses are given: both models run once along prompt and response, nothing is
generated.

The given tokens are taken to be drawn from the target under the same warp, by whatever engine.
Engines round differently, so now and then the target would never have said a given token (of a
greedy target: says another one). The response is followed up to there, and ends with a token that
the target draws itself, as a generated one would have."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import partial

import torch
from torch import Tensor

from data_gen.responses.generate import Answer, Distributions, ResponseSettings, blockwise, compare
from data_gen.rollouts import rows_per_forward
from decoding.models.cached_lm import CachedLM
from predictors.inputs import extract


def teacher_forced_answers(
    target: CachedLM,
    draft: CachedLM,
    prompts: Sequence[Tensor],
    responses: Sequence[Tensor],
    uniform: Tensor,
    reading: ResponseSettings,
) -> Iterator[Answer]:
    """As `read_answers`, one prompt after another. responses: token ids, [1 <= T_b <= max_new]
    each."""
    for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        coins = uniform[:, index, : len(response)].T
        distributions, features = teacher_force(target, draft, prompt, response, coins, reading)
        yield Answer(index, distributions, features)


def teacher_force(
    target: CachedLM,
    draft: CachedLM,
    prompt: Tensor,
    response: Tensor,
    uniform: Tensor,
    reading: ResponseSettings,
) -> tuple[Distributions, Tensor]:
    """Distributions and features of one answer. uniform: [T, 2], for a token of the target's own
    and for candidates.

    Logits take at most `data_gen.rollouts.MAX_BYTES` at a time. Afterwards both caches hold what
    `read_answers` says."""
    features = [_open(target, draft, prompt, reading)]
    before = torch.cat(
        [prompt[-1:], response[:-1]]
    )  # the token before each position of the response
    parts: list[Distributions] = []
    for rows in torch.arange(len(response)).split(rows_per_forward(target)):
        anchors = ((rows + 1) % reading.stride == 0).nonzero()[:, 0]
        layers = reading.features.layers if len(anchors) else ()
        ours = target.forward(before[rows], hidden=layers, hidden_rows=anchors.tolist())
        theirs = draft.forward(before[rows])
        distribution, given = (
            partial(compare, reading.warp, reading.draft_warp),
            response[rows].to(ours.logits.device),
        )
        parts.append(blockwise(distribution, ours.logits, theirs.logits, uniform[rows], given))
        if ours.hidden is not None:
            features.append(_features(target, ours.hidden, response[rows[anchors]], reading))
        if not torch.equal(parts[-1].response, given):
            break
    distributions = Distributions(
        *(
            torch.cat([getattr(part, field.name) for part in parts])
            for field in fields(Distributions)
        )
    )
    length = _followed(distributions.response.cpu(), response)
    for lm in (target, draft):
        lm.crop(len(prompt) + length - 1)
    distributions = Distributions(
        *(getattr(distributions, field.name)[:length] for field in fields(Distributions))
    )
    return distributions, torch.cat(features)[: -(-length // reading.stride)]


def _followed(said: Tensor, given: Tensor) -> int:
    """Tokens up to and including the first in which the two differ."""
    same = int((said == given[: len(said)]).int().cumprod(0).sum())
    return min(same + 1, len(given))


def _open(target: CachedLM, draft: CachedLM, prompt: Tensor, reading: ResponseSettings) -> Tensor:
    """Run both models on the prompt but for its last token. Returns the features of the first
    anchor, [1, D]."""
    for lm in (target, draft):
        lm.reset()
        if len(prompt) > 2:
            lm.forward(prompt[:-2], logits="none")
    draft.forward(prompt[-2:-1], logits="none")
    hidden = target.forward(prompt[-2:-1], hidden=reading.features.layers, logits="none").hidden
    assert hidden is not None
    return _features(target, hidden, prompt[-1:], reading)


def _features(
    target: CachedLM, hidden: Tensor, following: Tensor, reading: ResponseSettings
) -> Tensor:
    """[n, D] at n tokens. hidden: [len(layers), n, H] of them; following: [n], the next committed
    ones."""
    embedding = torch.stack([target.embed(token) for token in following.tolist()])
    return extract(hidden, reading.features, embedding)
