"""What the target says of draft rollouts, and of siblings of their tokens.

A sampled target runs on the rollouts in masked passes, a few tokens at a time, as long as they may
still be accepted. A greedy one has said it already: its verdicts are in the response."""

from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from data_gen.columns import at, blockwise
from data_gen.labels import acceptance, greedy_acceptance
from data_gen.own_tokens import Warps
from data_gen.responses.generate import Distributions
from data_gen.rollouts import Rollouts, forward_along
from data_gen.siblings import Siblings, greedy_point_masses, siblings
from decoding.models.cached_lm import CachedLM
from predictors.outcomes import NEGLIGIBLE

# Tokens whose verdicts one target forward finds: few where many rollouts are still alive.
STAGES = (2, 3, 4, 5)


@dataclass(frozen=True)
class Verdicts(Siblings):
    """accept: [..., gamma], min(1, p / q) of every rollout token given its prefix and the tokens
    before, as far as it matters; 0 beyond. The others: `Siblings` [..., gamma, k], likewise."""

    accept: Tensor

    @classmethod
    def of_first(cls, first: Distributions, gamma: int) -> "Verdicts":
        """Those of the first tokens [A], known from the answer; nothing of the others."""
        shape = (len(first.accept), gamma)
        found = cls(**vars(Siblings.unknown(*shape)), accept=torch.zeros(shape))
        for field in fields(cls):
            getattr(found, field.name)[:, 0] = getattr(first, field.name).cpu()
        return found


@dataclass(frozen=True)
class Coins:
    """verdicts: [A, gamma]; siblings: [A, gamma, 2], draws of second and third candidates."""

    verdicts: Tensor
    siblings: Tensor


def sampled_verdicts(
    target: CachedLM,
    rolled: Rollouts,
    first: Distributions,
    drafted: Tensor,
    coins: Coins,
    warps: Warps,
) -> Verdicts:
    """first: at the anchors, [A]; drafted: [A], tokens that count.

    The target runs in stages, each on a few more tokens of the rollouts that are still `alive`; the
    rest stays 0: their product was below `NEGLIGIBLE`, and their verdict is known. The cache is
    left as it was."""
    found, some = Verdicts.of_first(first, rolled.drawn.token.shape[1]), torch.arange(len(drafted))
    base, done, tokens = target.length, 1, rolled.drawn.token
    for size in (*STAGES, *[STAGES[-1]] * tokens.shape[1]):
        going = alive(found.accept[some, :done], drafted[some], coins.verdicts[some, :done])
        target.keep(base, _rows_of(going, len(some), done - 1))
        some, until = some[going], min(done + size, tokens.shape[1])
        if not len(some) or done == until:
            break
        taken = tokens[some, done - 1 : until - 1]
        logits = forward_along(target, rolled.places.take(some), taken, base).logits
        depths = torch.arange(done, until)
        rows, columns = some.repeat(len(depths)), depths.repeat_interleave(len(some))
        _judge(rolled, rows, columns, logits, (found, coins, warps))
        done = until
    target.crop(base)
    return found


def _judge(
    rolled: Rollouts,
    rows: Tensor,
    depths: Tensor,
    p_logits: Tensor,
    known: tuple[Verdicts, Coins, Warps],
) -> None:
    """Fill in the verdicts on tokens [n] of rollouts `rows` [n] at `depths` [n] >= 1. p_logits:
    [n, V]."""
    found, coins, warps = known
    drawn = rolled.drawn
    q_logits = torch.zeros(len(rows), 0) if rolled.logits is None else rolled.logits
    there = rows.to(drawn.token.device), depths.to(drawn.token.device)  # sent once
    judged = blockwise(
        partial(_verdicts, warps),
        p_logits,
        q_logits if rolled.logits is None else q_logits[there[0], there[1] - 1],
        drawn.token[there],
        drawn.q[there],
        drawn.top_token[there],
        coins.siblings[rows, depths],
    )
    for field in fields(Verdicts):
        getattr(found, field.name)[rows, depths] = getattr(judged, field.name).cpu()


def _verdicts(
    warps: Warps, p_logits: Tensor, q_logits: Tensor, token: Tensor, *about: Tensor
) -> Verdicts:
    """about: q, top_token and the coins of siblings."""
    own, (q_drawn, top, coins) = warps.own, about
    p, token = own.merged(warps.target.probs(p_logits)), own.columns_of(token)
    greedy = warps.draft.temperature == 0
    q = one_hot(token, p.shape[-1]).to(p.dtype) if greedy else warps.draft.probs(q_logits)
    others = siblings(p, q, token, own.columns_of(top), coins.to(p.device))
    told = vars(others) | {"rrsw_token": own.ids(others.rrsw_token)}
    return Verdicts(**told, accept=acceptance(at(p, token), q_drawn))


def greedy_verdicts(
    rolled: Rollouts, first: Distributions, said: tuple[Tensor, Tensor], coins: Coins, warps: Warps
) -> Verdicts:
    """Under a greedy target. said: the responses, each with gamma times -2 behind it, and where the
    anchors [A] lie in them."""
    found = Verdicts.of_first(first, rolled.drawn.token.shape[1])
    text, anchors = said
    tokens, top = rolled.drawn.token.cpu(), rolled.drawn.top_token.cpu()
    found.accept[:] = greedy_acceptance(tokens, text, anchors)
    gamma = tokens.shape[1]
    says = text.unfold(0, gamma, 1)[anchors]
    reached = torch.cat([torch.ones(len(anchors), 1), found.accept.cumprod(1)[:, :-1]], 1)
    reached = (reached > 0) & (says >= 0)
    found.top_accept[:] = greedy_point_masses(top, says) * reached[..., None]
    if rolled.logits is None:
        found.hub_accept[..., 0] = found.accept
        return found
    rows, depths = reached[:, 1:].nonzero(as_tuple=True)
    sure = says[rows, depths + 1].to(rolled.logits.device)
    sure = one_hot(sure, warps.own.vocab_size).float().log()
    _judge(rolled, rows, depths + 1, sure, (found, coins, warps))
    return found


def alive(accept: Tensor, drafted: Tensor, verdicts: Tensor) -> Tensor:
    """Which rollouts have more to tell after n tokens: their next token counts, and all n are
    accepted by the coins or with a probability that is not negligible. accept, verdicts: [A, n];
    drafted: [A]. Returns [n alive] indices."""
    passed = (verdicts < accept).all(1) | (accept.prod(1) >= NEGLIGIBLE)
    return (passed & (drafted > accept.shape[1])).nonzero()[:, 0]


def _rows_of(kept: Tensor, count: int, depths: int) -> list[int]:
    """Cached rows of the rollouts `kept` of `count`, all first tokens before all second ones."""
    return (torch.arange(depths)[:, None] * count + kept).flatten().tolist()
