"""Recursive rejection sampling of candidates drawn without replacement (DySpec, Algorithm 3;
Sequoia, 2402.12374)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.sampling import SiblingSampler, without_replacement
from decoding.verification import residual_distribution
from decoding.verifiers.tree_walk import TreeVerifier, Trials


class RrswVerifier(TreeVerifier):
    """Accept candidate c with probability R[c] / D[c]; on rejection R = norm([R - D]+), D[c] = 0, D
    = norm(D).

    At first R = p and D = q, so D is always the distribution the next candidate was drawn from.
    Exact as well when the number of candidates depends on those already drawn. `pool` below is D
    times its mass."""

    siblings: SiblingSampler = staticmethod(without_replacement)

    def trials(self, p: Tensor, q: Tensor, tokens: Sequence[int]) -> Trials:
        left, pool = p, q.clone() if len(tokens) > 1 else q
        for number, token in enumerate(tokens):
            mass, drawn = pool.sum(dtype=torch.float64).item(), pool[token].item()
            assert drawn > 0, "a token drawn without replacement is new and has q > 0"
            yield number, left[token].item() * mass, drawn
            left = residual_distribution(left, pool, mass)
            if number + 1 < len(tokens):
                pool[token] = 0
        return left
