"""Token-wise verification: accept draft tokens one by one (Leviathan et al. 2023, Chen et al.
2023)."""

import torch
from torch import Tensor

from decoding.sampling import Sampler
from decoding.verification import (
    ChainVerifier,
    DraftPath,
    VerdictDistribution,
    residual_distribution,
)


class TokenVerifier(ChainVerifier):
    """Accept x_t with probability min(1, p / q), else draw from norm([p - q]+) and end the
    round."""

    def on_path(self, path: DraftPath) -> VerdictDistribution:
        accept = torch.tensor([min(1.0, p / q) for p, q in path.drawn()], dtype=torch.float64)
        certain = accept.new_ones(1)
        end_prob = torch.cat([certain, accept.cumprod(0)]) * torch.cat([1 - accept, certain])
        return VerdictDistribution(end_prob, lambda t: _residual(path, t))

    def walk(self, path: DraftPath, sampler: Sampler) -> tuple[int, Tensor | None]:
        """See `ChainVerifier`; touches the vocabulary only where the path ends."""
        accepted = 0
        for p_token, q_token in path.drawn():
            if not sampler.accept(p_token, q_token):
                break
            accepted += 1
        return accepted, _residual(path, accepted)


def _residual(path: DraftPath, t: int) -> Tensor | None:
    return path.after() if t == len(path) else residual_distribution(path.target(t), path.q(t))
