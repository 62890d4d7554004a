import math

import pytest
import torch

from predictors.training import losses


def weighted_soft_bce(logits: torch.Tensor, s: torch.Tensor, w_rej: float) -> torch.Tensor:
    return losses.mean_loss(*losses.weighted_soft_bce(logits, s, w_rej))


def smoothed_cross_entropy(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return losses.mean_loss(*losses.smoothed_cross_entropy(logits, label, 0.1))


def logits_of(f: float) -> list[float]:
    return [math.log(1 - f), math.log(f)]


def test_weighted_soft_bce_by_hand() -> None:
    # f = .8, s = .9 and f = .3, s = .25, w_rej = 6, w_acc = 1
    logits = torch.tensor([logits_of(0.8), logits_of(0.3)])
    above = (
        6 * 0.1 * -math.log(0.2)
        + 0.9 * -math.log(0.8)
        + 6 * 0.75 * -math.log(0.7)
        + 0.25 * -math.log(0.3)
    )
    below = 6 * 0.1 + 0.9 + 6 * 0.75 + 0.25
    loss = weighted_soft_bce(logits, torch.tensor([0.9, 0.25]), w_rej=6.0)
    assert loss.item() == pytest.approx(above / below, rel=1e-5)


def test_weighted_soft_bce_normalises_over_the_micro_batch_not_per_row() -> None:
    logits, s = torch.tensor([logits_of(0.8), logits_of(0.3)]), torch.tensor([1.0, 0.0])
    rows = [weighted_soft_bce(logits[i : i + 1], s[i : i + 1], w_rej=6.0).item() for i in range(2)]
    assert weighted_soft_bce(logits, s, w_rej=6.0).item() == pytest.approx(
        (rows[0] + 6 * rows[1]) / 7, rel=1e-5
    )


def test_weighted_soft_bce_minimum_is_shifted_down_by_w_rej() -> None:
    s, w = 0.6, 6.0
    best = s / (s + w * (1 - s))
    losses = [
        weighted_soft_bce(torch.tensor([logits_of(f)]), torch.tensor([s]), w).item()
        for f in (best - 0.02, best, best + 0.02)
    ]
    assert losses[1] == min(losses)


def test_smoothed_cross_entropy_by_hand() -> None:
    logits = torch.tensor([[2.0, 0.0, -1.0]])
    log_p = [v - math.log(math.exp(2) + 1 + math.exp(-1)) for v in (2.0, 0.0, -1.0)]
    expected = -(0.9 + 0.1 / 3) * log_p[0] - 0.1 / 3 * (log_p[1] + log_p[2])
    assert smoothed_cross_entropy(logits, torch.tensor([0])).item() == pytest.approx(
        expected, rel=1e-5
    )


def test_balanced_cross_entropy_is_the_mean_over_classes() -> None:
    logits, label = torch.randn(5, 3), torch.tensor([0, 0, 0, 2, 2])
    by_class = [
        smoothed_cross_entropy(logits[label == c], label[label == c]).item() for c in (0, 2)
    ]
    found = losses.mean_loss(*losses.balanced_cross_entropy(logits, label, 0.1))
    assert found.item() == pytest.approx(sum(by_class) / 2, rel=1e-5)


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
        whole = losses.mean_loss(*loss((x @ w)[:, :classes], y))
        parts = [
            loss((x[rows] @ w)[:, :classes], y[rows]) for rows in (slice(0, cut), slice(cut, 5))
        ]
        counts = sum(part[1] for part in parts)
        values = [losses.mean_loss(sums, counts) for sums, _ in parts]
        assert sum(values).item() == pytest.approx(whole.item(), rel=1e-5)
        (wanted,) = torch.autograd.grad(whole, w)
        assert torch.allclose(torch.autograd.grad(sum(values), w)[0], wanted, atol=1e-6)
