"""Answers: target responses, generated here or given, with the draft's distributions along them;
the random numbers of the harvest.

Generated responses: a batch of prompts at a time, target and draft advance together, so every token
of prompt and response runs through each model exactly once, and p and q of each response position
are available at the same time.

Given responses (`data_gen.responses`): both models run once along prompt and response. The given
tokens are taken to be drawn from the target under the same warp, by any engine. Engines round
differently, so occasionally a given token has probability 0 under the target (with a greedy target:
is not its choice). The response is cut there, and ends with a token that the target draws itself,
as a generated one would have.

Every number drawn for a prompt comes from a stream seeded with (seed, prompt id, purpose), so a
response does not depend on which prompts share its batch. One exception: matrix products of
different batch sizes round differently, so a draw on the boundary between two tokens may
occasionally differ."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from data_gen.columns import Columns, Warps, at, blockwise
from data_gen.labels import Siblings, acceptance, overlap, siblings, top_tokens
from data_gen.settings import HarvestSettings
from decoding.models.batched_lm import batch_of
from decoding.models.loading import ModelPair
from decoding.picking import largest, pick
from decoding.processors import scored
from decoding.sampling import Warp
from predictors.features.draft_statistics import q_stats
from predictors.features.layers import side_by_side

# Share of unfinished sequences below which finished ones are dropped from the batch, which copies
# the cache.
COMPACT_BELOW = 0.75
MAX_BYTES = 100 << 20  # of the logits of one forward along a given response


def uniforms(seed: int, prompt_id: str, purpose: str, *shape: int) -> Tensor:
    """Return numbers in [0, 1), float64, of the stream that belongs to this prompt and purpose."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{prompt_id}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
    return torch.rand(*shape, dtype=torch.float64, generator=generator)


@dataclass(frozen=True)
class Drawn(Columns):
    """Draft tokens. q: the probability each was drawn with; top_token: [..., 3], the most probable
    tokens there (`data_gen.labels.top_tokens`); the others as in
    `predictors.features.draft_statistics.q_stats`. All of one shape: [A], or [A, gamma] for whole
    rollouts."""

    token: Tensor
    q: Tensor
    q_drawn: Tensor
    q_max: Tensor
    q_margin: Tensor
    q_entropy: Tensor
    top_token: Tensor


@dataclass(frozen=True)
class Distributions(Drawn, Siblings):
    """The outputs of both models at n positions: a candidate drawn from q, its siblings, and, [n]
    each, response: int64, drawn from p; accept: min(1, p / q) of the candidate; overlap:
    sum(min(p, q)); excess: -log p - H(p) of a given token, in nats, infinite where p = 0; 0 for a
    drawn one."""

    response: Tensor
    accept: Tensor
    overlap: Tensor
    excess: Tensor


@dataclass(frozen=True)
class Answer:
    """A response of T tokens to prompt `index`. distributions: at positions 0..T-1; target_hidden:
    [A, L * H] bfloat16, at the last verified position (that of the token before the last committed
    one) after 0, stride, 2 stride, ... response tokens; draft_first: [A, L * H] bfloat16, of the
    draft at the last committed token there."""

    index: int
    distributions: Distributions
    target_hidden: Tensor
    draft_first: Tensor


