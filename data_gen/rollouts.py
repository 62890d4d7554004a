"""Draft rollouts from many positions of one response at once, and the target's verdict on them.

Speculative decoding token by token would run the draft gamma times per position. Here one draft
forward advances all rollouts by one token: each row sees its own prefix of the response and its own
rollout, nothing else. The target then runs on the rollouts in masked passes, a few tokens at a
time, as long as they may still be accepted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from data_gen.labels import acceptance, entropy
from data_gen.responses.generate import at, blocks, blockwise, draw_from
from decoding.interfaces import LMOutput, RowsWanted
from decoding.models.cached_lm import CachedLM
from decoding.sampling import Warp
from predictors.inputs import FeatureSpec, extract

MAX_BYTES = 100 << 20  # of the logits of one forward
# Probability that a rollout is still accepted, below which its later tokens are not looked at.
NEGLIGIBLE = 1e-3
# Tokens whose verdicts one target forward finds: few where many rollouts are still alive.
STAGES = (2, 3, 4, 5)
# Rollouts advanced by one draft forward: full speed, and few rows of other rollouts to look past.
TOGETHER = 128


@dataclass(frozen=True)
class Drawn:
    """Draft tokens. q: the probability each was drawn with; max_q, entropy: of the draft at
    temperature 1 without filters where it was drawn (as stop rules read it). All of one shape: [A],
    or [A, gamma] for whole rollouts."""

    token: Tensor
    q: Tensor
    max_q: Tensor
    entropy: Tensor

    def take(self, index: Tensor) -> "Drawn":
        return Drawn(*(getattr(self, field.name)[index] for field in fields(self)))

    def flat(self) -> "Drawn":
        return Drawn(*(getattr(self, field.name).flatten() for field in fields(self)))

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
    each; drawn: [A, gamma] each; features: [A, gamma, D] of the draft at every drawn token (what a
    head that scores it reads)."""

    rows: Tensor
    drawn: Drawn
    features: Tensor


