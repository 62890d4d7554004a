"""Draft rollouts from many positions of one response at once, and the target's verdict on them.

Speculative decoding token by token would run the draft gamma times per position. Here one draft forward advances all
rollouts by one token: each row sees its own prefix of the response and its own rollout, nothing else. The target then
runs on all rollouts in one masked pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from data_gen.labels import acceptance, entropy
from data_gen.responses import at
from decoding.cached_lm import CachedLM
from decoding.lm import LogitsFor
from decoding.sampling import Warp, pick
from predictors.features import FeatureSpec, extract

MAX_ROWS = 512  # rows per forward: bounds the memory for logits, [rows, V]


@dataclass(frozen=True)
class Drawn:
    """One draft token per rollout, [A] each. q: the probability it was drawn with; max_q, entropy: of the draft at
    temperature 1 without filters where it was drawn (as stop rules read it)."""

    token: Tensor
    q: Tensor
    max_q: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class Rollouts:
    """Drafts of gamma tokens from A anchors. rows: [A] cache row of the last committed token before each; drawn:
    [A, gamma] each; features: [A, gamma, D] of the draft at every drawn token (what a head that scores it reads)."""

    rows: Tensor
    drawn: Drawn
    features: Tensor


def roll(draft: CachedLM, rows: Tensor, first: Drawn, uniform: Tensor, warp: Warp, spec: FeatureSpec) -> Rollouts:
    """Continue the cached sequence from many of its rows at once, one forward per depth.

    rows: [A]; first: already drawn after those rows; uniform: [A, gamma - 1]. The cache is left as it was.
    """
    base, depths = draft.length, uniform.shape[1] + 1
    prefix = torch.arange(base) <= rows[:, None]
    own = torch.eye(len(rows), dtype=torch.bool)
    drawn, features = [first], []
    for depth in range(1, depths + 1):
        visible = torch.cat([prefix, *[own] * depth], dim=1)
        wanted: LogitsFor = "all" if depth < depths else "none"
        output = draft.forward_masked(drawn[-1].token, rows + depth, visible, hidden=True, logits=wanted)
        assert output.hidden is not None
        features.append(extract(output.hidden, spec))
        if depth < depths:
            drawn.append(draw(output.logits, uniform[:, depth - 1], warp))
    draft.crop(base)
    return Rollouts(rows, stacked(drawn), torch.stack(features, 1))


def draw(logits: Tensor, uniform: Tensor, warp: Warp) -> Drawn:
    """One token per row of the draft's logits [A, V]. uniform: [A]."""
    q = warp.probs(logits)
    belief = q if warp == Warp() else Warp().probs(logits)
    token = pick(q, uniform.to(q.device))
    return Drawn(token, at(q, token), belief.amax(-1), entropy(belief))


def stacked(drawn: Sequence[Drawn]) -> Drawn:
    """gamma draws of [A] each as one of [A, gamma]."""
    return Drawn(*(torch.stack([getattr(each, field.name) for each in drawn], 1) for field in fields(Drawn)))


def rollout_acceptance(target: CachedLM, rolled: Rollouts, first: Tensor, warp: Warp) -> Tensor:
    """min(1, p / q) of every rollout token given its prefix and the tokens before, [A, gamma].

    first: [A], that of the first tokens, known from the answer. The cache is left as it was.
    """
    tokens, q = rolled.drawn.token, rolled.drawn.q
    depths = tokens.shape[1] - 1
    size = max(1, MAX_ROWS // depths) if depths else len(first)
    parts = zip(rolled.rows.split(size), tokens.split(size), strict=True)
    p = torch.cat([_later_p(target, rows, some, warp) for rows, some in parts])
    return torch.cat([first[:, None], acceptance(p, q[:, 1:])], 1)


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
