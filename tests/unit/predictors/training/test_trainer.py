import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from predictors.training.batches import Items
from predictors.training.losses import Pairs, smoothed_cross_entropy
from predictors.training.resume import ResumeFile
from predictors.training.trainer import Trainer, cosine, logits_in_chunks
from runtime.errors import UserError

SETTINGS: dict[str, Any] = {"epochs": 5, "batch_size": 3, "lr": 0.05, "schedule": "cosine"}
SETTINGS |= {"accumulate": 2, "warmup_ratio": 0.1}
GOLDEN = [0.591, 0.510, 0.458, 0.429, 0.423]
Loss = Callable[[torch.Tensor, torch.Tensor], Pairs]
cross_entropy = partial(smoothed_cross_entropy, smoothing=0.0)


def problem() -> tuple[Items, Items]:
    """Two separable classes, 12 prompts of 5 rows and 40 held-out rows."""
    x = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] + x[:, 1] > 0).long()
    return Items(x[:60], y[:60], torch.arange(60) // 5), Items(x[60:], y[60:])


def fit(
    trainer: Trainer, loss: Loss = cross_entropy, held_out_loss: Loss = cross_entropy
) -> nn.Module:
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


def test_golden_loss_and_same_seed_same_weights() -> None:
    trainer = Trainer(**SETTINGS)
    assert not fit(trainer).training
    assert [row["validation_loss"] for row in trainer.history] == pytest.approx(GOLDEN, abs=2e-3)
    assert same(fit(Trainer(**SETTINGS, seed=1)), fit(Trainer(**SETTINGS, seed=1)))
    assert not same(fit(Trainer(**SETTINGS, seed=1)), fit(Trainer(**SETTINGS, seed=2)))


@pytest.mark.parametrize("schedule", ["cosine", "plateau"])
def test_interrupted_and_resumed_equals_uninterrupted(tmp_path: Path, schedule: str) -> None:
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


def test_a_finished_run_that_was_not_saved_trains_no_more(tmp_path: Path) -> None:
    def never(logits: torch.Tensor, y: torch.Tensor) -> Pairs:
        raise AssertionError("no step is left to take")

    state = ResumeFile(tmp_path / "run", {"seed": 0})
    first, again = Trainer(**SETTINGS, state=state), Trainer(**SETTINGS, state=state)
    expected = fit(first)
    assert same(fit(again, never), expected)
    assert again.history == first.history


def test_early_stopping_keeps_the_best_weights() -> None:
    falling_then_rising = iter([3.0, 1.0, 2.0, 2.0, 2.0])
    kept = []

    def held_out_loss(logits: torch.Tensor, y: torch.Tensor) -> Pairs:
        kept.append(logits.clone())
        return torch.tensor([next(falling_then_rising)]), torch.ones(1)

    trainer = Trainer(**{**SETTINGS, "epochs": 9}, patience=3)
    module = fit(trainer, held_out_loss=held_out_loss)
    assert [row["validation_loss"] for row in trainer.history] == [3.0, 1.0, 2.0, 2.0, 2.0]
    assert torch.equal(logits_in_chunks(module, problem()[1].x), kept[1])


def test_plateau_halves_the_rate_after_three_epochs_without_progress() -> None:
    trainer = Trainer(epochs=6, batch_size=3, lr=0.1, schedule="plateau", patience=9)
    fit(trainer, held_out_loss=lambda logits, y: (torch.ones(1), torch.ones(1)))
    assert [row["lr"] for row in trainer.history] == [0.1, 0.1, 0.1, 0.1, 0.05, 0.05]


def test_accumulation_takes_one_step_per_group_of_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, step = [], torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self, *a, **k: steps.append(1) or step(self, *a, **k)
    )
    fit(Trainer(**{**SETTINGS, "epochs": 1, "accumulate": 3}))  # 12 prompts = 4 micro-batches of 3
    assert len(steps) == 2


def test_cosine_warms_up_then_falls_to_zero() -> None:
    assert [cosine(step, 4, 12) for step in (0, 2, 4, 8, 12)] == pytest.approx([0, 0.5, 1, 0.5, 0])
    assert cosine(0, 0, 10) == 1


def test_a_diverging_run_says_so() -> None:
    with pytest.raises(UserError, match="trainer.lr"):
        fit(Trainer(**SETTINGS), lambda logits, y: (logits.sum()[None] * math.nan, torch.ones(1)))
