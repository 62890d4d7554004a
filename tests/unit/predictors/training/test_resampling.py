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


def unbalanced(*counts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    label = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    x = torch.randn(len(label), 3, generator=torch.Generator().manual_seed(0))
    x = x * torch.tensor([1.0, 100.0, 1e-3]) + 10 * label[:, None]
    return x, label, torch.arange(len(label))


def test_no_prompt_is_on_both_sides_and_both_have_one() -> None:
    group = torch.arange(200) // 10
    held = hold_out_prompts(group, 0.2, seed=0)
    assert len(group[held].unique()) == 4
    assert not set(group[held].tolist()) & set(group[~held].tolist())
    assert torch.equal(held, hold_out_prompts(group, 0.2, seed=0))
    for fraction in (0.01, 0.99):
        held = hold_out_prompts(torch.tensor([4, 4, 7]), fraction, seed=1)
        assert held.any() and (~held).any()
    with pytest.raises(UserError, match="fewer than 2 prompts"):
        hold_out_prompts(torch.zeros(9), 0.1, seed=0)


def test_constant_columns_keep_their_scale() -> None:
    mean, scale = standardisation(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    assert mean.tolist() == [2.0, 5.0] and scale.tolist() == [1.0, 1.0]


def test_smote_raises_minorities_to_the_majority_and_leaves_real_rows_alone() -> None:
    """Synthetic rows lie between rows of their class."""
    given = unbalanced(40, 12, 8)
    more = smote(*given, neighbours=5, seed=0)
    assert torch.bincount(more[1]).tolist() == [40, 40, 40] and more[0].dtype == torch.float32
    assert all(torch.equal(after[:60], before) for after, before in zip(more, given, strict=True))
    assert (more[2][60:] == SYNTHETIC).all()
    x, label, group = unbalanced(40, 12)
    rows, _, _ = smote(x, label, group, neighbours=5, seed=0)
    mean, scale = standardisation(x)
    real, made = (x[label == 1] - mean) / scale, (rows[len(x) :] - mean) / scale
    apart = torch.cdist(made, real)
    through = apart.unsqueeze(2) + apart.unsqueeze(1)  # via pairs of real rows
    assert (through - torch.cdist(real, real)).amin(dim=(1, 2)).max() < 1e-3


def test_small_classes_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    _, labels, _ = smote(*unbalanced(20, 3, 1), neighbours=5, seed=0)
    assert torch.bincount(labels).tolist() == [20, 20, 1]
    printed = capsys.readouterr().out
    assert "class 1 has 3 training rows, k reduced from 5 to 2" in printed
    assert "class 2 skipped, 1 training rows" in printed


def test_order_depends_on_seed_and_epoch_alone_and_weighted_draws_are_balanced() -> None:
    sampler, again = EpochSampler(50, seed=3), EpochSampler(50, seed=3)
    first = list(sampler)
    sampler.epoch = again.epoch = 1
    assert list(sampler) == list(again) != first and sorted(first) == list(range(50))
    label = torch.tensor([0] * 900 + [1] * 100)
    drawn = label[list(EpochSampler(1000, seed=0, weights=balancing_weights(label)))]
    assert 420 < int(drawn.sum()) < 580
