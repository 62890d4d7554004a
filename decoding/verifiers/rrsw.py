"""Recursive rejection sampling of candidates drawn without replacement (DySpec, Algorithm 3;
Sequoia, 2402.12374)."""

from torch import Tensor

from decoding.sampling import SiblingSampler, without_replacement
from decoding.verification import residual_distribution
from decoding.verifiers.tree_walk import (
    Tokens,
    TreeVerifier,
    Trials,
    at,
    certain,
    mass_of,
    take_out,
)


class RrswVerifier(TreeVerifier):
    """Accept candidate c with probability R[c] / D[c]; on rejection R = norm([R - D]+), D[c] = 0, D
    = norm(D).

    At first R = p and D = q, so D is always the distribution the next candidate was drawn from.
    Exact as well when the number of candidates depends on those already drawn. `pool` below is D
    times its mass."""

    siblings: SiblingSampler = staticmethod(without_replacement)

    def trials(self, p: Tensor, q: Tensor, tokens: Tokens) -> Trials:
        left, pool = p, q.clone() if len(tokens) > 1 else q
        for number, token in enumerate(tokens):
            mass, drawn = mass_of(pool), at(pool, token)
            assert certain(drawn), "a token drawn without replacement is new and has q > 0"
            yield number, at(left, token) * mass, drawn
            left = residual_distribution(left, pool, mass)
            if number + 1 < len(tokens):
                take_out(pool, token)
        return left
