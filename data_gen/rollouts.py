"""Draft rollouts from many positions of one response at once, and the target's verdict on them.

Speculative decoding token by token would run the draft gamma times per position. Here one draft forward advances all
rollouts by one token: each row sees its own prefix of the response and its own rollout, nothing else. The target then
runs on all rollouts in one masked pass.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from data_gen.labels import acceptance
from data_gen.responses import at
from decoding.cached_lm import CachedLM
from decoding.sampling import Warp, pick

MAX_ROWS = 512  # rows per forward: bounds the memory for logits, [rows, V]


@dataclass(frozen=True)
class Rollouts:
    """Drafts of gamma tokens from A anchors. rows: [A] cache row of the last committed token before each; tokens:
    [A, gamma]; q: [A, gamma], the probability each token was drawn with."""

    rows: Tensor
    tokens: Tensor
    q: Tensor


def roll(draft: CachedLM, rows: Tensor, first: Tensor, first_q: Tensor, uniform: Tensor, warp: Warp) -> Rollouts:
    """Continue the cached sequence from many of its rows at once, one forward per depth.

    rows: [A]; first, first_q: [A], tokens already drawn after those rows and their probabilities; uniform:
    [A, gamma - 1]. The cache is left as it was.
    """
    base = draft.length
    prefix = torch.arange(base) <= rows[:, None]
    own = torch.eye(len(rows), dtype=torch.bool)
    tokens, probs = [first], [first_q]
    for depth in range(1, uniform.shape[1] + 1):
        visible = torch.cat([prefix, *[own] * depth], dim=1)
        q = warp.probs(draft.forward_masked(tokens[-1], rows + depth, visible).logits)
        tokens.append(pick(q, uniform[:, depth - 1].to(q.device)))
        probs.append(at(q, tokens[-1]))
    draft.crop(base)
    return Rollouts(rows, torch.stack(tokens, 1), torch.stack(probs, 1))


def rollout_acceptance(target: CachedLM, rolled: Rollouts, first: Tensor, warp: Warp) -> Tensor:
    """min(1, p / q) of every rollout token given its prefix and the tokens before, [A, gamma].

    first: [A], that of the first tokens, known from the answer. The cache is left as it was.
    """
    depths = rolled.tokens.shape[1] - 1
    size = max(1, MAX_ROWS // depths) if depths else len(first)
    parts = zip(rolled.rows.split(size), rolled.tokens.split(size), strict=True)
    p = torch.cat([_later_p(target, rows, tokens, warp) for rows, tokens in parts])
    return torch.cat([first[:, None], acceptance(p, rolled.q[:, 1:])], 1)


def _later_p(target: CachedLM, rows: Tensor, tokens: Tensor, warp: Warp) -> Tensor:
    """p of the tokens after the first, [A, gamma - 1]: one pass in which each row sees its prefix and its rollout."""
    base, (count, gamma) = target.length, tokens.shape
    if gamma == 1:
        return torch.zeros(count, 0, device=tokens.device)
    depth = torch.arange(1, gamma).repeat_interleave(count)  # rows of one depth lie together
    prefix = (torch.arange(base) <= rows[:, None]).repeat(gamma - 1, 1)
    path = torch.eye(count, dtype=torch.bool).repeat(gamma - 1, gamma - 1) & (depth <= depth[:, None])
    visible = torch.cat([prefix, path], dim=1)
    logits = target.forward_masked(tokens[:, :-1].T.flatten(), rows.repeat(gamma - 1) + depth, visible).logits
    target.crop(base)
    return at(warp.probs(logits).view(gamma - 1, count, -1), tokens[:, 1:].T).T
