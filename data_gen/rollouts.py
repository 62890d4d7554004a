"""Draft rollouts from many positions of one or several responses at once.

Speculative decoding token by token would run the draft gamma times per position. Here one draft
forward advances all rollouts by one token: the texts lie in the cache one after another, and each
row sees its own prefix of its own text and its own rollout, nothing else."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from data_gen.answers import Drawn, draw_from
from data_gen.columns import Columns, OwnTokens, at, blockwise
from data_gen.labels import top_tokens
from decoding.interfaces import LMOutput, RowsWanted
from decoding.models.cached_lm import CachedLM
from decoding.processors import scored
from decoding.sampling import Warp
from predictors.features.draft_statistics import q_stats
from predictors.features.layers import side_by_side

GREEDY = Warp(0.0)


@dataclass(frozen=True)
class Places(Columns):
    """Cached rows after which rollouts begin, in a cache that holds texts one after another. row:
    [A]; start: [A], row of the first token of each one's text."""

    row: Tensor
    start: Tensor

    def past(self, cached: int, device: torch.device) -> Tensor:
        """Return the mask [A, cached] bool on a device: each sees its own text up to its row."""
        row, start = (each.to(device)[:, None] for each in (self.row, self.start))
        column = torch.arange(cached, device=device)
        return (column <= row) & (column >= start)


@dataclass(frozen=True)
class Texts:
    """n texts in a cache: the last row of each prompt, and tokens [T_i] that follow it."""

    prompt: Places
    following: Sequence[Tensor]

    def places(self) -> Places:
        """Return the cached rows before each of the tokens: [sum T_i]."""
        lengths = torch.tensor([len(tokens) for tokens in self.following])
        depth = torch.cat([torch.arange(length) for length in lengths.tolist()])
        prompt = self.prompt.take(torch.arange(len(lengths)).repeat_interleave(lengths))
        return Places(prompt.row + depth, prompt.start)


@dataclass(frozen=True)
class Read:
    """The tokens in a cache that holds texts one after another, for warps that read them. tokens:
    [cached]; prompts: how many of them are each text's prompt, by the row of its first token;
    eos_ids: that end a response."""

    tokens: Tensor
    prompts: Mapping[int, int]
    eos_ids: Collection[int]

    def scored(
        self, warp: Warp, logits: Tensor, places: Places, drafted: Callable[[int], Tensor]
    ) -> Tensor:
        """Return `decoding.processors.scored` of rows [n, V] of rollouts from `places` [n].
        drafted: gives the tokens of the rollout before a row."""

        def text(row: int) -> tuple[Tensor, int]:
            start, last = int(places.start[row]), int(places.row[row])
            before = self.tokens[start : last + 1]
            return torch.cat([before, drafted(row)]), self.prompts[start]

        return scored(warp, logits, text, self.eos_ids)


NOTHING_READ = Read(torch.zeros(0, dtype=torch.long), {}, ())


@dataclass(frozen=True)
class Rollouts:
    """Drafts of gamma tokens from A anchors. places: of the last committed token before each;
    drawn: [A, gamma] each; draft_hidden: [A, gamma, L * H] bfloat16, of the draft at every drawn
    token; logits: [A, gamma - 1, columns] of the draft at every token but the last, as processors
    have left them, None of a greedy draft, whose distributions are one-hot."""

    places: Places
    drawn: Drawn
    draft_hidden: Tensor
    logits: Tensor | None = None

    def parts(self, most: int) -> "Iterator[Rollouts]":
        """Yield at most `most` rollouts at a time, in order."""
        for start in range(0, len(self.places.row), most):
            some = slice(start, start + most)
            logits = None if self.logits is None else self.logits[some]
            drawn = self.drawn.take(some)
            yield Rollouts(self.places.take(some), drawn, self.draft_hidden[some], logits)


def states_of(output: LMOutput) -> Tensor:
    """Return the hidden states [n, L * H] in an output, which must have them."""
    assert output.hidden is not None
    return side_by_side(output.hidden)


