"""Draft rollouts from many positions of one or several responses at once.

Speculative decoding token by token would run the draft gamma times per position. Here one draft
forward advances all rollouts by one token: the texts lie in the cache one after another, and each
row sees its own prefix of its own text and its own rollout, nothing else."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from data_gen.columns import Columns, at, blockwise
from data_gen.own_tokens import OwnTokens, own_tokens
from data_gen.responses.generate import draw_from
from data_gen.siblings import top_tokens
from decoding.interfaces import LMOutput, RowsWanted
from decoding.models.cached_lm import CachedLM
from decoding.sampling import Warp
from predictors.features.draft_statistics import q_stats
from predictors.features.layers import side_by_side


@dataclass(frozen=True)
class Places:
    """Cached rows that something follows, in a cache that holds texts one after another. row: [A];
    start: [A], row of the first token of the text that each belongs to."""

    row: Tensor
    start: Tensor

    def take(self, index: Tensor) -> "Places":
        return Places(self.row[index], self.start[index])

    def past(self, cached: int, device: torch.device) -> Tensor:
        """[A, cached] bool, made there: of its text each sees what is there up to its row."""
        row, start = (each.to(device)[:, None] for each in (self.row, self.start))
        column = torch.arange(cached, device=device)
        return (column <= row) & (column >= start)


@dataclass(frozen=True)
class Texts:
    """n texts in a cache: the last row of each prompt, and tokens [T_i] that follow it."""

    prompt: Places
    following: Sequence[Tensor]

    def places(self) -> Places:
        """The rows before each of those tokens, as they lie in the cache: [sum T_i]."""
        parts = [
            Places(row + torch.arange(len(tokens)), start.expand(len(tokens)))
            for row, start, tokens in zip(
                self.prompt.row, self.prompt.start, self.following, strict=True
            )
        ]
        return Places(
            torch.cat([part.row for part in parts]), torch.cat([part.start for part in parts])
        )


@dataclass(frozen=True)
class Drawn(Columns):
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


@dataclass(frozen=True)
class Rollouts:
    """Drafts of gamma tokens from A anchors. places: of the last committed token before each;
    drawn: [A, gamma] each; draft_hidden: [A, gamma, L * H] bfloat16, of the draft at every drawn
    token; logits: [A, gamma - 1, columns] of the draft at every token but the last, None of a
    greedy draft, whose distributions are one-hot."""

    places: Places
    drawn: Drawn
    draft_hidden: Tensor
    logits: Tensor | None = None

    def parts(self, most: int) -> "Iterator[Rollouts]":
        """At most so many at a time, in order."""
        count = len(self.places.row)
        for some in torch.arange(count).split(most) if count > most else ():
            there = some.to(self.drawn.token.device)
            logits = None if self.logits is None else self.logits[there]
            states = self.draft_hidden[there]
            yield Rollouts(self.places.take(some), self.drawn.take(some), states, logits)
        if count <= most:
            yield self


def roll(
    draft: CachedLM,
    places: Places,
    first: Drawn,
    uniform: Tensor,
    warp: Warp,
    layers: Sequence[int],
) -> Rollouts:
    """Continue cached texts from many of their rows at once, one forward per depth.

    places: [A]; first: already drawn after them; uniform: [A, gamma - 1]. The cache is left as it
    was."""
    base, gamma, own = draft.length, uniform.shape[1] + 1, own_tokens(draft)
    prefix = places.past(base, draft.device)
    itself = torch.eye(len(prefix), dtype=torch.bool, device=draft.device)
    drawn, states, logits = [first], list[Tensor](), list[Tensor]()
    for depth in range(1, gamma + 1):
        visible = torch.cat([prefix, *[itself] * depth], dim=1)
        wanted: RowsWanted = "all" if depth < gamma else "none"
        positions = places.row - places.start + depth
        output = draft.forward_masked(
            drawn[-1].token, positions, visible, hidden=layers, logits=wanted
        )
        assert output.hidden is not None
        states.append(side_by_side(output.hidden))
        if depth < gamma:
            drawn.append(blockwise(partial(draw, warp, own), output.logits, uniform[:, depth - 1]))
            logits.append(output.logits[:, None])
        if warp.temperature == 0:
            logits.clear()
    draft.crop(base)
    known = None
    if warp.temperature > 0:
        known = (
            torch.cat(logits, 1)
            if logits
            else torch.zeros(len(prefix), 0, own.columns, device=first.token.device)
        )
    return Rollouts(places, Drawn.join(drawn, torch.stack, 1), torch.stack(states, 1), known)


def roll_greedy(
    draft: CachedLM, texts: Texts, first: Drawn, gamma: int, layers: Sequence[int], together: int
) -> Rollouts:
    """Rollouts of a greedy draft from every position of some responses, each context run on once.

    Where the draft says what the response says, the rollout is that token and then the rollout of
    the next position. texts: with the responses, which are in the cache but for the last token of
    each; it is left as it was. first: [sum T_i]; together: rollouts of one forward."""
    places, said = texts.places(), first.token.cpu()
    own = said != torch.cat([*texts.following])
    own[torch.tensor([len(each) for each in texts.following]).cumsum(0) - 1] = True
    some = own.nonzero()[:, 0]  # counted on the host, where they are known
    rolled = [
        roll(draft, places.take(part), first.take(part), coins, Warp(0.0), layers)
        for part in some.split(together)
        for coins in [torch.zeros(len(part), gamma - 1)]  # a greedy draft needs none
    ]
    index = shared_tokens(own, gamma)
    made = [each.drawn.map(lambda column: column.flatten(0, 1)) for each in rolled]
    drawn = Drawn.join([first, *made]).take(index)
    hidden = [each.draft_hidden.flatten(0, 1) for each in rolled]
    states = torch.cat([run_after(draft, texts, layers, together), *hidden])
    return Rollouts(places, drawn, states[index])


def candidate_states(
    draft: CachedLM, texts: Texts, positions: Sequence[Tensor], layers: Sequence[int], together: int
) -> Tensor:
    """Hidden states [sum k_i, L * H] bfloat16 of the draft at `positions` [k_i] of sequences of
    candidates and response tokens, the `following` of texts whose responses are in the draft's
    cache but for the last token. It is left as it was; together: rows of one forward.

    A draft that reads its target's states has none of the target's at candidates, and none of its
    own but at the first few after a verified one. It runs on each candidate as decoding does: as
    the first one drafted after the response."""
    lengths = torch.tensor([len(tokens) for tokens in texts.following])
    first = (lengths.cumsum(0) - lengths).tolist()
    wanted = torch.cat([start + some for start, some in zip(first, positions, strict=True)])
    if not draft.reads_target:
        return run_after(draft, texts, layers, together)[wanted]
    some = wanted if len(wanted) else torch.arange(1)  # what none is like
    places, tokens = texts.places().take(some), torch.cat([*texts.following])[some]
    parts, base = list[Tensor](), draft.length
    for part in torch.arange(len(some)).split(together):
        hidden = forward_along(
            draft, places.take(part), tokens[part, None], base, hidden=layers, logits="none"
        ).hidden
        assert hidden is not None
        draft.crop(base)
        parts.append(side_by_side(hidden))
    return torch.cat(parts)[: len(wanted)]


def run_after(draft: CachedLM, texts: Texts, layers: Sequence[int], together: int) -> Tensor:
    """[sum T_i, L * H] bfloat16 of the draft at the tokens that follow each prompt; whole texts in
    one forward as far as these are at most `together` rows. The cache is left as it was."""
    parts, base = list[Tensor](), draft.length
    lengths = [len(tokens) for tokens in texts.following]
    for some in groups(lengths, together):
        count = torch.tensor([lengths[text] for text in some])
        text = torch.arange(len(some)).repeat_interleave(count)
        depth = torch.cat([torch.arange(1, n + 1) for n in count.tolist()])
        prompt = texts.prompt.take(torch.tensor(some)[text])
        there, order = text.to(draft.device), torch.arange(len(text), device=draft.device)
        own = (there[:, None] == there) & (order[:, None] >= order)
        visible = torch.cat([prompt.past(base, draft.device), own], 1)
        tokens = torch.cat([texts.following[each] for each in some])
        positions = prompt.row - prompt.start + depth
        hidden = draft.forward_masked(
            tokens, positions, visible, hidden=layers, logits="none"
        ).hidden
        assert hidden is not None
        draft.crop(base)
        parts.append(side_by_side(hidden))
    return torch.cat(parts)


def groups(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Neighbours whose sizes add up to at most `most`, unless one is larger: indices."""
    found, filled = list[list[int]](), 0
    for index, size in enumerate(sizes):
        if not found or filled + size > most:
            found.append([])
            filled = 0
        found[-1].append(index)
        filled += size
    return found


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


