"""The training loop and its losses."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from predictors.training import losses
from predictors.training.batches import Items
from predictors.training.losses import Pairs, mean_loss, smoothed_cross_entropy
from predictors.training.trainer import ResumeFile, Trainer, cosine, logits_in_chunks
from runtime.errors import UserError

SETTINGS: dict[str, Any] = {"epochs": 5, "batch_size": 3, "lr": 0.05, "schedule": "cosine"}
SETTINGS |= {"accumulate": 2, "warmup_ratio": 0.1}
GOLDEN = [0.591, 0.510, 0.458, 0.429, 0.423]
Loss = Callable[[torch.Tensor, torch.Tensor], Pairs]
cross_entropy = partial(smoothed_cross_entropy, smoothing=0.0)
F = torch.tensor([[0.2, 0.8], [0.7, 0.3]]).log()  # logits of f = .8 and f = .3


def problem() -> tuple[Items, Items]:
    """Two separable classes, 12 prompts of 5 rows and 40 held-out rows."""
    x = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] + x[:, 1] > 0).long()
    return Items(x[:60], y[:60], torch.arange(60) // 5), Items(x[60:], y[60:])


def fit(trainer: Trainer, loss: Loss = cross_entropy, held_out_loss: Any = cross_entropy) -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
    return trainer.train(module, *problem(), loss, held_out_loss)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(map(torch.equal, a.parameters(), b.parameters()))


class Curves:
    """A logger, which interrupts at an epoch."""

    def __init__(self, until: int | None = None) -> None:
        self.steps, self.until = list[int](), until

    def log(self, values: dict[str, float], step: int) -> None:
        self.steps.append(step)
        if step == self.until:
            raise KeyboardInterrupt


def test_golden_loss_and_same_seed_same_weights():
    trainer = Trainer(**SETTINGS)
    assert not fit(trainer).training
    assert [row["validation_loss"] for row in trainer.history] == pytest.approx(GOLDEN, abs=2e-3)
    assert same(fit(Trainer(**SETTINGS, seed=1)), fit(Trainer(**SETTINGS, seed=1)))
    assert not same(fit(Trainer(**SETTINGS, seed=1)), fit(Trainer(**SETTINGS, seed=2)))


@pytest.mark.parametrize("schedule", ["cosine", "plateau"])
def test_interrupted_and_resumed_equals_uninterrupted(tmp_path, schedule):
    settings = {**SETTINGS, "schedule": schedule}
    whole = Trainer(**settings)
    expected = fit(whole)
    state = ResumeFile(tmp_path / "run", {"seed": 0})
    with pytest.raises(KeyboardInterrupt):
        fit(Trainer(**settings, state=state, logger=Curves(3)))
    logger = Curves()
    resumed = Trainer(**settings, state=state, logger=logger)
    assert same(fit(resumed), expected)
    assert resumed.history == whole.history
    assert logger.steps == [1, 2, 3, 4, 5], "a new logger gets the curves of the earlier run too"
    resumed.forget()
    assert list(tmp_path.iterdir()) == []


def test_a_finished_run_that_was_not_saved_trains_no_more(tmp_path):
    def never(logits: torch.Tensor, y: torch.Tensor) -> Pairs:
        raise AssertionError("no step is left to take")

    state = ResumeFile(tmp_path / "run", {"seed": 0})
    first, again = Trainer(**SETTINGS, state=state), Trainer(**SETTINGS, state=state)
    expected = fit(first)
    assert same(fit(again, never), expected)
    assert again.history == first.history


def test_early_stopping_keeps_the_best_weights():
    falling_then_rising = iter([3.0, 1.0, 2.0, 2.0, 2.0])
    kept = []

    def held_out_loss(logits: torch.Tensor, y: torch.Tensor) -> Pairs:
        kept.append(logits.clone())
        return torch.tensor([next(falling_then_rising)]), torch.ones(1)

    trainer = Trainer(**{**SETTINGS, "epochs": 9}, patience=3)
    module = fit(trainer, held_out_loss=held_out_loss)
    assert [row["validation_loss"] for row in trainer.history] == [3.0, 1.0, 2.0, 2.0, 2.0]
    assert torch.equal(logits_in_chunks(module, problem()[1].x), kept[1])


def test_plateau_halves_the_rate_after_three_epochs_and_cosine_warms_up_then_falls():
    trainer = Trainer(epochs=6, batch_size=3, lr=0.1, schedule="plateau", patience=9)
    fit(trainer, held_out_loss=lambda logits, y: (torch.ones(1), torch.ones(1)))
    assert [row["lr"] for row in trainer.history] == [0.1, 0.1, 0.1, 0.1, 0.05, 0.05]
    assert [cosine(step, 4, 12) for step in (0, 2, 4, 8, 12)] == pytest.approx([0, 0.5, 1, 0.5, 0])
    assert cosine(0, 0, 10) == 1


def test_accumulation_takes_one_step_per_group_of_micro_batches(monkeypatch):
    steps, step = [], torch.optim.AdamW.step
    counted = lambda self, *a, **k: steps.append(1) or step(self, *a, **k)  # noqa: E731
    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    fit(Trainer(**{**SETTINGS, "epochs": 1, "accumulate": 3}))  # 12 prompts = 4 micro-batches of 3
    assert len(steps) == 2


def test_a_diverging_run_says_so():
    with pytest.raises(UserError, match="trainer.lr"):
        fit(Trainer(**SETTINGS), lambda logits, y: (logits.sum()[None] * math.nan, torch.ones(1)))


def soft_bce(logits: torch.Tensor, s: torch.Tensor) -> float:
    return mean_loss(*losses.weighted_soft_bce(logits, s, 6.0)).item()


def smoothed(logits: torch.Tensor, label: torch.Tensor) -> float:
    return mean_loss(*losses.smoothed_cross_entropy(logits, label, 0.1)).item()


def test_weighted_soft_bce_by_hand_over_the_micro_batch_and_not_per_row():
    # s = .9 and s = .25, w_rej = 6, w_acc = 1
    first = 6 * 0.1 * -math.log(0.2) + 0.9 * -math.log(0.8)
    second = 6 * 0.75 * -math.log(0.7) + 0.25 * -math.log(0.3)
    expected = (first + second) / (6 * 0.1 + 0.9 + 6 * 0.75 + 0.25)
    assert soft_bce(F, torch.tensor([0.9, 0.25])) == pytest.approx(expected, rel=1e-5)
    s = torch.tensor([1.0, 0.0])
    rows = [soft_bce(F[i : i + 1], s[i : i + 1]) for i in range(2)]
    assert soft_bce(F, s) == pytest.approx((rows[0] + 6 * rows[1]) / 7, rel=1e-5)


def test_weighted_soft_bce_minimum_is_shifted_down_by_w_rej():
    s = 0.6
    best = s / (s + 6.0 * (1 - s))
    logits = [torch.tensor([[1 - f, f]]).log() for f in (best - 0.02, best, best + 0.02)]
    values = [soft_bce(each, torch.tensor([s])) for each in logits]
    assert values[1] == min(values)


def test_smoothed_and_balanced_cross_entropy_by_hand():
    z = torch.tensor([[2.0, 0.0, -1.0]])
    log_p = z.log_softmax(-1)[0]
    expected = -(0.9 + 0.1 / 3) * log_p[0] - 0.1 / 3 * (log_p[1] + log_p[2])
    assert smoothed(z, torch.tensor([0])) == pytest.approx(expected.item(), rel=1e-5)
    logits, label = torch.randn(5, 3), torch.tensor([0, 0, 0, 2, 2])
    by_class = [smoothed(logits[label == c], label[label == c]) for c in (0, 2)]
    loss = mean_loss(*losses.balanced_cross_entropy(logits, label, 0.1))
    assert loss.item() == pytest.approx(sum(by_class) / 2, rel=1e-5)


@pytest.mark.parametrize("cut", [0, 2, 5])
def test_parts_add_up_to_the_whole(cut):
    x, w, soft = torch.randn(5, 4), torch.randn(4, 3, requires_grad=True), torch.rand(5)
    label = torch.tensor([0, 0, 1, 0, 2])
    for loss, y, classes in (
        (lambda logits, s: losses.weighted_soft_bce(logits, s, 6.0), soft, 2),
        (lambda logits, c: losses.smoothed_cross_entropy(logits, c, 0.1), label, 3),
        (lambda logits, c: losses.balanced_cross_entropy(logits, c, 0.1), label, 3),
    ):
        whole = mean_loss(*loss((x @ w)[:, :classes], y))
        halves = slice(0, cut), slice(cut, 5)
        parts = [loss((x[rows] @ w)[:, :classes], y[rows]) for rows in halves]
        counts = sum(part[1] for part in parts)
        total = sum(mean_loss(sums, counts) for sums, _ in parts)
        assert total.item() == pytest.approx(whole.item(), rel=1e-5)
        (expected,) = torch.autograd.grad(whole, w)
        assert torch.allclose(torch.autograd.grad(total, w)[0], expected, atol=1e-6)
