"""Target responses, a batch of prompts at a time, with the draft reading along; the random numbers
of the harvest.

Target and draft advance together, so every token of prompt and response runs through each model
exactly once and the distributions p and q of each response position meet while they are at hand.

Every number drawn for a prompt comes from a stream seeded with (seed, prompt id, purpose), so a
response does not depend on which prompts share its batch. One reservation: matrix products of
different batch sizes round differently, so a draw that falls on the boundary between two tokens may
now and then come out differently."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from data_gen.columns import Columns, at, blockwise
from data_gen.labels import acceptance, overlap
from data_gen.own_tokens import Warps, own_tokens
from data_gen.settings import HarvestSettings
from data_gen.siblings import Siblings, siblings, top_tokens
from decoding.models.layers.batches import batch_of
from decoding.models.loading import ModelPair
from decoding.picking import largest, pick
from decoding.sampling import Warp
from predictors.features.draft_statistics import q_stats
from predictors.features.layers import side_by_side

# Share of unfinished sequences at which the finished ones leave the batch (a copy of the cache).
COMPACT_BELOW = 0.75


def uniforms(seed: int, prompt_id: str, purpose: str, *shape: int) -> Tensor:
    """Numbers in [0, 1), float64, of the stream that belongs to this prompt and purpose."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{prompt_id}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
    return torch.rand(*shape, dtype=torch.float64, generator=generator)


@dataclass(frozen=True)
class Distributions(Columns):
    """What both models say at n positions. response: [n] int64, drawn from p; candidate: [n] int64,
    drawn from q; q, accept: [n], the candidate's draft probability and min(1, p / q); overlap: [n],
    sum(min(p, q)); q_drawn, q_max, q_margin, q_entropy: [n], of the candidate
    (`predictors.features.draft_statistics.q_stats`); top_token: [n, 3], and what is known of its
    siblings (`data_gen.siblings`); excess: [n], of a given token -log p - H(p), in nats, infinite
    where p = 0; 0 for a drawn one."""

    response: Tensor
    candidate: Tensor
    q: Tensor
    accept: Tensor
    overlap: Tensor
    q_drawn: Tensor
    q_max: Tensor
    q_margin: Tensor
    q_entropy: Tensor
    top_token: Tensor
    rrsw_token: Tensor
    rrsw_accept: Tensor
    hub_accept: Tensor
    top_accept: Tensor
    excess: Tensor


