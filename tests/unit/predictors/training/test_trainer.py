import math
from pathlib import Path

import pytest
import torch
from torch import nn

from predictors.training.batches import Items
from predictors.training.losses import Pairs, smoothed_cross_entropy
from predictors.training.resume import ResumeFile
from predictors.training.trainer import Trainer, cosine, logits_in_chunks
from runtime.errors import UserError

SETTINGS = {
    "epochs": 5,
    "batch_size": 3,
    "lr": 0.05,
    "schedule": "cosine",
    "accumulate": 2,
    "warmup_ratio": 0.1,
}


def problem() -> tuple[Items, Items]:
    """Two separable classes, 12 prompts of 5 rows and 40 held-out rows."""
    x = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] + x[:, 1] > 0).long()
    return Items(x[:60], y[:60], torch.arange(60) // 5), Items(x[60:], y[60:])


def model(dropout: float = 0.2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 2))


def cross_entropy(logits: torch.Tensor, label: torch.Tensor) -> Pairs:
    return smoothed_cross_entropy(logits, label, smoothing=0.0)


def fit(trainer: Trainer, module: nn.Module | None = None) -> nn.Module:
    train, held_out = problem()
    return trainer.train(module or model(), train, held_out, cross_entropy, cross_entropy)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(
        torch.equal(left, right) for left, right in zip(a.parameters(), b.parameters(), strict=True)
    )


def test_items_are_all_rows_of_a_prompt() -> None:
    items = Items(
        torch.arange(6.0)[:, None].bfloat16(), torch.arange(6), torch.tensor([7, 9, 7, 9, 9, 3])
    )
    assert len(items) == 3
    x, y = items.__getitems__([2, 0])
    assert y.tolist() == [1, 3, 4, 5] and x.dtype == torch.float32


def test_golden_loss() -> None:
    trainer = Trainer(**SETTINGS)
    module = fit(trainer)
    assert [row["validation_loss"] for row in trainer.history] == pytest.approx(GOLDEN, abs=2e-3)
    assert not module.training


GOLDEN = [0.591, 0.510, 0.458, 0.429, 0.423]


def test_same_seed_same_weights() -> None:
    assert same(fit(Trainer(**SETTINGS, seed=1)), fit(Trainer(**SETTINGS, seed=1)))
    assert not same(fit(Trainer(**SETTINGS, seed=1)), fit(Trainer(**SETTINGS, seed=2)))


@pytest.mark.parametrize("schedule", ["cosine", "plateau"])
def test_interrupted_and_resumed_equals_uninterrupted(tmp_path: Path, schedule: str) -> None:
    settings = {**SETTINGS, "schedule": schedule}
    whole = Trainer(**settings)
    expected = fit(whole)

    class Interrupt:
        def log(self, values: dict[str, float], step: int) -> None:
            if step == 3:
                raise KeyboardInterrupt

    state = ResumeFile(tmp_path / "run", {"seed": 0})
    with pytest.raises(KeyboardInterrupt):
        fit(Trainer(**settings, state=state, logger=Interrupt()))
    logger = Curves()
    resumed = Trainer(**settings, state=state, logger=logger)
    assert same(fit(resumed), expected)
    assert resumed.history == whole.history
    assert logger.steps == [1, 2, 3, 4, 5], "a new logger gets the curves of the earlier run too"
    resumed.forget()
    assert list(tmp_path.iterdir()) == []


class Curves:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.steps.append(step)


def test_a_finished_run_that_was_not_saved_trains_no_more(tmp_path: Path) -> None:
    state = ResumeFile(tmp_path / "run", {"seed": 0})
    first, again = Trainer(**SETTINGS, state=state), Trainer(**SETTINGS, state=state)
    expected = fit(first)
    assert same(again.train(model(), *problem(), never, cross_entropy), expected)
    assert again.history == first.history


def never(logits: torch.Tensor, y: torch.Tensor) -> Pairs:
    raise AssertionError("no step is left to take")


def test_early_stopping_keeps_the_best_weights() -> None:
    train, held_out = problem()
    falling_then_rising = iter([3.0, 1.0, 2.0, 2.0, 2.0])
    kept = []

    def held_out_loss(logits: torch.Tensor, y: torch.Tensor) -> Pairs:
        kept.append(logits.clone())
        return torch.tensor([next(falling_then_rising)]), torch.ones(1)

    trainer = Trainer(**{**SETTINGS, "epochs": 9}, patience=3)
    module = trainer.train(model(), train, held_out, cross_entropy, held_out_loss)
    assert [row["validation_loss"] for row in trainer.history] == [3.0, 1.0, 2.0, 2.0, 2.0]
    assert torch.equal(logits_in_chunks(module, held_out.x), kept[1])


def test_plateau_halves_the_rate_after_three_epochs_without_progress() -> None:
    train, held_out = problem()
    trainer = Trainer(epochs=6, batch_size=3, lr=0.1, schedule="plateau", patience=9)
    trainer.train(
        model(), train, held_out, cross_entropy, lambda logits, y: (torch.ones(1), torch.ones(1))
    )
    assert [row["lr"] for row in trainer.history] == [0.1, 0.1, 0.1, 0.1, 0.05, 0.05]


def test_accumulation_takes_one_step_per_group_of_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = []
    step = torch.optim.AdamW.step
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
        train, held_out = problem()
        Trainer(**SETTINGS).train(
            model(),
            train,
            held_out,
            lambda logits, y: (logits.sum()[None] * math.nan, torch.ones(1)),
            cross_entropy,
        )
