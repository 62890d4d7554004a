"""Token-wise verification: accept draft tokens one by one (Leviathan et al. 2023, Chen et al. 2023)."""

import torch
from torch import Tensor

from decoding.draft import Draft, Verdict
from decoding.law import VerdictLaw, residual_law, verdict_at
from decoding.sampling import Sampler, SiblingLaw, iid


class TokenVerifier:
    """Accept x_t with probability min(1, p / q), else draw from norm([p - q]+) and end the round."""

    lossless = True
    siblings: SiblingLaw = staticmethod(iid)
    shapes = ("chain",)
    max_siblings = 1

    def law(self, draft: Draft, p: Tensor) -> VerdictLaw:
        p_drawn, q_drawn = drawn_probs(draft, p)
        accept = (p_drawn / q_drawn).clamp(max=1)
        one = accept.new_ones(1)
        end_prob = torch.cat([one, accept.cumprod(0)]) * torch.cat([1 - accept, one])
        return VerdictLaw(end_prob, lambda row: self._residual(draft, p, row))

    def verify(self, draft: Draft, p: Tensor, sampler: Sampler) -> Verdict:
        """`law`, walked lazily: touches the vocabulary only where the round ends."""
        row = 0
        for p_token, q_token in zip(*(probs.tolist() for probs in drawn_probs(draft, p)), strict=True):
            if not sampler.accept(p_token, q_token):
                break
            row += 1
        return verdict_at(draft, row, self._residual(draft, p, row), sampler)

    def _residual(self, draft: Draft, p: Tensor, row: int) -> Tensor:
        return p[row] if row == len(draft) else residual_law(p[row], draft.q[row])


def drawn_probs(draft: Draft, p: Tensor) -> tuple[Tensor, Tensor]:
    """p and q of each token of a chain, [g] float64 each."""
    assert draft.is_chain, "this verifier is exact for chains only"
    rows = torch.arange(len(draft))
    return p[rows, draft.token].double(), draft.q[rows, draft.token].double()