def draw(warp: Warp, own: OwnTokens, logits: Tensor, uniform: Tensor) -> Drawn:
    """One token per row of the draft's logits [n, columns]. uniform: [n]."""
    distribution = warp.probs(logits)
    token = draw_from(warp, distribution, uniform)
    q, top = at(distribution, token), top_tokens(logits)
    if warp != Warp():  # in place of the other: both would not fit a core's cache
        distribution = Warp().probs(logits)
    return Drawn(own.ids(token), q, **q_stats(distribution, token), top_token=own.ids(top))


def forward_along(
    lm: CachedLM,
    places: Places,
    tokens: Tensor,
    base: int,
    hidden: Sequence[int] = (),
    logits: RowsWanted = "all",
) -> LMOutput:
    """One pass over the next tokens of rollouts that are known, in which each row sees its prefix
    and its rollout.

    places: [A], as in `Rollouts`; tokens: [A, n]. base: cached rows of the texts; those behind them
    hold the A rollouts' tokens before these, all first tokens, then all second ones. So do the n *
    A rows of the output, and the cache then."""
    count, depths = tokens.shape
    before = (lm.length - base) // count
    depth = torch.arange(depths, device=lm.device).repeat_interleave(count)
    own = torch.eye(count, dtype=torch.bool, device=lm.device).repeat(depths, 1)
    visible = torch.cat(
        [
            places.past(base, lm.device).repeat(depths, 1),
            own.repeat(1, before),
            own.repeat(1, depths) & (depth <= depth[:, None]),
        ],
        dim=1,
    )
    ahead = torch.arange(1, depths + 1).repeat_interleave(count)
    positions = (places.row - places.start).repeat(depths) + before + ahead
    return lm.forward_masked(tokens.T.flatten(), positions, visible, hidden=hidden, logits=logits)
