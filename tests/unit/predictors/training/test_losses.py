import math

import pytest
import torch

from predictors.training import losses
from predictors.training.losses import mean_loss

F = torch.tensor([[0.2, 0.8], [0.7, 0.3]]).log()  # logits of f = .8 and f = .3


def soft_bce(logits: torch.Tensor, s: torch.Tensor) -> float:
    return mean_loss(*losses.weighted_soft_bce(logits, s, 6.0)).item()


def smoothed(logits: torch.Tensor, label: torch.Tensor) -> float:
    return mean_loss(*losses.smoothed_cross_entropy(logits, label, 0.1)).item()


def test_weighted_soft_bce_by_hand_over_the_micro_batch_and_not_per_row() -> None:
    # s = .9 and s = .25, w_rej = 6, w_acc = 1
    first = 6 * 0.1 * -math.log(0.2) + 0.9 * -math.log(0.8)
    second = 6 * 0.75 * -math.log(0.7) + 0.25 * -math.log(0.3)
    expected = (first + second) / (6 * 0.1 + 0.9 + 6 * 0.75 + 0.25)
    assert soft_bce(F, torch.tensor([0.9, 0.25])) == pytest.approx(expected, rel=1e-5)
    s = torch.tensor([1.0, 0.0])
    rows = [soft_bce(F[i : i + 1], s[i : i + 1]) for i in range(2)]
    assert soft_bce(F, s) == pytest.approx((rows[0] + 6 * rows[1]) / 7, rel=1e-5)


def test_weighted_soft_bce_minimum_is_shifted_down_by_w_rej() -> None:
    s = 0.6
    best = s / (s + 6.0 * (1 - s))
    values = [
        soft_bce(torch.tensor([[1 - f, f]]).log(), torch.tensor([s]))
        for f in (best - 0.02, best, best + 0.02)
    ]
    assert values[1] == min(values)


def test_smoothed_and_balanced_cross_entropy_by_hand() -> None:
    """Balanced is the mean over the classes that occur."""
    z = torch.tensor([[2.0, 0.0, -1.0]])
    log_p = z.log_softmax(-1)[0]
    expected = -(0.9 + 0.1 / 3) * log_p[0] - 0.1 / 3 * (log_p[1] + log_p[2])
    assert smoothed(z, torch.tensor([0])) == pytest.approx(expected.item(), rel=1e-5)
    logits, label = torch.randn(5, 3), torch.tensor([0, 0, 0, 2, 2])
    by_class = [smoothed(logits[label == c], label[label == c]) for c in (0, 2)]
    loss = mean_loss(*losses.balanced_cross_entropy(logits, label, 0.1))
    assert loss.item() == pytest.approx(sum(by_class) / 2, rel=1e-5)


@pytest.mark.parametrize("cut", [0, 2, 5])
def test_parts_add_up_to_the_whole(cut: int) -> None:
    """In value and gradient, an empty part included."""
    x, w, soft = torch.randn(5, 4), torch.randn(4, 3, requires_grad=True), torch.rand(5)
    label = torch.tensor([0, 0, 1, 0, 2])
    for loss, y, classes in (
        (lambda logits, s: losses.weighted_soft_bce(logits, s, 6.0), soft, 2),
        (lambda logits, c: losses.smoothed_cross_entropy(logits, c, 0.1), label, 3),
        (lambda logits, c: losses.balanced_cross_entropy(logits, c, 0.1), label, 3),
    ):
        whole = mean_loss(*loss((x @ w)[:, :classes], y))
        parts = [
            loss((x[rows] @ w)[:, :classes], y[rows]) for rows in (slice(0, cut), slice(cut, 5))
        ]
        counts = sum(part[1] for part in parts)
        total = sum(mean_loss(sums, counts) for sums, _ in parts)
        assert total.item() == pytest.approx(whole.item(), rel=1e-5)
        (expected,) = torch.autograd.grad(whole, w)
        assert torch.allclose(torch.autograd.grad(total, w)[0], expected, atol=1e-6)
