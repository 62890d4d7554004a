"""Block verification (Sun et al. 2024, 2403.10444), which is also HSD with capped branch resampling
(2601.05724).

HSD's Eqs. 16-20 give the same probabilities: its capped ratio min(1, r*(t)) is the P_t below. The
contract tests hold the literal equations against this file. Among lossless rules with one target
call it accepts the most tokens."""

from collections.abc import Iterable

import torch
from torch import Tensor

from decoding.sampling import Sampler
from decoding.verification import (
    ChainVerifier,
    DraftPath,
    VerdictDistribution,
    residual_distribution,
)


class BlockVerifier(ChainVerifier):
    """Keep the longest prefix whose coin succeeds, scanning from the end of the draft.

    `on_path`, `walk` and `_sent` are this rule on the host, batched and on a device, which contract
    tests compare; `parallel` and `hsd` take it from here.

    P_t = min(1, P_{t-1} p/q), Z_t = sum_v [P_t p - q]+, coin h_t = Z_t / (Z_t + 1 - P_t), h_0 = 1,
    h_g = P_g; after row t < g the next token comes from norm([P_t p - q]+)."""

    def on_path(self, path: DraftPath) -> VerdictDistribution:
        joint = joint_ratios(path.drawn())
        coins = torch.ones(len(joint), dtype=torch.float64)
        coins[-1] = joint[-1]
        if len(path) > 1:
            ratio, inner = torch.tensor(joint[1:-1], dtype=torch.float64), range(1, len(path))
            p = torch.stack([path.target(t) for t in inner])
            q = torch.stack([path.q(t) for t in inner])
            excess = (ratio.to(p.device)[:, None] * p - q).clamp(min=0).sum(-1).cpu()
            total = excess + 1 - ratio
            coins[1:-1] = torch.where(total > 0, excess / total, 1.0)
        # The path ends at the largest t whose coin succeeds
        failed = torch.cat([coins.new_ones(1), (1 - coins.flip(0)[:-1]).cumprod(0)]).flip(0)
        return VerdictDistribution(coins * failed, lambda t: _residual(path, joint, t))

    def walk(self, path: DraftPath, sampler: Sampler) -> tuple[int, Tensor | None]:
        """See `ChainVerifier`. Takes one pass over the vocabulary per coin; on a device, where each
        read is a wait, all at once."""
        if path.first.device.type == "cpu":
            joint, masses = joint_ratios(path.drawn()), list[float]()
        else:
            joint, masses = _sent(path)
        for t in range(len(path), 0, -1):
            if t == len(path) or joint[t] == 0:
                succeeds = sampler.accept(joint[t], 1.0)
            else:
                mass = masses[t] if masses else -_shortfall(path, joint[t], t).item()
                total = mass + 1 - joint[t]
                succeeds = total <= 0 or sampler.accept(mass, total)
            if succeeds:
                return t, _residual(path, joint, t)
        return 0, _residual(path, joint, 0)


def joint_ratios(drawn: Iterable[tuple[float, float]]) -> list[float]:
    """Return P_0 .. P_g, the capped joint ratios. drawn: p and q of each token of a path."""
    joint = [1.0]
    for p_token, q_token in drawn:
        joint.append(min(1.0, joint[-1] * p_token / q_token))
    return joint


def _sent(path: DraftPath) -> tuple[list[float], list[float]]:
    """Return P_0 .. P_g and Z_0 .. Z_{g-1} from a device, in one copy."""
    ratio, masses = path.first.new_ones((), dtype=torch.float64), list[Tensor]()
    for t, row in enumerate(path.rows[1:]):
        token, p, q = path.draft.token[row - 1], path.target(t), path.q(t)
        short = torch.addcmul(q, p, ratio.to(p), value=-1).clamp_(max=0)
        masses.append(-short.sum(dtype=torch.float64))
        ratio = (ratio * p[token].double() / q[token].double()).clamp_max(1.0)
    drawn, sent = path.drawn_with(masses)
    return joint_ratios(drawn), sent


def _shortfall(path: DraftPath, ratio: float, t: int) -> Tensor:
    """Return -Z_t, []."""
    short = torch.sub(path.q(t), path.target(t), alpha=ratio)  # fused: a small P_t p is slow
    return short.clamp_(max=0).sum(dtype=torch.float64)


def _residual(path: DraftPath, joint: list[float], t: int) -> Tensor | None:
    if t == len(path):
        return path.after()
    return residual_distribution(path.target(t), path.q(t), joint[t])
