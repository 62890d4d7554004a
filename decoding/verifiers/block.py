"""Block verification (Sun et al. 2024, 2403.10444), which is also HSD with capped branch resampling
(2601.05724).

HSD's Eqs. 16-20 give the same probabilities: its capped ratio min(1, r*(t)) is the P_t below. The
contract tests hold the literal equations against this file. Among lossless rules with one target
call it accepts the most tokens."""

from collections.abc import Iterable

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


class BlockVerifier:
    """Keep the longest prefix whose coin succeeds, scanning from the end of the draft.

    P_t = min(1, P_{t-1} p/q), Z_t = sum_v [P_t p - q]+, coin h_t = Z_t / (Z_t + 1 - P_t), h_0 = 1,
    h_g = P_g; after row t < g the next token comes from norm([P_t p - q]+)."""

    lossless = True
    siblings: SiblingSampler = staticmethod(iid)
    shapes = ("chain",)
    max_siblings = 1

    def distribution(self, draft: Draft, p: Tensor) -> VerdictDistribution:
        return block_distribution(DraftPath.whole(draft, p))

    def verify(self, draft: Draft, p: Rows, sampler: Sampler) -> Verdict:
        return verdict_at(draft, *self.walk(DraftPath.whole(draft, p), sampler), sampler)

    def walk(self, path: DraftPath, sampler: Sampler) -> tuple[int, Tensor | None]:
        """Return of one path the tokens accepted, and the distribution [V] of what follows (None
        after an open leaf)."""
        return block_walk(path, sampler)


def block_distribution(path: DraftPath) -> VerdictDistribution:
    """Where on the path it ends: rows of the distribution count the path's tokens."""
    joint = joint_ratios(path)
    return VerdictDistribution(
        _scan_from_end(_coins(path, joint)), lambda t: _residual(path, joint, t)
    )


def block_walk(path: DraftPath, sampler: Sampler) -> tuple[int, Tensor | None]:
    """Scan `block_distribution` lazily: return tokens accepted, residual [V]. One pass over the
    vocabulary per coin thrown; on a device, where each look is a wait, all at once."""
    on_host = path.first.device.type == "cpu"
    joint, masses = (joint_ratios(path), []) if on_host else _sent(path)
    t = len(path)
    while t > 0 and not _throw(path, joint, t, sampler, masses):
        t -= 1
    return t, _residual(path, joint, t)


def _sent(path: DraftPath) -> tuple[list[float], list[float]]:
    """Return P_0 .. P_g and Z_0 .. Z_{g-1} from a device, in one copy."""
    ratio, masses = path.first.new_ones((), dtype=torch.float64), list[Tensor]()
    for t, row in enumerate(path.rows[1:]):
        token, p, q = path.draft.token[row - 1], path.target(t), path.q(t)
        short = torch.addcmul(q, p, ratio.to(p), value=-1).clamp_(max=0)
        masses.append(-short.sum(dtype=torch.float64))
        ratio = (ratio * p[token].double() / q[token].double()).clamp_max(1.0)
    drawn, sent = path.drawn_with(masses)
    return _joint(drawn), sent


def joint_ratios(path: DraftPath) -> list[float]:
    """P_0 .. P_g, the capped joint ratios."""
    return _joint(path.drawn())


def _joint(drawn: Iterable[tuple[float, float]]) -> list[float]:
    joint = [1.0]
    for p_token, q_token in drawn:
        joint.append(min(1.0, joint[-1] * p_token / q_token))
    return joint


def _throw(
    path: DraftPath, joint: list[float], t: int, sampler: Sampler, masses: list[float]
) -> bool:
    if t == len(path) or joint[t] == 0:
        return sampler.accept(joint[t], 1.0)
    mass = masses[t] if masses else _mass(path, joint, t)
    total = mass + 1 - joint[t]
    return total <= 0 or sampler.accept(mass, total)


def _mass(path: DraftPath, joint: list[float], t: int) -> float:
    """Z_t."""
    shortfall = torch.sub(path.q(t), path.target(t), alpha=joint[t]).clamp_(
        max=0
    )  # fused: a small P_t p is slow
    return -shortfall.sum(dtype=torch.float64).item()


def _residual(path: DraftPath, joint: list[float], t: int) -> Tensor | None:
    return (
        path.after()
        if t == len(path)
        else residual_distribution(path.target(t), path.q(t), joint[t])
    )


def _coins(path: DraftPath, joint: list[float]) -> Tensor:
    """h_0 .. h_g, float64."""
    coins = torch.ones(len(joint), dtype=torch.float64)
    coins[-1] = joint[-1]
    if len(path) > 1:
        ratio, inner = torch.tensor(joint[1:-1], dtype=torch.float64), range(1, len(path))
        p, q = torch.stack([path.target(t) for t in inner]), torch.stack([path.q(t) for t in inner])
        excess = (ratio.to(p.device)[:, None] * p - q).clamp(min=0).sum(-1).cpu()
        total = excess + 1 - ratio
        coins[1:-1] = torch.where(total > 0, excess / total, 1.0)
    return coins


def _scan_from_end(coins: Tensor) -> Tensor:
    """Probability that t is the largest index whose coin succeeds."""
    failed_after = torch.cat([coins.new_ones(1), (1 - coins.flip(0)[:-1]).cumprod(0)]).flip(0)
    return coins * failed_after
