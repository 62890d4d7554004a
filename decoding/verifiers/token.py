"""Token-wise verification: accept draft tokens one by one (Leviathan et al. 2023, Chen et al.
2023)."""

import torch
from torch import Tensor

from decoding.draft import Draft, Verdict
from decoding.sampling import Sampler, SiblingSampler, iid
from decoding.verification import (
    DraftPath,
    Rows,
    VerdictDistribution,
    residual_distribution,
    verdict_at,
)


class TokenVerifier:
    """Accept x_t with probability min(1, p / q), else draw from norm([p - q]+) and end the
    round."""

    lossless = True
    siblings: SiblingSampler = staticmethod(iid)
    shapes = ("chain",)
    max_siblings = 1

    def distribution(self, draft: Draft, p: Tensor) -> VerdictDistribution:
        return token_distribution(DraftPath.whole(draft, p))

    def verify(self, draft: Draft, p: Rows, sampler: Sampler) -> Verdict:
        return verdict_at(draft, *self.walk(DraftPath.whole(draft, p), sampler), sampler)

    def walk(self, path: DraftPath, sampler: Sampler) -> tuple[int, Tensor | None]:
        """Return of one path the tokens accepted, and the distribution [V] of what follows (None
        after an open leaf)."""
        return token_walk(path, sampler)


def token_distribution(path: DraftPath) -> VerdictDistribution:
    """Where on the path it ends: rows of the distribution count the path's tokens."""
    accept = torch.tensor([min(1.0, p / q) for p, q in path.drawn()], dtype=torch.float64)
    one = accept.new_ones(1)
    end_prob = torch.cat([one, accept.cumprod(0)]) * torch.cat([1 - accept, one])
    return VerdictDistribution(end_prob, lambda t: _residual(path, t))


def token_walk(path: DraftPath, sampler: Sampler) -> tuple[int, Tensor | None]:
    """`token_distribution`, walked lazily: tokens accepted, residual [V]. Touches the vocabulary
    only where the path ends."""
    accepted = 0
    for p_token, q_token in path.drawn():
        if not sampler.accept(p_token, q_token):
            break
        accepted += 1
    return accepted, _residual(path, accepted)


def _residual(path: DraftPath, t: int) -> Tensor | None:
    return path.after() if t == len(path) else residual_distribution(path.target(t), path.q(t))