def roll(
    draft: CachedLM,
    places: Places,
    first: Drawn,
    uniform: Tensor,
    warp: Warp,
    layers: Sequence[int],
    read: Read = NOTHING_READ,
) -> Rollouts:
    """Continue cached texts from many of their rows at once, one forward per depth.

    places: [A]; first: already drawn after them; uniform: [A, gamma - 1]. The cache is left as it
    was."""
    base, gamma, own = draft.length, uniform.shape[1] + 1, OwnTokens.of(draft)
    drawn, states, logits = [first], list[Tensor](), list[Tensor]()
    for depth in range(1, gamma + 1):
        wanted: RowsWanted = "all" if depth < gamma else "none"
        token = drawn[-1].token[:, None]
        output = forward_along(draft, places, token, base, hidden=layers, logits=wanted)
        states.append(states_of(output))
        if depth < gamma:
            scores = read.scored(warp, output.logits, places, partial(_so_far, drawn))
            coins = uniform[:, depth - 1]
            drawn.append(blockwise(partial(draw, warp, own), scores, output.logits, coins))
            if warp.temperature > 0:
                logits.append(scores[:, None])
    draft.crop(base)
    q_logits = torch.cat(logits, 1) if logits else None
    if warp.temperature > 0 and gamma == 1:
        q_logits = torch.zeros(len(places.row), 0, own.columns, device=first.token.device)
    return Rollouts(places, Drawn.join(drawn, torch.stack, 1), torch.stack(states, 1), q_logits)


def roll_greedy(
    draft: CachedLM,
    texts: Texts,
    first: Drawn,
    gamma: int,
    layers: Sequence[int],
    together: int,
    warp: Warp = GREEDY,
    read: Read = NOTHING_READ,
) -> Rollouts:
    """Return rollouts of a greedy draft from every position of some responses, running each context
    only once.

    Where the draft's token is the response's, the rollout is that token and then the rollout of the
    next position. texts: with the responses, which are cached without the last token of each; the
    cache is left as it was. first: [sum T_i]; together: rollouts of one forward."""
    places, proposed = texts.places(), first.token.cpu()
    own = proposed != torch.cat([*texts.following])
    own[torch.tensor([len(each) for each in texts.following]).cumsum(0) - 1] = True
    rolled = [
        roll(draft, places.take(part), first.take(part), coins, warp, layers, read)
        for part in own.nonzero()[:, 0].split(together)  # on the host, where they are known
        for coins in [torch.zeros(len(part), gamma - 1)]  # a greedy draft needs none
    ]
    index = shared_tokens(own, gamma)
    made = [
        Drawn(**{name: column.flatten(0, 1) for name, column in vars(each.drawn).items()})
        for each in rolled
    ]
    hidden = [each.draft_hidden.flatten(0, 1) for each in rolled]
    states = torch.cat([run_after(draft, texts, layers, together), *hidden])
    return Rollouts(places, Drawn.join([first, *made]).take(index), states[index])


def candidate_states(
    draft: CachedLM, texts: Texts, positions: Sequence[Tensor], layers: Sequence[int], together: int
) -> Tensor:
    """Return the draft's hidden states [sum k_i, L * H] bfloat16 at `positions` [k_i] of sequences
    of candidates and response tokens, the `following` of texts whose responses are in the draft's
    cache without the last token. The cache is left as it was; together: rows of one forward.

    A draft that reads its target's states has none of them at candidates, and its own only at the
    first few after a verified token. It runs on each candidate as in decoding: as the first token
    drafted after the response."""
    lengths = torch.tensor([len(tokens) for tokens in texts.following])
    first = (lengths.cumsum(0) - lengths).tolist()
    wanted = torch.cat([start + some for start, some in zip(first, positions, strict=True)])
    if not draft.reads_target:
        return run_after(draft, texts, layers, together)[wanted]
    some = wanted if len(wanted) else torch.arange(1)  # one row to get the shape of none
    places, tokens = texts.places().take(some), torch.cat([*texts.following])[some]
    parts, base = list[Tensor](), draft.length
    for part in torch.arange(len(some)).split(together):
        here, drafted = places.take(part), tokens[part, None]
        output = forward_along(draft, here, drafted, base, hidden=layers, logits="none")
        draft.crop(base)
        parts.append(states_of(output))
    return torch.cat(parts)[: len(wanted)]