@dataclass(frozen=True)
class Answer:
    """A response of T tokens to prompt `index`. distributions: at positions 0..T-1; target_hidden:
    [A, L * H] bfloat16, at the last verified position (that of the token before the last committed
    one) when 0, stride, 2 stride, ... tokens are out; draft_first: [A, L * H] bfloat16, of the
    draft at the last committed token then."""

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
    candidates; advance is told after each step how many tokens it brought. While an answer is out,
    both models hold its prompt and response without the last token. Raises UserError when a model
    returns NaN logits."""
    batch = _Batch(pair, prompts, uniform, settings)
    ends = torch.tensor(sorted(pair.eos_ids))
    live = torch.ones(len(prompts), dtype=torch.bool)
    for position in range(settings.max_new_tokens):
        drawn = batch.step(position)
        advance(int(live.sum()))
        ended = live & (torch.isin(drawn, ends) | (position + 1 == settings.max_new_tokens))
        for place in ended.nonzero()[:, 0].tolist():
            yield batch.answer(place, position + 1)
        live &= ~ended
        if not live.any():
            return
        if live.float().mean() <= COMPACT_BELOW:
            batch.keep(live.nonzero()[:, 0])
            live = live[live]


class _Batch:
    """The unfinished sequences, and what was noted so far about all of them."""

    def __init__(
        self, pair: ModelPair, prompts: Sequence[Tensor], uniform: Tensor, settings: HarvestSettings
    ) -> None:
        self._uniform, self._settings = uniform, settings
        self._warps = Warps(settings.warp, settings.draft_warp, own_tokens(pair.draft))
        self._rows = torch.arange(len(prompts))  # the prompt each sequence of the batch belongs to
        self._distributions: dict[str, Tensor] = {}  # [B, max_new] each
        self._hidden: list[Tensor] = []  # [B, L * H] each, one per multiple of the stride
        self._draft_first: list[Tensor] = []
        opening, room = [prompt[:-2] for prompt in prompts], settings.max_new_tokens + 1
        self._target = batch_of(pair.target, opening, room)
        self._draft = batch_of(pair.draft, opening, room, self._target)
        before_last, self._tokens = (
            torch.stack([prompt[index] for prompt in prompts]) for index in (-2, -1)
        )
        hidden = self._target.step(before_last, settings.layers.target_layers).hidden
        self._draft.step(before_last)
        self._note(self._hidden, hidden)

    def step(self, position: int) -> Tensor:
        """Draw the response tokens of one position. Returns them, int64 [b] on the CPU."""
        settings, layers = self._settings, self._settings.layers
        next_anchor = (position + 1) % settings.stride == 0
        ours = self._target.step(self._tokens, layers.target_layers if next_anchor else ())
        anchor = position % settings.stride == 0
        theirs = self._draft.step(self._tokens, layers.draft_layers if anchor else ())
        uniform = self._uniform[: 4 if anchor else 2, self._rows, position].T
        distributions = blockwise(
            partial(compare, self._warps), ours.logits, theirs.logits, uniform
        )
        self._tokens = distributions.response.cpu()
        rows = self._rows.to(distributions.response.device)  # sent once
        for field in fields(Distributions):
            values = getattr(distributions, field.name)
            shape = (*self._uniform.shape[1:], *values.shape[1:])
            column = self._distributions.setdefault(field.name, values.new_zeros(shape))
            column[rows, position] = values
        self._note(self._hidden, ours.hidden)
        self._note(self._draft_first, theirs.hidden)
        return self._tokens

    def answer(self, place: int, length: int) -> Answer:
        """The finished answer of the sequence at `place` of the batch; both models take over its
        cached rows."""
        self._target.hand_over(place)
        self._draft.hand_over(place)
        row = int(self._rows[place])
        distributions = Distributions(
            **{name: column[row, :length] for name, column in self._distributions.items()}
        )
        anchors = -(-length // self._settings.stride)
        states = [
            torch.stack([hidden[row] for hidden in noted[:anchors]])
            for noted in (self._hidden, self._draft_first)
        ]
        return Answer(row, distributions, *states)

    def keep(self, places: Tensor) -> None:
        """Drop all other sequences from the batch."""
        self._target.keep(places)
        self._draft.keep(places)
        self._rows, self._tokens = self._rows[places], self._tokens[places]

    def _note(self, noted: list[Tensor], hidden: Tensor | None) -> None:
        """hidden: [L, b, H] of the unfinished sequences; None where none is wanted."""
        if hidden is None:
            return
        rows = side_by_side(hidden)
        everybody = rows.new_zeros(self._uniform.shape[1], rows.shape[1])
        everybody[self._rows] = rows
        noted.append(everybody)


def compare(
    warps: Warps, p_logits: Tensor, q_logits: Tensor, uniform: Tensor, given: Tensor | None = None
) -> Distributions:
    """Warp the logits of the target [n, V] and the draft [n, columns] and draw a response token, a
    candidate and its siblings per row. uniform: [n, 4], or [n, 2] where nothing is asked about
    siblings.

    given: [n], taken instead of the draw where the warped target may say it.
    """
    own, whole, q = warps.own, warps.target.probs(p_logits), warps.draft.probs(q_logits)
    unwarped_q = q if warps.draft == Warp() else Warp().probs(q_logits)
    response, excess = draw_from(warps.target, whole, uniform[:, 0]), whole.new_zeros(len(whole))
    if given is not None:
        excess = -at(whole, given).log() - torch.special.entr(whole).sum(-1)
        response = torch.where(at(whole, given) > 0, given, response)
    p, candidate = own.merged(whole), draw_from(warps.draft, q, uniform[:, 1])
    p_drawn, q_drawn, top = at(p, candidate), at(q, candidate), top_tokens(q_logits)
    if uniform.shape[1] == 2:
        others = Siblings.unknown(len(candidate), device=p.device)
    else:
        others = siblings(p, q, candidate, top, uniform[:, 2:].to(p.device))
    return Distributions(
        response=response,
        candidate=own.ids(candidate),
        q=q_drawn,
        accept=acceptance(p_drawn, q_drawn),
        overlap=overlap(p, q),
        **q_stats(unwarped_q, candidate),
        top_token=own.ids(top),
        **vars(others) | {"rrsw_token": own.ids(others.rrsw_token)},
        excess=excess,
    )


def draw_from(warp: Warp, probs: Tensor, uniform: Tensor) -> Tensor:
    """The tokens that `uniform` [n] stands for under distributions [n, V] of `warp`: int64 [n]."""
    return largest(probs) if warp.temperature == 0 else pick(probs, uniform.to(probs.device))
