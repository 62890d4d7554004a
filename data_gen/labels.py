"""Labels: the probability that the target accepts draft tokens, accepted lengths, and further
candidates of a position. Pure functions of distributions and tokens.

There are three ways to choose more candidates, each with the verification rule that is exact for
it: drawn without replacement (RRSw), SpecHub's pair, and the draft's most probable tokens as point
masses. The formulas are those of `decoding.verifiers` for one position, applied to many positions
at once, in float32."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from data_gen.columns import Columns, at
from data_gen.storage.shards import MORE, TOP
from decoding.picking import largest, pick


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Return min(1, p / q) for probabilities p, q (q > 0) of the same drawn tokens: SpecDec++'s
    soft label (2405.19715)."""
    return (p / q).clamp(max=1.0)


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """Return sum_v min(p, q) of distributions [..., V]: the probability that one draw from q is
    accepted, [...]."""
    return torch.minimum(p, q).sum(-1)


def drafted_length(rollouts: Tensor, eos_ids: Collection[int]) -> Tensor:
    """Return how many tokens of each rollout [A, gamma] a decoder would draft: all, or up to and
    including the first end token. [A]"""
    end_ids = torch.tensor(sorted(eos_ids), dtype=rollouts.dtype, device=rollouts.device)
    is_end = torch.isin(rollouts, end_ids).int()
    return (is_end.cumsum(1) == is_end).sum(1)


def accepted_length(accept_prob: Tensor, uniform: Tensor, drafted: Tensor) -> Tensor:
    """Return the token-wise verdict (2211.17192): tokens accepted before the first u >= min(1, p /
    q), at most `drafted`. accept_prob, uniform: [A, gamma]; drafted: [A]. int64 [A]."""
    depth = torch.arange(accept_prob.shape[1], device=accept_prob.device)
    accepted = (uniform < accept_prob) & (depth < drafted[:, None])
    return accepted.int().cumprod(1).sum(1)


@dataclass(frozen=True)
class Siblings(Columns):
    """Candidates and their chances at n positions, given that the path there is accepted; 0 where a
    candidate is missing or those before it cannot be rejected.

    rrsw_token: [n, 2] int64, second and third candidate drawn without replacement (-1: none is
    left); rrsw_accept: [n, 2], the probability that each is accepted if those before it are not;
    hub_accept: [n, 2], of SpecHub's pair: that the first is accepted, and the second if the first
    is not; top_accept: [n, 3], of the most probable tokens as point masses: as `rrsw_accept`."""

    rrsw_token: Tensor
    rrsw_accept: Tensor
    hub_accept: Tensor
    top_accept: Tensor

    @classmethod
    def unknown(cls, *shape: int, device: torch.device | None = None) -> "Siblings":
        """Return siblings without candidates, and with acceptance 0."""
        token = torch.full((*shape, MORE), -1, device=device)
        accept = [torch.zeros(*shape, count, device=device) for count in (MORE, MORE, TOP)]
        return Siblings(token, *accept)


def siblings(p: Tensor, q: Tensor, token: Tensor, top: Tensor, uniform: Tensor) -> Siblings:
    """Return the siblings of drawn tokens. p, q: [n, V], distributions of target and draft; token:
    [n], drawn from q; top: [n, 3], from `top_tokens`; uniform: [n, 2], draws of the second and
    third candidate."""
    left, pool, drawn = p, q.clone(), token
    tokens, accepts = list[Tensor](), list[Tensor]()
    for number in range(MORE):  # without replacement
        left = (left - pool / pool.sum(-1, keepdim=True).clamp_min(1e-38)).clamp_min_(0)
        left.div_(left.sum(-1, keepdim=True).clamp_min(1e-38))
        pool.scatter_(-1, drawn[:, None], 0.0)
        mass = pool.sum(-1)
        any_left = mass > 0
        all_left = pool.device.type == "cpu" and bool(any_left.all())  # a GPU would have to wait
        drawn = pick(pool if all_left else pool + (~any_left)[:, None], uniform[:, number])
        accept = (at(left, drawn) * mass / at(pool, drawn).clamp_min(1e-38)).clamp_max(1.0)
        tokens.append(torch.where(any_left, drawn, -1))
        accepts.append(torch.where(any_left, accept, 0.0))
    # point masses; a missing one (the column in front) takes no mass
    wide = F.pad(p, (1, 0))
    best, rest = wide.gather(-1, top + 1), wide.scatter(-1, top + 1, 0.0).sum(-1, keepdim=True)
    remaining = rest + best.flip(-1).cumsum(-1).flip(-1)  # sums only: a difference would round
    return Siblings(
        torch.stack(tokens, -1),
        torch.stack(accepts, -1),
        _hub_pair(p, q, token, tokens[0]),
        _share(best, remaining).clamp_max(1.0),
    )


def top_tokens(logits: Tensor) -> Tensor:
    """Return the most probable tokens of logits [n, V], the lowest id on ties: [n, 3] int64; -1
    where there are no more."""
    left, tokens = logits.to(torch.float32, copy=True), list[Tensor]()
    for _ in range(TOP):
        token = largest(left)[..., None]
        tokens.append(torch.where(left.gather(-1, token) > float("-inf"), token, -1))
        left.scatter_(-1, token, float("-inf"))
    return torch.cat(tokens, -1)


def _hub_pair(p: Tensor, q: Tensor, token: Tensor, second: Tensor) -> Tensor:
    """Return `Siblings.hub_accept`. second: drawn from q without `token`; the pair's other token
    where `token` is the hub."""
    hub = largest(q)
    first, of_hub = token == hub, hub[:, None]
    x = torch.where(first, second.clamp_min(0), token)
    p_x, q_x, p_hub, q_hub = at(p, x), at(q, x), at(p, hub), at(q, hub)
    rest = q.scatter(-1, of_hub, 0.0).sum(-1).clamp_min(1e-38)
    echo = (q / rest[:, None] * q_hub[:, None]).scatter_(-1, of_hub, 0.0)
    over = (p - q).clamp_min_(0).scatter_(-1, of_hub, 0.0)
    after_hub = (echo - over).clamp_min_(0).sum(-1)  # mass of pairs (hub, x) that did not give x
    after_x = (q - p).clamp_min_(0).scatter_(-1, of_hub, 0.0).sum(-1)
    from_hub_pairs = torch.minimum(p_hub, after_hub)
    from_x_pairs = torch.minimum(p_hub - from_hub_pairs, after_x)
    lone = (p_x / q_x.clamp_min(1e-38)).clamp_max(1.0)
    taken = ((p_x - q_x).clamp_min(0) / (q_x / rest * q_hub).clamp_min(1e-38)).clamp_max(1.0)
    hub_first = (1 - taken) * _share(from_hub_pairs, after_hub)
    alone = first & (second < 0)  # a point mass has no pair
    of_first = torch.where(first, hub_first, lone)
    other = torch.where(
        first, torch.where(alone, 0.0, _share(taken, 1 - hub_first)), _share(from_x_pairs, after_x)
    )
    return torch.stack([torch.where(alone, (p_hub / q_hub).clamp_max(1.0), of_first), other], -1)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > 0, part / whole.clamp_min(1e-38), torch.zeros_like(part))