def rows_per_forward(lm: CachedLM) -> int:
    """As many as have logits of `MAX_BYTES`."""
    return max(1, MAX_BYTES // (4 * lm.vocab_size))


def roll(
    draft: CachedLM, rows: Tensor, first: Drawn, uniform: Tensor, warp: Warp, spec: FeatureSpec
) -> Rollouts:
    """Continue the cached sequence from many of its rows at once, one forward per depth.

    rows: [A]; first: already drawn after those rows; uniform: [A, gamma - 1]. The cache is left as
    it was."""
    some = torch.arange(len(rows)).split(min(TOGETHER, rows_per_forward(draft)))
    parts = [
        _roll(draft, rows[index], first.take(index), uniform[index], warp, spec) for index in some
    ]
    drawn, features = zip(*parts, strict=True)
    return Rollouts(rows, Drawn.join(torch.cat, drawn, 0), torch.cat(features))


def roll_greedy(
    draft: CachedLM, response: Tensor, first: Drawn, gamma: int, spec: FeatureSpec
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
    rolled = roll(draft, rows[own], first.take(own), uniform, Warp(0.0), spec)
    draft.crop(base - count + 1)
    hidden = draft.forward(response, hidden=spec.layers, logits="none").hidden
    assert hidden is not None
    draft.crop(base)
    index = shared_tokens(own, gamma)
    drawn = Drawn.join(torch.cat, [first, rolled.drawn.flat()], 0).take(index)
    return Rollouts(
        rows, drawn, torch.cat([extract(hidden, spec), rolled.features.flatten(0, 1)])[index]
    )


def candidate_states(
    draft: CachedLM, start: int, mixed: Tensor, position: Tensor, layers: Sequence[int]
) -> Tensor:
    """Hidden states [len(layers), k, H] of the draft at `position` [k] of a sequence `mixed` [T]
    of candidates and response tokens, which follows the `start` tokens of the prompt. Of the
    response an ordinary draft loses its cache.

    A draft that reads its target's states has none of the target's at candidates, and none of its
    own but at the first few after a verified one. It runs on each candidate as decoding does: as
    the first one drafted after the response, which it must have cached."""
    if not draft.reads_target:
        draft.crop(start)
        wanted = position.tolist()
        hidden = draft.forward(mixed, hidden=layers, hidden_rows=wanted, logits="none").hidden
        assert hidden is not None
        return hidden
    parts, base = [], draft.length
    for some in torch.arange(len(mixed)).split(TOGETHER):
        hidden = forward_along(
            draft, start - 1 + some, mixed[some, None], base, hidden=layers, logits="none"
        ).hidden
        assert hidden is not None
        draft.crop(base)
        parts.append(hidden)
    return torch.cat(parts, 1)[:, position]


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
    draft: CachedLM, rows: Tensor, first: Drawn, uniform: Tensor, warp: Warp, spec: FeatureSpec
) -> tuple[Drawn, Tensor]:
    base, gamma = draft.length, uniform.shape[1] + 1
    prefix = torch.arange(base) <= rows[:, None]
    own = torch.eye(len(rows), dtype=torch.bool)
    drawn, features = [first], []
    for depth in range(1, gamma + 1):
        visible = torch.cat([prefix, *[own] * depth], dim=1)
        wanted: RowsWanted = "all" if depth < gamma else "none"
        output = draft.forward_masked(
            drawn[-1].token, rows + depth, visible, hidden=spec.layers, logits=wanted
        )
        assert output.hidden is not None
        features.append(extract(output.hidden, spec))
        if depth < gamma:
            drawn.append(blockwise(partial(draw, warp), output.logits, uniform[:, depth - 1]))
    draft.crop(base)
    return Drawn.join(torch.stack, drawn, 1), torch.stack(features, 1)


def draw(warp: Warp, logits: Tensor, uniform: Tensor) -> Drawn:
    """One token per row of the draft's logits [n, V]. uniform: [n]."""
    distribution = warp.probs(logits)
    token = draw_from(warp, distribution, uniform)
    q = at(distribution, token)
    if warp != Warp():
        distribution = Warp().probs(
            logits
        )  # in place of the other: both would not fit a core's cache
    return Drawn(token, q, distribution.amax(-1), entropy(distribution))


def rollout_acceptance(
    target: CachedLM, rolled: Rollouts, first: Tensor, drafted: Tensor, verdicts: Tensor, warp: Warp
) -> Tensor:
    """min(1, p / q) of every rollout token given its prefix and the tokens before, [A, gamma], as
    far as it matters.

    first: [A], that of the first tokens, known from the answer; drafted: [A], tokens that count;
    verdicts: [A, gamma], the coins. The target runs in stages, each on a few more tokens of the
    rollouts that are still `alive`; the rest
    stays 0: their product was below `NEGLIGIBLE`, and their verdict is known. The cache is left as
    it was."""
    accept = torch.zeros(verdicts.shape, device=first.device)
    accept[:, 0] = first
    for some in torch.arange(len(first)).split(
        max(1, min(TOGETHER, rows_per_forward(target) // STAGES[-1]))
    ):
        _accept_in_stages(target, rolled, some, accept, drafted, verdicts, warp)
    return accept


def _accept_in_stages(
    target: CachedLM,
    rolled: Rollouts,
    some: Tensor,
    accept: Tensor,
    drafted: Tensor,
    verdicts: Tensor,
    warp: Warp,
) -> None:
    """Fill in `accept` of the rollouts `some`."""
    base, done, tokens = target.length, 1, rolled.drawn.token
    for size in (*STAGES, *[STAGES[-1]] * tokens.shape[1]):
        going = alive(accept[some, :done].cpu(), drafted[some], verdicts[some, :done])
        target.keep(base, _rows_of(going, len(some), done - 1))
        some, until = some[going], min(done + size, tokens.shape[1])
        if not len(some) or done == until:
            break
        logits = forward_along(
            target, rolled.rows[some], tokens[some, done - 1 : until - 1], base
        ).logits
        wanted = tokens[some, done:until]
        p = torch.cat(
            [at(warp.probs(rows), drawn) for rows, drawn in blocks(logits, wanted.T.flatten())]
        )
        accept[some, done:until] = acceptance(
            p.view(-1, len(some)).T, rolled.drawn.q[some, done:until]
        )
        done = until
    target.crop(base)


def alive(accept: Tensor, drafted: Tensor, verdicts: Tensor) -> Tensor:
    """Which rollouts have more to tell after n tokens: their next token counts, and all n are
    accepted by the coins or with a probability that is not negligible. accept, verdicts: [A, n];
    drafted: [A]. Returns [n alive] indices."""
    passed = (verdicts < accept).all(1) | (accept.prod(1) >= NEGLIGIBLE)
    return (passed & (drafted > accept.shape[1])).nonzero()[:, 0]


def _rows_of(kept: Tensor, count: int, depths: int) -> list[int]:
    """Cached rows of the rollouts `kept` of `count`, all first tokens before all second ones."""
    return (torch.arange(depths)[:, None] * count + kept).flatten().tolist()


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
