"""SpecHub (2411.05289): a closed-form transport for two candidates, one of which is the draft's
most probable token."""

from typing import Any

import torch
from torch import Tensor

from decoding.sampling import SiblingSampler, hub_pair
from decoding.verification import residual_distribution
from decoding.verifiers.tree_walk import (
    Tokens,
    TreeVerifier,
    Trials,
    at,
    certain,
    mass_of,
    normalised,
    take_out,
)


class SpecHubVerifier(TreeVerifier):
    """The pair is (x, hub) with probability q(x), or (hub, x) with probability Q(x) = q(hub) q(x) /
    (1 - q(hub)).

    x is tried first: it takes min(p, q) of its mass from pairs (x, hub), then min(p - q, Q) from
    pairs (hub, x). The hub takes what p(hub) still asks for from the pairs that did not give x. No
    transport of this pair distribution accepts more, and the hub never needs the residual. A lone
    candidate is plain rejection sampling."""

    siblings: SiblingSampler = staticmethod(hub_pair)
    max_siblings = 2

    def trials(self, p: Tensor, q: Tensor, tokens: Tokens) -> Trials:
        assert len(tokens) <= 2, "SpecHub is defined for two candidates"
        if not tokens:
            return p
        if len(tokens) == 1:
            drawn = at(q, tokens[0])
            assert certain(drawn), "a drawn token has q > 0"
            yield 0, at(p, tokens[0]), drawn
            return residual_distribution(p, q)
        first, second = tokens
        hub = q.argmax(-1) if p.dim() > 1 else int(q.argmax())
        if p.dim() == 1:
            assert hub in tokens and first != second, "one of the two candidates is the hub"
        beside = second == hub  # whether the pair is (x, hub)
        x = choose(beside, first, second)
        p_x, q_x, p_hub, q_hub = at(p, x), at(q, x), at(p, hub), at(q, hub)
        assert certain(q_x), "a drawn token has q > 0"
        rest = mass_without(q, hub)
        # The transport of x: min(p, q) of its mass by (x, hub), then of what is left by (hub, x)
        number, left = choose(beside, 0, 1), (p_x - q_x) * (p_x > q_x)  # [p - q]+
        yield number, choose(beside, p_x, left), choose(beside, q_x, q_x / rest * q_hub)
        # Once x has failed. over: what p asks for beyond pairs (x, hub); echo: Q, divided first,
        # since q(hub) / rest may overflow
        over, echo = (p - q).clamp_(min=0), (q / column(rest, q)).mul_(column(q_hub, q))
        take_out(over, hub)
        take_out(echo, hub)
        after_x = mass_without((q - p).clamp_(min=0), hub)  # mass of pairs (x, hub) without x
        after_hub = mass_of((echo - over).clamp_(min=0))  # and of pairs (hub, x)
        from_hub = at_most(p_hub, after_hub)
        given = choose(beside, at_most(p_hub - from_hub, after_x), from_hub)
        waiting = choose(beside, after_x, after_hub)
        if certain(waiting):
            yield choose(waiting > 0, 1 - number, -1), given, waiting
        return normalised(over.sub_(echo).clamp_(min=0), p)


def mass_without(values: Tensor, token: Any) -> Any:
    """Return `mass_of` all tokens but one, as a sum: 1 - q(hub) of float32 distributions loses
    precision."""
    if values.dim() == 1:
        return mass_of(values[:token]) + mass_of(values[token + 1 :])
    others = values.clone()
    take_out(others, token)
    return mass_of(others)


def choose(condition: Any, a: Any, b: Any) -> Any:
    """Return a where `condition` holds, else b: of one position, or of [m]."""
    if isinstance(condition, Tensor):
        return torch.where(condition, a, b)
    return a if condition else b


def at_most(value: Any, bound: Any) -> Any:
    return torch.minimum(value, bound) if isinstance(value, Tensor) else min(value, bound)


def column(value: Any, like: Tensor) -> Any:
    """Return numbers [m] as [m, 1] beside `like` [m, V]; one number as it is."""
    return value.to(like)[:, None] if isinstance(value, Tensor) else value
