"""Draft rollouts from many positions of one response at once.

Speculative decoding token by token would run the draft gamma times per position. Here one draft
forward advances all rollouts by one token: each row sees its own prefix of the response and its own
rollout, nothing else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from data_gen.responses.generate import at, blockwise, draw_from
from data_gen.siblings import top_tokens
from decoding.interfaces import LMOutput, RowsWanted
from decoding.models.cached_lm import CachedLM
from decoding.sampling import Warp
from predictors.features.draft_statistics import q_stats
from predictors.features.layers import side_by_side

MAX_BYTES = 100 << 20  # of the logits of one forward
# Rollouts advanced by one draft forward: full speed, and few rows of other rollouts to look past.
TOGETHER = 128


@dataclass(frozen=True)
class Drawn:
    """Draft tokens. q: the probability each was drawn with; top_token: [..., 3], the most probable
    ones there (`data_gen.siblings.top_tokens`); the others:
    `predictors.features.draft_statistics.q_stats`. All of one shape: [A], or [A, gamma] for whole
    rollouts."""

    token: Tensor
    q: Tensor
    q_drawn: Tensor
    q_max: Tensor
    q_margin: Tensor
    q_entropy: Tensor
    top_token: Tensor

    def take(self, index: Tensor) -> "Drawn":
        index = index.to(self.token.device)  # once for all columns
        return Drawn(*(getattr(self, field.name)[index] for field in fields(self)))

    def flat(self) -> "Drawn":
        """[A, gamma] -> [A * gamma]"""
        return Drawn(*(getattr(self, field.name).flatten(0, 1) for field in fields(self)))

    @classmethod
    def join(
        cls, how: Callable[[list[Tensor], int], Tensor], parts: Sequence["Drawn"], dim: int
    ) -> "Drawn":
        return cls(
            *(how([getattr(part, field.name) for part in parts], dim) for field in fields(cls))
        )


@dataclass(frozen=True)
class Rollouts:
    """Drafts of gamma tokens from A anchors. rows: [A] cache row of the last committed token before
    each; drawn: [A, gamma] each; draft_hidden: [A, gamma, L * H] bfloat16,
    of the draft at every drawn token; logits: [A, gamma - 1, V] of the draft at every token but the
    last, None of a greedy draft, whose distributions are one-hot."""

    rows: Tensor
    drawn: Drawn
    draft_hidden: Tensor
    logits: Tensor | None = None


def rows_per_forward(lm: CachedLM) -> int:
    """As many as have logits of `MAX_BYTES`."""
    return max(1, MAX_BYTES // (4 * lm.vocab_size))


def roll(
    draft: CachedLM, rows: Tensor, first: Drawn, uniform: Tensor, warp: Warp, layers: Sequence[int]
) -> Rollouts:
    """Continue the cached sequence from many of its rows at once, one forward per depth.

    rows: [A]; first: already drawn after those rows; uniform: [A, gamma - 1]. The cache is left as
    it was."""
    some = torch.arange(len(rows)).split(at_once(draft))
    parts = [
        _roll(draft, rows[index], first.take(index), uniform[index], warp, layers) for index in some
    ]
    drawn, hidden, logits = zip(*parts, strict=True)
    known = None if warp.temperature == 0 else torch.cat(logits)
    return Rollouts(rows, Drawn.join(torch.cat, drawn, 0), torch.cat(hidden), known)


def at_once(draft: CachedLM) -> int:
    """Rollouts advanced by one forward."""
    return min(TOGETHER, rows_per_forward(draft))


def roll_greedy(
    draft: CachedLM, response: Tensor, first: Drawn, gamma: int, layers: Sequence[int]
) -> Rollouts:
    """Rollouts of a greedy draft from every position of a response, each context run on once.

    Where the draft says what the response says, the rollout is that token and then the rollout of
    the next position. response: [T], all but its last token in the cache, which is left as it was;
    first: [T]."""
    base, count = draft.length, len(response)
    rows = torch.arange(count) + base - count
    own = first.token.cpu() != response
    own[-1] = True
    uniform = torch.zeros(int(own.sum()), gamma - 1)  # a greedy draft needs no coins
    some = own.nonzero()[:, 0]  # counted on the host, where they are known
    rolled = roll(draft, rows[own], first.take(some), uniform, Warp(0.0), layers)
    draft.crop(base - count + 1)
    hidden = draft.forward(response, hidden=layers, logits="none").hidden
    assert hidden is not None
    draft.crop(base)
    index = shared_tokens(own, gamma)
    drawn = Drawn.join(torch.cat, [first, rolled.drawn.flat()], 0).take(index)
    states = torch.cat([side_by_side(hidden), rolled.draft_hidden.flatten(0, 1)])
    return Rollouts(rows, drawn, states[index])


def candidate_states(
    draft: CachedLM, start: int, mixed: Tensor, position: Tensor, layers: Sequence[int]
) -> Tensor:
    """Hidden states [k, L * H] bfloat16 of the draft at `position` [k] of a sequence `mixed` [T] of
    candidates and response tokens, which follows the `start` tokens of the prompt. The draft must
    hold the prompt and the response but for its last token; it still does afterwards.

    A draft that reads its target's states has none of the target's at candidates, and none of its
    own but at the first few after a verified one. It runs on each candidate as decoding does: as
    the first one drafted after the response."""
    if draft.reads_target:
        return _along_response(draft, start, mixed, layers)[position]
    with draft.cut_to(start):
        wanted = position.tolist()
        hidden = draft.forward(mixed, hidden=layers, hidden_rows=wanted, logits="none").hidden
    assert hidden is not None
    return side_by_side(hidden)


def _along_response(draft: CachedLM, start: int, tokens: Tensor, layers: Sequence[int]) -> Tensor:
    """[T, L * H] at each of `tokens` [T], read as the first one drafted after the response so
    far."""
    parts, base = [], draft.length
    for some in torch.arange(len(tokens)).split(TOGETHER):
        hidden = forward_along(
            draft, start - 1 + some, tokens[some, None], base, hidden=layers, logits="none"
        ).hidden
        assert hidden is not None
        draft.crop(base)
        parts.append(side_by_side(hidden))
    return torch.cat(parts)


def shared_tokens(own: Tensor, gamma: int) -> Tensor:
    """Where each of A rollouts finds its tokens: [A, gamma] indices into the A first tokens, then
    those of the rollouts that were made, [n * gamma]. own: [A] bool, which were made (n of them,
    the last one included)."""
    count, depth = len(own), torch.arange(gamma)
    place = torch.arange(count)
    following = (
        torch.where(own, place, count).flip(0).cummin(0).values.flip(0)
    )  # the next one made, or itself
    steps = (following - place)[:, None]
    made = count + (own.cumsum(0) - 1)[following][:, None] * gamma + depth - steps
    return torch.where(depth < steps, place[:, None] + depth, made)


def _roll(
    draft: CachedLM, rows: Tensor, first: Drawn, uniform: Tensor, warp: Warp, layers: Sequence[int]
) -> tuple[Drawn, Tensor, Tensor]:
    base, gamma = draft.length, uniform.shape[1] + 1
    prefix = torch.arange(base) <= rows[:, None]
    own = torch.eye(len(rows), dtype=torch.bool)
    drawn, states, logits = [first], list[Tensor](), [torch.zeros(len(rows), 0, draft.vocab_size)]
    for depth in range(1, gamma + 1):
        visible = torch.cat([prefix, *[own] * depth], dim=1)
        wanted: RowsWanted = "all" if depth < gamma else "none"
        output = draft.forward_masked(
            drawn[-1].token, rows + depth, visible, hidden=layers, logits=wanted
        )
        assert output.hidden is not None
        states.append(side_by_side(output.hidden))
        if depth < gamma:
            drawn.append(blockwise(partial(draw, warp), output.logits, uniform[:, depth - 1]))
            logits += [] if warp.temperature == 0 else [output.logits[:, None]]
    draft.crop(base)
    kept = logits[1:] or logits
    return Drawn.join(torch.stack, drawn, 1), torch.stack(states, 1), torch.cat(kept, 1)


def draw(warp: Warp, logits: Tensor, uniform: Tensor) -> Drawn:
    """One token per row of the draft's logits [n, V]. uniform: [n]."""
    distribution = warp.probs(logits)
    token = draw_from(warp, distribution, uniform)
    q, top = at(distribution, token), top_tokens(logits)
    if warp != Warp():  # in place of the other: both would not fit a core's cache
        distribution = Warp().probs(logits)
    return Drawn(token, q, **q_stats(distribution, token), top_token=top)


def forward_along(
    lm: CachedLM,
    rows: Tensor,
    tokens: Tensor,
    base: int,
    hidden: Sequence[int] = (),
    logits: RowsWanted = "all",
) -> LMOutput:
    """One pass over the next tokens of rollouts that are known, in which each row sees its prefix
    and its rollout.

    rows: [A], as in `Rollouts`; tokens: [A, n]. base: cached rows of the sequence; those behind it
    hold the A rollouts' tokens before these, all first tokens, then all second ones. So do the n *
    A rows of the output, and the cache then."""
    count, depths = tokens.shape
    before = (lm.length - base) // count
    depth = torch.arange(1, depths + 1).repeat_interleave(count)
    prefix = (torch.arange(base) <= rows[:, None]).repeat(depths, 1)
    path = torch.eye(count, dtype=torch.bool).repeat(depths, depths) & (depth <= depth[:, None])
    visible = torch.cat(
        [prefix, torch.eye(count, dtype=torch.bool).repeat(depths, before), path], dim=1
    )
    positions = rows.repeat(depths) + before + depth
    return lm.forward_masked(tokens.T.flatten(), positions, visible, hidden=hidden, logits=logits)
