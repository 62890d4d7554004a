"""Verification of candidates that were not drawn (top-k tokens, n-grams, argmax): each is a point
mass, whatever probability a draft gave it."""

from torch import Tensor

from decoding.sampling import SiblingSampler, top_tokens
from decoding.verifiers.tree_walk import (
    Tokens,
    TreeVerifier,
    Trials,
    at,
    mass_of,
    normalised,
    take_out,
)


class PointMassVerifier(TreeVerifier):
    """Accept candidate c with probability R[c]; on rejection R[c] = 0 and R is renormalised. q is
    not read.

    The candidates of a position are accepted with their probability under p, together. Dividing by
    q instead, as released code does, is biased. `left` below is R times its mass."""

    siblings: SiblingSampler = staticmethod(top_tokens)
    reads_q = False

    def trials(self, p: Tensor, q: Tensor, tokens: Tokens) -> Trials:
        if not tokens:
            return p
        left = p.clone()
        for number, token in enumerate(tokens):
            yield number, at(left, token), mass_of(left)
            take_out(left, token)
        return normalised(left, p)
