"""Recursive rejection sampling of i.i.d. candidates, the multi-step rule of SpecInfer
(2305.09781)."""

from torch import Tensor

from decoding.sampling import SiblingSampler, iid
from decoding.verification import residual_distribution
from decoding.verifiers.tree_walk import Tokens, TreeVerifier, Trials, at, certain


class RrsVerifier(TreeVerifier):
    """Accept candidate c with probability R[c] / q[c], where R is p at first and norm([R - q]+)
    after each rejection.

    A repeated candidate is tried again, and always fails: the update of R after it is what keeps
    the distribution exact."""

    siblings: SiblingSampler = staticmethod(iid)

    def trials(self, p: Tensor, q: Tensor, tokens: Tokens) -> Trials:
        left = p
        for number, token in enumerate(tokens):
            drawn = at(q, token)
            assert certain(drawn), "a drawn token has q > 0"
            yield number, at(left, token), drawn
            left = residual_distribution(left, q)
        return left