def run_after(draft: CachedLM, texts: Texts, layers: Sequence[int], together: int) -> Tensor:
    """Return the draft's hidden states [sum T_i, L * H] bfloat16 at the tokens that follow each
    prompt; whole texts run in one forward up to `together` rows. The cache is left as it was."""
    parts, base = list[Tensor](), draft.length
    groups, filled = list[list[int]](), 0
    for index, tokens in enumerate(texts.following):
        if not groups or filled + len(tokens) > together:
            groups.append([])
            filled = 0
        groups[-1].append(index)
        filled += len(tokens)
    for group in groups:
        lengths = [len(texts.following[index]) for index in group]
        prompt = texts.prompt.take(torch.tensor(group).repeat_interleave(torch.tensor(lengths)))
        depth = torch.cat([torch.arange(1, length + 1) for length in lengths])
        text, order = prompt.start.to(draft.device), torch.arange(len(depth), device=draft.device)
        own = (text[:, None] == text) & (order[:, None] >= order)
        visible = torch.cat([prompt.past(base, draft.device), own], 1)
        tokens = torch.cat([texts.following[index] for index in group])
        positions = prompt.row - prompt.start + depth
        output = draft.forward_masked(tokens, positions, visible, hidden=layers, logits="none")
        draft.crop(base)
        parts.append(states_of(output))
    return torch.cat(parts)


def shared_tokens(own: Tensor, gamma: int) -> Tensor:
    """Return the indices [A, gamma] of the tokens of A rollouts in the A first tokens followed by
    the tokens [n * gamma] of the rollouts that were computed. own: [A] bool, which were computed (n
    of them, including the last)."""
    count, depth = len(own), torch.arange(gamma)
    position = torch.arange(count)
    # the next computed one, or itself
    following = torch.where(own, position, count).flip(0).cummin(0).values.flip(0)
    steps = (following - position)[:, None]
    made = count + (own.cumsum(0) - 1)[following][:, None] * gamma + depth - steps
    return torch.where(depth < steps, position[:, None] + depth, made)


def _so_far(drawn: Sequence[Drawn], row: int) -> Tensor:
    return torch.stack([each.token[row] for each in drawn]).cpu()


def draw(warp: Warp, own: OwnTokens, logits: Tensor, unwarped: Tensor, uniform: Tensor) -> Drawn:
    """Draw one token per row of the draft's logits [n, columns], as processors have left them.
    unwarped: as they were; uniform: [n]."""
    distribution = warp.rest.probs(logits)
    token = draw_from(warp, distribution, uniform)
    q, top = at(distribution, token), top_tokens(unwarped)
    if warp != Warp():  # replaces the other: both would not fit a core's cache
        distribution = Warp().probs(unwarped)
    return Drawn(own.ids(token), q, **q_stats(distribution, token), top_token=own.ids(top))


def forward_along(
    lm: CachedLM,
    places: Places,
    tokens: Tensor,
    base: int,
    hidden: Sequence[int] = (),
    logits: RowsWanted = "all",
) -> LMOutput:
    """Run one pass over the next, known tokens of rollouts, in which each row sees its prefix and
    its rollout.

    places: [A], as in `Rollouts`; tokens: [A, n]. base: cached rows of the texts; those after them
    hold the A rollouts' earlier tokens, all first tokens, then all second ones. The n * A rows of
    the output, and those added to the cache, are in the same order."""
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
