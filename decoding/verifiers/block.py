"""Block verification (Sun et al. 2024, 2403.10444), which is also HSD with capped branch resampling (2601.05724).

HSD's Eqs. 16-20 give the same probabilities: its capped ratio min(1, r*(t)) is the P_t below. The contract tests hold
the literal equations against this file. Among lossless rules with one target call it accepts the most tokens.
"""

import torch
from torch import Tensor

from decoding.draft import Draft, Verdict
from decoding.law import VerdictLaw, residual_law, verdict_at
from decoding.sampling import Sampler, SiblingLaw, iid
from decoding.verifiers.token import drawn_probs


class BlockVerifier:
    """Keep the longest prefix whose coin succeeds, scanning from the end of the draft.

    P_t = min(1, P_{t-1} p/q), Z_t = sum_v [P_t p - q]+, coin h_t = Z_t / (Z_t + 1 - P_t), h_0 = 1, h_g = P_g; after
    row t < g the next token comes from norm([P_t p - q]+).
    """

    lossless = True
    siblings: SiblingLaw = staticmethod(iid)
    shapes = ("chain",)
    max_siblings = 1

    def law(self, draft: Draft, p: Tensor) -> VerdictLaw:
        joint = joint_ratios(draft, p)
        end_prob = _scan_from_end(_coins(draft, p.double(), torch.tensor(joint, dtype=torch.float64)))
        return VerdictLaw(end_prob, lambda row: self._residual(draft, p, joint, row))

    def verify(self, draft: Draft, p: Tensor, sampler: Sampler) -> Verdict:
        """`law`, scanned lazily: one pass over the vocabulary per coin thrown, no float64 copies."""
        joint = joint_ratios(draft, p)
        row = len(draft)
        while row > 0 and not self._throw(draft, p, joint, row, sampler):
            row -= 1
        return verdict_at(draft, row, self._residual(draft, p, joint, row), sampler)

    def _throw(self, draft: Draft, p: Tensor, joint: list[float], row: int, sampler: Sampler) -> bool:
        if row == len(draft) or joint[row] == 0:
            return sampler.accept(joint[row], 1.0)
        excess = (p[row] * joint[row]).sub_(draft.q[row]).clamp_(min=0)
        mass = excess.sum(dtype=torch.float64).item()
        total = mass + 1 - joint[row]
        return total <= 0 or sampler.accept(mass, total)

    def _residual(self, draft: Draft, p: Tensor, joint: list[float], row: int) -> Tensor:
        return p[row] if row == len(draft) else residual_law(p[row], draft.q[row], joint[row])


def joint_ratios(draft: Draft, p: Tensor) -> list[float]:
    """P_0 .. P_g, the capped joint ratios."""
    joint = [1.0]
    for p_token, q_token in zip(*(probs.tolist() for probs in drawn_probs(draft, p)), strict=True):
        joint.append(min(1.0, joint[-1] * p_token / q_token))
    return joint


def _coins(draft: Draft, p: Tensor, joint: Tensor) -> Tensor:
    """h_0 .. h_g, float64."""
    excess = (joint[:-1, None] * p[:-1] - draft.q[:-1]).clamp(min=0).sum(-1)
    total = excess + 1 - joint[:-1]
    coins = torch.cat([torch.where(total > 0, excess / total, 1.0), joint[-1:]])
    coins[0] = 1.0
    return coins


def _scan_from_end(coins: Tensor) -> Tensor:
    """Probability that t is the largest index whose coin succeeds."""
    failed_after = torch.cat([coins.new_ones(1), (1 - coins.flip(0)[:-1]).cumprod(0)]).flip(0)
    return coins * failed_after
