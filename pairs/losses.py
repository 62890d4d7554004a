"""How far a draft is from its target: the loss of training, and the scores on held-out chats.

Per response position the loss is KL(p || q), mixed with a share of the total variation
TV(p, q) = 1 - sum min(p, q), which is the rejection rate itself. The output layer costs more than
a small draft, so this loss is taken on a random share of the positions and its gradient is written
out instead of being traced."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pairs.chats import Chat, batches

States = Callable[[list[Chat]], tuple[Tensor, Tensor]]
"""Of a batch: hidden states of the draft and of the target, [n, H] each, at the same n
positions."""

ROWS = 128  # positions whose logits are held at once, [128, V] float32


@dataclass(frozen=True)
class Overlap:
    """Means over positions. acceptance: sum_v min(p, q); agreement: argmax p = argmax q; kl: KL(p
    || q) in nats."""

    acceptance: float
    agreement: float
    kl: float
    positions: int


@torch.no_grad()
def head_gradient(
    own: Tensor, target: Tensor, head: Tensor, total_variation: float
) -> tuple[Tensor, float]:
    """Gradient of the mean loss by `own`, and the mean acceptance. own, target: [n, H] hidden
    states; head: [V, H], whose dtype is that of the products.

    By the draft's logits, KL(p || q) has gradient q - p, and TV(p, q) has q (Q - 1[q < p]) with Q =
    sum_{q < p} q."""
    gradients, accepted = [], 0.0
    for own_rows, target_rows in zip(own.split(ROWS), target.split(ROWS), strict=True):
        p, q = (probs_of(rows, head) for rows in (target_rows, own_rows))
        below = (q < p).to(q)
        of_q, of_p = (torch.linalg.vecdot(distribution, below)[:, None] for distribution in (q, p))
        accepted += (1 - of_p + of_q).sum().item()
        factor = below.mul_(-total_variation).add_(1 - total_variation + total_variation * of_q)
        gradient = factor.mul_(q).sub_(p, alpha=1 - total_variation)
        gradients.append((gradient.to(head) @ head).to(own))
    return torch.cat(gradients) / len(own), accepted / len(own)


def probs_of(rows: Tensor, head: Tensor) -> Tensor:
    """[n, V] float32 distributions at temperature 1 of hidden states `rows` [n, H]."""
    return (rows.to(head) @ head.T).float().softmax(-1)


@torch.no_grad()
def measure_overlap(states: States, chats: list[Chat], head: Tensor, stride: int = 1) -> Overlap:
    """How close the draft's distribution is to the target's on every `stride`-th response position
    of `chats`, temperature 1.

    head: [V, H].
    """
    sums = torch.zeros(3, dtype=torch.float64)
    count = 0
    for batch in batches(chats, 4096, random.Random(0)):
        for own, target in zip(*(x[::stride].split(ROWS) for x in states(batch)), strict=True):
            log_p, log_q = (target @ head.T).log_softmax(-1), (own @ head.T).log_softmax(-1)
            p, q = log_p.exp(), log_q.exp()
            same = (p.argmax(-1) == q.argmax(-1)).sum()
            sums += (
                torch.stack([torch.minimum(p, q).sum(), same, (p * (log_p - log_q)).sum()])
                .double()
                .cpu()
            )
            count += len(own)
    acceptance, agreement, kl = (sums / count).tolist()
    return Overlap(acceptance, agreement, kl, count)