def read_answers(
    pair: ModelPair,
    prompts: Sequence[Tensor],
    uniform: Tensor,
    settings: HarvestSettings,
    advance: Callable[[int], object] = lambda tokens: None,
) -> Iterator[Answer]:
    """Answer the prompts and yield each answer when it ends: after an end token or
    `max_new_tokens`.

    prompts: token ids, [P_b >= 2] each; uniform: [4, B, max_new_tokens], for responses and for
    candidates; advance is called after each step with its number of tokens. While an answer is
    yielded, both models hold its prompt and response without the last token. Raises UserError when
    a model returns NaN logits."""
    layers, end_ids = settings.layers, torch.tensor(sorted(pair.eos_ids))
    compared = partial(compare, Warps.of(settings, pair.draft))
    opening, most = [prompt[:-2] for prompt in prompts], settings.max_new_tokens
    target = batch_of(pair.target, opening, most + 1)
    draft = batch_of(pair.draft, opening, most + 1, target)
    rows = torch.arange(len(prompts))  # the prompt each sequence of the batch belongs to
    live = torch.ones(len(prompts), dtype=torch.bool)
    noted = dict[str, Tensor]()  # [B, max_new, ...] of all prompts
    said = torch.zeros(len(prompts), most, dtype=torch.long)  # on the host
    target_hidden, draft_first = list[Tensor](), list[Tensor]()  # [B, L * H] for each anchor

    def note(states: list[Tensor], hidden: Tensor | None) -> None:
        if hidden is not None:
            here = side_by_side(hidden)
            states.append(here.new_zeros(len(prompts), here.shape[1]))
            states[-1][rows] = here

    def text(row: int) -> tuple[Tensor, int]:
        """Return what row `row` of the batch has read at `position`."""
        index = int(rows[row])
        return torch.cat([prompts[index], said[index, :position]]), len(prompts[index])

    before_last = torch.stack([prompt[-2] for prompt in prompts])
    note(target_hidden, target.step(before_last, layers.target_layers).hidden)
    draft.step(before_last)
    tokens = torch.stack([prompt[-1] for prompt in prompts])
    for position in range(most):
        anchor, next_anchor = (count % settings.stride == 0 for count in (position, position + 1))
        p = target.step(tokens, layers.target_layers if next_anchor else ())
        q = draft.step(tokens, layers.draft_layers if anchor else ())
        numbers = uniform[: 4 if anchor else 2, rows, position].T
        p_logits = scored(settings.warp, p.logits, text, pair.eos_ids)
        q_logits = scored(settings.draft_warp, q.logits, text, pair.eos_ids)
        distributions = blockwise(compared, p_logits, q_logits, q.logits, numbers)
        tokens = distributions.response.cpu()
        said[rows, position] = tokens
        placed = rows.to(distributions.response.device)  # sent once
        for name, values in vars(distributions).items():
            shape = (*uniform.shape[1:], *values.shape[1:])
            noted.setdefault(name, values.new_zeros(shape))[placed, position] = values
        note(target_hidden, p.hidden)
        note(draft_first, q.hidden)
        advance(int(live.sum()))
        ended = live & (torch.isin(tokens, end_ids) | (position + 1 == most))
        for index in ended.nonzero()[:, 0].tolist():
            target.hand_over(index)
            draft.hand_over(index)
            row, anchors = int(rows[index]), position // settings.stride + 1
            yield Answer(
                row,
                Distributions(
                    **{name: values[row, : position + 1] for name, values in noted.items()}
                ),
                torch.stack([hidden[row] for hidden in target_hidden[:anchors]]),
                torch.stack([hidden[row] for hidden in draft_first[:anchors]]),
            )
        live &= ~ended
        if not live.any():
            return
        if live.float().mean() <= COMPACT_BELOW:
            going = live.nonzero()[:, 0]
            target.keep(going)
            draft.keep(going)
            rows, tokens, live = rows[going], tokens[going], live[going]


