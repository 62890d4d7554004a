import pytest
import torch

from predictors.training.resampling import (
    SYNTHETIC,
    EpochSampler,
    balancing_weights,
    hold_out_prompts,
    smote,
    standardisation,
)
from runtime.errors import UserError


def unbalanced(counts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    label = torch.cat([torch.full((count,), name) for name, count in enumerate(counts)])
    x = torch.randn(len(label), 3, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [1.0, 100.0, 1e-3]
    )
    return x + 10 * label[:, None], label, torch.arange(len(label))


def test_no_prompt_is_on_both_sides() -> None:
    group = torch.arange(200) // 10
    held = hold_out_prompts(group, 0.2, seed=0)
    assert len(group[held].unique()) == 4
    assert not set(group[held].tolist()) & set(group[~held].tolist())
    assert torch.equal(held, hold_out_prompts(group, 0.2, seed=0))


@pytest.mark.parametrize("fraction", [0.01, 0.99])
def test_both_sides_have_a_prompt(fraction: float) -> None:
    held = hold_out_prompts(torch.tensor([4, 4, 7]), fraction, seed=1)
    assert held.any() and (~held).any()


def test_one_prompt_cannot_be_split() -> None:
    with pytest.raises(UserError, match="fewer than 2 prompts"):
        hold_out_prompts(torch.zeros(9), 0.1, seed=0)


def test_constant_columns_keep_their_scale() -> None:
    mean, scale = standardisation(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    assert mean.tolist() == [2.0, 5.0] and scale.tolist() == [1.0, 1.0]


def test_smote_raises_minorities_to_the_majority_and_leaves_real_rows_alone() -> None:
    x, label, group = unbalanced((40, 12, 8))
    more, labels, groups = smote(x, label, group, neighbours=5, seed=0)
    assert torch.bincount(labels).tolist() == [40, 40, 40]
    assert (
        torch.equal(more[:60], x)
        and torch.equal(labels[:60], label)
        and torch.equal(groups[:60], group)
    )
    assert (groups[60:] == SYNTHETIC).all()
    assert more.dtype == torch.float32


def test_synthetic_rows_lie_between_rows_of_their_class() -> None:
    x, label, group = unbalanced((40, 12))
    more, labels, _ = smote(x, label, group, neighbours=5, seed=0)
    mean, scale = standardisation(x)
    real, made = (x[label == 1] - mean) / scale, (more[len(x) :] - mean) / scale
    through = torch.cdist(made, real).unsqueeze(2) + torch.cdist(made, real).unsqueeze(
        1
    )  # via pairs of real rows
    assert (through - torch.cdist(real, real)).amin(dim=(1, 2)).max() < 1e-3


def test_small_classes_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    x, label, group = unbalanced((20, 3, 1))
    _, labels, _ = smote(x, label, group, neighbours=5, seed=0)
    assert torch.bincount(labels).tolist() == [20, 20, 1]
    printed = capsys.readouterr().out
    assert "class 1 has 3 training rows, k reduced from 5 to 2" in printed
    assert "class 2 skipped, 1 training rows" in printed


def test_weighted_draws_are_balanced() -> None:
    label = torch.tensor([0] * 900 + [1] * 100)
    drawn = label[list(EpochSampler(1000, seed=0, weights=balancing_weights(label)))]
    assert 420 < int(drawn.sum()) < 580


def test_order_depends_on_seed_and_epoch_alone() -> None:
    sampler, again = EpochSampler(50, seed=3), EpochSampler(50, seed=3)
    first = list(sampler)
    sampler.epoch = again.epoch = 1
    assert list(sampler) == list(again) != first
    assert sorted(first) == list(range(50))
