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
        return (yield from (_of_rows if p.dim() > 1 else _of_pair)(p, q, tokens))


def _of_pair(p: Tensor, q: Tensor, tokens: Any) -> Trials:
    """On the host, where what a trial needs is computed when it is asked for."""
    hub = int(q.argmax())
    assert hub in tokens and tokens[0] != tokens[1], "one of the two candidates is the hub"
    hub_place = tokens.index(hub)
    x = tokens[1 - hub_place]
    p_x, q_x = p[x].item(), _drawn(q, x)
    rest = _rest(q, hub)
    yield (
        1 - hub_place,
        *((p_x, q_x) if hub_place else (max(p_x - q_x, 0.0), q_x / rest * q[hub].item())),
    )
    waiting, residual = _transport(p, q, hub, rest)
    if waiting[hub_place][1] > 0:
        yield hub_place, *waiting[hub_place]
    return residual


def _of_rows(p: Tensor, q: Tensor, tokens: Any) -> Trials:
    """The same of many pairs [m], without a look at any number: a trial that there is not has the
    candidate -1."""
    first, second = tokens
    hub = q.argmax(-1)
    x = torch.where(first == hub, second, first)
    place = (second == hub).long()  # of the hub
    p_x, q_x, p_hub, q_hub = at(p, x), at(q, x), at(p, hub), at(q, hub)
    others = q.clone()
    take_out(others, hub)
    rest = mass_of(others)
    from_pairs = torch.where(place > 0, p_x, (p_x - q_x).clamp_min(0))
    yield 1 - place, from_pairs, torch.where(place > 0, q_x, q_x / rest * q_hub)
    over = (p - q).clamp_(min=0)
    echo = (q / rest.to(q)[:, None]).mul_(q_hub.to(q)[:, None])
    missing = (q - p).clamp_(min=0)
    for values in (over, echo, missing):
        take_out(values, hub)
    given, left = (echo - over).clamp_(min=0).sum(-1, dtype=torch.float64), mass_of(missing)
    taken = torch.minimum(p_hub, given)
    share = torch.where(place > 0, torch.minimum(p_hub - taken, left), taken)
    waiting = torch.where(place > 0, left, given)
    yield torch.where(waiting > 0, place, -1), share, waiting
    return normalised(over.sub_(echo).clamp_(min=0), p)


def _transport(
    p: Tensor, q: Tensor, hub: int, rest: float
) -> tuple[list[tuple[float, float]], Tensor]:
    """Once x has failed: (mass given to the hub, mass of the pairs) for pairs (hub, x) and (x,
    hub); the residual [V].

    rest: mass of q without the hub. `over` is what p asks for beyond pairs (x, hub), `echo` is Q.
    """
    over, echo = (
        (p - q).clamp_(min=0),
        (q / rest).mul_(q[hub]),
    )  # divided first: q(hub) / rest may overflow
    over[hub] = echo[hub] = 0
    second = _rest((q - p).clamp_(min=0), hub)
    first = (echo - over).clamp_(min=0).sum(dtype=torch.float64).item()
    from_first = min(p[hub].item(), first)
    from_second = min(p[hub].item() - from_first, second)
    return [(from_first, first), (from_second, second)], normalised(
        over.sub_(echo).clamp_(min=0), p
    )


def _rest(mass: Tensor, hub: int) -> float:
    """Mass of every token but the hub: a sum, since 1 - q(hub) of float32 distributions loses what
    matters."""
    return (mass[:hub].sum(dtype=torch.float64) + mass[hub + 1 :].sum(dtype=torch.float64)).item()


def _drawn(q: Tensor, token: int) -> float:
    drawn = q[token].item()
    assert drawn > 0, "a drawn token has q > 0"
    return drawn