def teacher_forced_answers(
    pair: ModelPair,
    prompts: Sequence[Tensor],
    responses: Sequence[Tensor],
    uniform: Tensor,
    settings: HarvestSettings,
) -> Iterator[Answer]:
    """Yield answers as `read_answers` does, one prompt after another. responses: token ids, [1 <=
    T_b <= max_new_tokens] each. Logits take at most `MAX_BYTES` at a time."""
    target, draft, layers = pair.target, pair.draft, settings.layers
    compared = partial(compare, Warps.of(settings, draft))
    at_once = max(1, MAX_BYTES // (4 * target.vocab_size))

    def at_anchors(tokens: Tensor, layers: Sequence[int]) -> dict[str, Any]:
        """Return the request for hidden states after these numbers of response `tokens` [n]."""
        rows = (tokens % settings.stride == 0).nonzero()[:, 0].tolist()
        return {"hidden": layers if rows else (), "hidden_rows": rows}

    for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        for lm in (target, draft):
            lm.reset()
            if len(prompt) > 2:
                lm.forward(prompt[:-2], logits="none")
        draft.forward(prompt[-2:-1], logits="none")
        opened = target.forward(prompt[-2:-1], hidden=layers.target_layers, logits="none")
        target_hidden, draft_first = [opened.hidden], list[Tensor | None]()
        parts = list[Distributions]()
        before = torch.cat([prompt[-1:], response[:-1]])  # the token before each position
        for rows in torch.arange(len(response)).split(at_once):
            p = target.forward(before[rows], **at_anchors(rows + 1, layers.target_layers))
            q = draft.forward(before[rows], **at_anchors(rows, layers.draft_layers))
            given = response[rows].to(p.logits.device)
            numbers, text = uniform[:, index, rows].T, partial(_up_to, prompt, response, rows)
            p_logits = scored(settings.warp, p.logits, text, pair.eos_ids)
            q_logits = scored(settings.draft_warp, q.logits, text, pair.eos_ids)
            parts.append(blockwise(compared, p_logits, q_logits, q.logits, numbers, given))
            target_hidden.append(p.hidden)
            draft_first.append(q.hidden)
            if not torch.equal(parts[-1].response, given):
                break
        distributions = Distributions.join(parts)
        drawn = distributions.response.cpu()
        same = int((drawn == response[: len(drawn)]).int().cumprod(0).sum())
        length = min(same + 1, len(response))  # up to the first in which the two differ
        for lm in (target, draft):
            lm.crop(len(prompt) + length - 1)
        anchors = -(-length // settings.stride)
        states = (
            torch.cat([side_by_side(hidden) for hidden in noted if hidden is not None])[:anchors]
            for noted in (target_hidden, draft_first)
        )
        yield Answer(index, distributions.take(slice(length)), *states)


def _up_to(prompt: Tensor, response: Tensor, rows: Tensor, row: int) -> tuple[Tensor, int]:
    """Return what is read before token rows[row] of a response."""
    return torch.cat([prompt, response[: rows[row]]]), len(prompt)


def compare(
    warps: Warps,
    p_logits: Tensor,
    q_logits: Tensor,
    unwarped: Tensor,
    uniform: Tensor,
    given: Tensor | None = None,
) -> Distributions:
    """Warp the logits of the target [n, V] and the draft [n, columns], as processors have left
    them, and draw a response token, a candidate and its siblings per row. unwarped: the draft's as
    they were; uniform: [n, 4], or [n, 2] without siblings.

    given: [n], taken instead of the draw where its p is above 0.
    """
    own, whole, q = warps.own, warps.target.rest.probs(p_logits), warps.draft.rest.probs(q_logits)
    unwarped_q = q if warps.draft == Warp() else Warp().probs(unwarped)
    response, excess = draw_from(warps.target, whole, uniform[:, 0]), whole.new_zeros(len(whole))
    if given is not None:
        excess = -at(whole, given).log() - torch.special.entr(whole).sum(-1)
        response = torch.where(at(whole, given) > 0, given, response)
    p, candidate = own.merged(whole), draw_from(warps.draft, q, uniform[:, 1])
    p_drawn, q_drawn, top = at(p, candidate), at(q, candidate), top_tokens(unwarped)
    if uniform.shape[1] == 2:
        others = Siblings.unknown(len(candidate), device=p.device)
    else:
        others = siblings(p, q, candidate, top, uniform[:, 2:].to(p.device))
    return Distributions(
        response=response,
        token=own.ids(candidate),
        q=q_drawn,
        accept=acceptance(p_drawn, q_drawn),
        overlap=overlap(p, q),
        **q_stats(unwarped_q, candidate),
        top_token=own.ids(top),
        **vars(others) | {"rrsw_token": own.ids(others.rrsw_token)},
        excess=excess,
    )


def draw_from(warp: Warp, probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the tokens that `uniform` [n] stands for under distributions [n, V] of `warp`, int64
    [n]."""
    return largest(probs) if warp.temperature == 0 else pick(probs, uniform.to(probs.device))
