"""Recursive rejection sampling of i.i.d. candidates, the multi-step rule of SpecInfer
(2305.09781)."""

from collections.abc import Sequence

from torch import Tensor

from decoding.sampling import SiblingSampler, iid
from decoding.verification import residual_distribution
from decoding.verifiers.tree_walk import TreeVerifier, Trials


class RrsVerifier(TreeVerifier):
    """Accept candidate c with probability R[c] / q[c], where R is p at first and norm([R - q]+)
    after each rejection.

    A repeated candidate is tried again, and always fails: the update of R after it is what keeps
    the distribution exact."""

    siblings: SiblingSampler = staticmethod(iid)

    def trials(self, p: Tensor, q: Tensor, tokens: Sequence[int]) -> Trials:
        left = p
        for number, token in enumerate(tokens):
            drawn = q[token].item()
            assert drawn > 0, "a drawn token has q > 0"
            yield number, left[token].item(), drawn
            left = residual_distribution(left, q)
        return left
