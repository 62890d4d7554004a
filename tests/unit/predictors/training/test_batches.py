"""Rows that a head is trained on, rebalanced, and their division among processes."""

import pytest
import torch
from torch import nn

from predictors.training.batches import (
    SYNTHETIC,
    EpochSampler,
    Items,
    Part,
    RowDropout,
    balancing_weights,
    hold_out_prompts,
    part_of,
    smote,
    standardisation,
)
from tests.helpers.damage.refusals import refuses


def test_items_are_all_rows_of_a_prompt_and_shares_differ_by_one_at_most():
    group = torch.tensor([7, 9, 7, 9, 9, 3])
    items = Items(torch.arange(6.0)[:, None].bfloat16(), torch.arange(6), group)
    x, y = items.__getitems__([2, 0])
    assert len(items) == 3 and y.tolist() == [1, 3, 4, 5] and x.dtype == torch.float32
    for size in (0, 1, 5, 32):
        sizes = [len(range(size)[part_of(size, rank, 3)]) for rank in range(3)]
        assert sum(sizes) == size and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
def test_parts_of_a_micro_batch_are_the_micro_batch_in_order(processes):
    group = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3] * 2)
    items = Items(torch.arange(20.0)[:, None], torch.arange(20), group)
    for batch in ([4, 0, 2, 1, 3], [6, 0], []):
        parts = [Part(items, rank, processes).__getitems__(batch) for rank in range(processes)]
        expected, before = items.__getitems__(batch)[1].tolist(), 0
        for column in range(2):
            assert torch.cat([part[column] for part in parts]).flatten().tolist() == expected
        for x, _, rows_before, rows in parts:
            assert rows == items.count(batch) and rows_before == before
            before += len(x)


def test_dropout_of_the_parts_is_that_of_the_whole():
    x, layer, parts = torch.randn(7, 5), RowDropout(0.4), list[torch.Tensor]()
    torch.manual_seed(0)
    whole = nn.functional.dropout(x, 0.4)
    for part in (slice(0, 3), slice(3, 3), slice(3, 7)):
        torch.manual_seed(0)
        layer.part = part.start, 7
        parts.append(layer(x[part]))
    assert torch.equal(torch.cat(parts), whole) and (whole == 0).any()
    assert torch.equal(layer.eval()(x), x)


def unbalanced(*counts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    label = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    x = torch.randn(len(label), 3, generator=torch.Generator().manual_seed(0))
    x = x * torch.tensor([1.0, 100.0, 1e-3]) + 10 * label[:, None]
    return x, label, torch.arange(len(label))


def test_no_prompt_is_on_both_sides_and_constant_columns_keep_their_scale():
    group = torch.arange(200) // 10
    held = hold_out_prompts(group, 0.2, seed=0)
    assert len(group[held].unique()) == 4
    assert not set(group[held].tolist()) & set(group[~held].tolist())
    assert torch.equal(held, hold_out_prompts(group, 0.2, seed=0))
    for fraction in (0.01, 0.99):
        held = hold_out_prompts(torch.tensor([4, 4, 7]), fraction, seed=1)
        assert held.any() and (~held).any()
    refuses("fewer than 2 prompts", hold_out_prompts, torch.zeros(9), 0.1, seed=0)
    mean, scale = standardisation(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    assert mean.tolist() == [2.0, 5.0] and scale.tolist() == [1.0, 1.0]


def test_smote_raises_minorities_to_the_majority_and_leaves_real_rows_alone():
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


def test_small_classes_are_reported(capsys):
    _, labels, _ = smote(*unbalanced(20, 3, 1), neighbours=5, seed=0)
    assert torch.bincount(labels).tolist() == [20, 20, 1]
    printed = capsys.readouterr().out
    assert "class 1 has 3 training rows, k reduced from 5 to 2" in printed
    assert "class 2 skipped, 1 training rows" in printed


def test_order_depends_on_seed_and_epoch_alone_and_weighted_draws_are_balanced():
    sampler, again = EpochSampler(50, seed=3), EpochSampler(50, seed=3)
    first = list(sampler)
    sampler.epoch = again.epoch = 1
    assert list(sampler) == list(again) != first and sorted(first) == list(range(50))
    label = torch.tensor([0] * 900 + [1] * 100)
    drawn = label[list(EpochSampler(1000, seed=0, weights=balancing_weights(label)))]
    assert 420 < int(drawn.sum()) < 580
