"""More candidates for a position than the one that was drafted: which, and how likely the target
accepts them.

Three ways to choose them, each with the verification rule that is exact for it: drawn without
replacement (RRSw), SpecHub's pair, the draft's most probable tokens as point masses. All of it is
what `decoding.verifiers` says of one position, for many positions at once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from data_gen.columns import Columns
from decoding.picking import largest, pick

MORE, TOP = 2, 3
"""Candidates drawn besides the first; most probable tokens."""


@dataclass(frozen=True)
class Siblings(Columns):
    """Candidates and their chances at n positions, given that the path there is accepted; 0 where a
    candidate is missing or its elder ones cannot be rejected.

    rrsw_token: [n, 2] int64, second and third candidate drawn without replacement (-1: none is
    left); rrsw_accept: [n, 2], the probability that each is accepted if its elder ones are not;
    hub_accept: [n, 2], of SpecHub's pair: that the first is accepted, and the second if the first
    is not; top_accept: [n, 3], of the most probable tokens as point masses: as `rrsw_accept`."""

    rrsw_token: Tensor
    rrsw_accept: Tensor
    hub_accept: Tensor
    top_accept: Tensor

    @classmethod
    def unknown(cls, *shape: int, device: torch.device | None = None) -> "Siblings":
        """No candidate, nothing accepted."""
        token = torch.full((*shape, MORE), -1, device=device)
        accept = [torch.zeros(*shape, count, device=device) for count in (MORE, MORE, TOP)]
        return cls(token, *accept)


def siblings(p: Tensor, q: Tensor, token: Tensor, top: Tensor, uniform: Tensor) -> Siblings:
    """p, q: [n, V], distributions of target and draft; token: [n], drawn from q; top: [n, 3], as
    `top_tokens` gives them; uniform: [n, 2], draws of the second and third candidate."""
    tokens, accept = _without_replacement(p, q, token, uniform)
    return Siblings(tokens, accept, _hub_pair(p, q, token, tokens[:, 0]), _point_masses(p, top))


def top_tokens(logits: Tensor) -> Tensor:
    """[n, 3] int64: the most probable tokens of logits [n, V], the lowest id on ties; -1 where
    there are no more."""
    left, found = logits.to(torch.float32, copy=True), list[Tensor]()
    for _ in range(TOP):
        token = largest(left)[..., None]
        there = left.gather(-1, token) > float("-inf")
        found.append(torch.where(there, token, -1))
        left.scatter_(-1, token, float("-inf"))
    return torch.cat(found, -1)


def greedy_point_masses(top: Tensor, said: Tensor) -> Tensor:
    """`Siblings.top_accept` under a greedy target that says `said` [...]. top: [..., 3]."""
    return (top == said[..., None]).float()


def _without_replacement(
    p: Tensor, q: Tensor, token: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    left, pool, drawn = p, q.clone(), token
    tokens, accepts = [], []
    for number in range(MORE):
        left = _residual(left, pool / pool.sum(-1, keepdim=True).clamp_min(1e-38))
        pool.scatter_(-1, drawn[:, None], 0.0)
        mass = pool.sum(-1)
        there = mass > 0
        all_there = pool.device.type == "cpu" and bool(there.all())  # a GPU adds sooner than asks
        drawn = pick(pool if all_there else pool + (~there)[:, None], uniform[:, number])
        accept = (_at(left, drawn) * mass / _at(pool, drawn).clamp_min(1e-38)).clamp_max(1.0)
        tokens.append(torch.where(there, drawn, -1))
        accepts.append(torch.where(there, accept, 0.0))
    return torch.stack(tokens, -1), torch.stack(accepts, -1)


def _hub_pair(p: Tensor, q: Tensor, token: Tensor, second: Tensor) -> Tensor:
    """`second`: drawn from q without `token`, the pair's other token where `token` is the hub."""
    hub = largest(q)
    first, of_hub = token == hub, hub[:, None]
    x = torch.where(first, second.clamp_min(0), token)
    p_x, q_x, p_hub, q_hub = _at(p, x), _at(q, x), _at(p, hub), _at(q, hub)
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
    return torch.stack(
        [
            torch.where(alone, (p_hub / q_hub).clamp_max(1.0), torch.where(first, hub_first, lone)),
            torch.where(
                first,
                torch.where(alone, 0.0, _share(taken, 1 - hub_first)),
                _share(from_x_pairs, after_x),
            ),
        ],
        -1,
    )


def _point_masses(p: Tensor, top: Tensor) -> Tensor:
    """A token that is missing takes nothing."""
    found = torch.where(top >= 0, p.gather(-1, top.clamp_min(0)), 0.0)
    left = p.sum(-1, keepdim=True) - (found.cumsum(-1) - found)
    return _share(found, left).clamp_max(1.0)


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """norm([p - q]+) [n, V]; zeros where p is q."""
    left = (p - q).clamp_min_(0)
    return left.div_(left.sum(-1, keepdim=True).clamp_min(1e-38))


def _at(distributions: Tensor, token: Tensor) -> Tensor:
    return distributions.gather(-1, token[:, None])[:, 0]


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > 0, part / whole.clamp_min(1e-38), torch.zeros_like(part))
