"""The target's verdicts on draft rollouts, and on siblings of their tokens.

A sampled target runs on the rollouts in masked passes, a few tokens at a time, as long as they may
still be accepted. The verdicts of a greedy one follow from the response."""

from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from data_gen.answers import Distributions
from data_gen.columns import Columns, Warps, at, blockwise
from data_gen.labels import Siblings, acceptance, siblings
from data_gen.rollouts import NOTHING_READ, Read, Rollouts, forward_along
from decoding.models.cached_lm import CachedLM
from predictors.outcomes import NEGLIGIBLE

# Tokens verified in one target forward: few while many rollouts are still alive.
STAGES = (2, 3, 4, 5)


@dataclass(frozen=True)
class Verdicts(Siblings):
    """Verdicts on rollouts. accept: [..., gamma], min(1, p / q) of every rollout token given its
    prefix and the tokens before, 0 where it is not needed. The others: `Siblings` [..., gamma, k],
    likewise."""

    accept: Tensor

    @classmethod
    def of_first(cls, first: Distributions, gamma: int) -> "Verdicts":
        """Return the verdicts on the first tokens [A], known from the answer; others are empty."""
        shape = (len(first.accept), gamma)
        verdicts = cls(**vars(Siblings.unknown(*shape)), accept=torch.zeros(shape))
        for field in fields(cls):
            getattr(verdicts, field.name)[:, 0] = getattr(first, field.name).cpu()
        return verdicts


@dataclass(frozen=True)
class Uniforms(Columns):
    """Uniform numbers. verdicts: [A, gamma]; siblings: [A, gamma, 2], draws of second and third
    candidates."""

    verdicts: Tensor
    siblings: Tensor


def sampled_verdicts(
    target: CachedLM,
    rolled: Rollouts,
    first: Distributions,
    drafted: Tensor,
    uniform: Uniforms,
    warps: Warps,
    read: Read = NOTHING_READ,
) -> Verdicts:
    """Return the verdicts of a sampled target. first: at the anchors, [A]; drafted: [A], valid
    tokens.

    The target runs in stages, each on a few more tokens of the rollouts that are still alive: their
    next token is valid, and all so far are accepted by the draws or with a probability that is not
    negligible. The rest stays 0. The cache is left as it was."""
    tokens = rolled.drawn.token
    verdicts, alive = Verdicts.of_first(first, tokens.shape[1]), torch.arange(len(drafted))
    base, done = target.length, 1
    for size in (*STAGES, *[STAGES[-1]] * tokens.shape[1]):
        accept = verdicts.accept[alive, :done]
        passed = (uniform.verdicts[alive, :done] < accept).all(1) | (accept.prod(1) >= NEGLIGIBLE)
        going = (passed & (drafted[alive] > done)).nonzero()[:, 0]
        # cached are all first tokens of the rollouts before all second ones
        rows = torch.arange(done - 1)[:, None] * len(alive) + going
        target.keep(base, rows.flatten().tolist())
        alive, until = alive[going], min(done + size, tokens.shape[1])
        if not len(alive) or done == until:
            break
        taken = tokens[alive, done - 1 : until - 1]
        logits = forward_along(target, rolled.places.take(alive), taken, base).logits
        depths = torch.arange(done, until)
        at_rows, at_depths = alive.repeat(len(depths)), depths.repeat_interleave(len(alive))
        drafted_before = partial(_before, tokens, at_rows, at_depths)
        logits = read.scored(warps.target, logits, rolled.places.take(at_rows), drafted_before)
        _judge(verdicts, rolled, at_rows, at_depths, logits, uniform, warps)
        done = until
    target.crop(base)
    return verdicts


def _before(tokens: Tensor, rows: Tensor, depths: Tensor, row: int) -> Tensor:
    return tokens[rows[row], : depths[row]].cpu()


def greedy_verdicts(
    rolled: Rollouts, first: Distributions, says: Tensor, uniform: Uniforms, warps: Warps
) -> Verdicts:
    """Return the verdicts of a greedy target. says: [A, gamma], the response from each anchor on;
    -2 after its end."""
    tokens, top = rolled.drawn.token.cpu(), rolled.drawn.top_token.cpu()
    verdicts = Verdicts.of_first(first, tokens.shape[1])
    verdicts.accept[:] = (tokens == says).int().cumprod(1)
    reached = torch.cat([torch.ones(len(says), 1), verdicts.accept[:, :-1]], 1)
    reached = (reached > 0) & (says >= 0)
    verdicts.top_accept[:] = (top == says[..., None]) & reached[..., None]
    if rolled.logits is None:
        verdicts.hub_accept[..., 0] = verdicts.accept
        return verdicts
    rows, depths = reached[:, 1:].nonzero(as_tuple=True)
    certain = says[rows, depths + 1].to(rolled.logits.device)
    p_logits = one_hot(certain, warps.own.vocab_size).float().log()
    _judge(verdicts, rolled, rows, depths + 1, p_logits, uniform, warps)
    return verdicts


def _judge(
    verdicts: Verdicts,
    rolled: Rollouts,
    rows: Tensor,
    depths: Tensor,
    p_logits: Tensor,
    uniform: Uniforms,
    warps: Warps,
) -> None:
    """Fill in the verdicts on tokens [n] of rollouts `rows` [n] at `depths` [n] >= 1. p_logits:
    [n, V], as processors have left them."""
    drawn, device = rolled.drawn, rolled.drawn.token.device
    where = rows.to(device), depths.to(device)  # sent once
    q_logits = torch.zeros(len(rows), 0)
    if rolled.logits is not None:
        q_logits = rolled.logits[where[0], where[1] - 1]
    facts = (drawn.token[where], drawn.q[where], drawn.top_token[where])
    judged = blockwise(
        partial(_verdicts, warps), p_logits, q_logits, *facts, uniform.siblings[rows, depths]
    )
    for name, values in vars(judged).items():
        getattr(verdicts, name)[rows, depths] = values.cpu()


def _verdicts(
    warps: Warps,
    p_logits: Tensor,
    q_logits: Tensor,
    token: Tensor,
    q_drawn: Tensor,
    top: Tensor,
    uniform: Tensor,
) -> Verdicts:
    own = warps.own
    p, token = own.merged(warps.target.rest.probs(p_logits)), own.columns_of(token)
    greedy = warps.draft.temperature == 0
    q = one_hot(token, p.shape[-1]).to(p.dtype) if greedy else warps.draft.rest.probs(q_logits)
    others = siblings(p, q, token, own.columns_of(top), uniform.to(p.device))
    columns = vars(others) | {"rrsw_token": own.ids(others.rrsw_token)}
    return Verdicts(**columns, accept=acceptance(at(p, token), q_drawn))
