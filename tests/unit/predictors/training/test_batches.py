"""Rows that a head is trained on, rebalanced, and their division among processes."""

import pytest
import torch
from torch import nn

from predictors.training.batches import (
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


def unbalanced(*counts: int) -> tuple[torch.Tensor, torch.Tensor]:
    label = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    x = torch.randn(len(label), 3, generator=torch.Generator().manual_seed(0))
    x = x * torch.tensor([1.0, 100.0, 1e-3]) + 10 * label[:, None]
    return x, label


def everything(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(len(x), dtype=torch.bool)


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


def test_smote_raises_minorities_to_the_majority():
    x, label = unbalanced(40, 12, 8)
    made, labels = smote(x, label, everything(x), neighbours=5, seed=0)
    assert torch.bincount(torch.cat([label, labels])).tolist() == [40, 40, 40]
    assert made.dtype == torch.float32
    x, label = unbalanced(40, 12)
    rows, _ = smote(x, label, everything(x), neighbours=5, seed=0)
    mean, scale = standardisation(x)
    real, made = (x[label == 1] - mean) / scale, (rows - mean) / scale
    apart = torch.cdist(made, real)
    through = apart.unsqueeze(2) + apart.unsqueeze(1)  # via pairs of real rows
    assert (through - torch.cdist(real, real)).amin(dim=(1, 2)).max() < 1e-3
    kept = torch.rand(len(x), generator=torch.Generator().manual_seed(1)) < 0.7
    some, _ = smote(x, label, kept, neighbours=5, seed=0)
    alone, _ = smote(x[kept], label[kept], everything(x[kept]), neighbours=5, seed=0)
    assert torch.equal(some, alone), "only the training fold is looked at"
    assert len(smote(x, label, kept, neighbours=0, seed=0)[0]) == 0


def test_smote_looks_at_as_many_rows_as_memory_is_for(capsys, monkeypatch):
    monkeypatch.setattr("predictors.training.batches.SMOTE_BYTES", 0)
    x, label = unbalanced(4000, 400)
    _, labels = smote(x, label, everything(x), neighbours=5, seed=0)
    assert "looks at 1,000 of 4,400 training rows" in capsys.readouterr().out
    assert 800 <= len(labels) <= 820 and (labels == 1).all()


def test_small_classes_are_reported(capsys):
    x, label = unbalanced(20, 3, 1)
    _, labels = smote(x, label, everything(x), neighbours=5, seed=0)
    assert torch.bincount(torch.cat([label, labels])).tolist() == [20, 20, 1]
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


def test_more_items_than_are_shuffled_together_come_from_few_places_at_a_time():
    """All once, in another order each epoch; drawn by weight, classes as often in every window."""
    sampler = EpochSampler(10_000, seed=1, together=640)
    first, sampler.epoch = list(sampler), 1
    assert sorted(first) == list(range(10_000)) and list(sampler) != first
    for start in range(0, 10_000, 640):
        window = torch.tensor(first[start : start + 640])
        assert len((window // 10).unique()) <= 64 and (window.diff() == 1).sum() < 20
    label = (torch.arange(10_000) % 10 == 0).long()
    drawn = label[list(EpochSampler(10_000, 0, balancing_weights(label), together=640))]
    assert all(0.35 < float(some.float().mean()) < 0.65 for some in drawn.split(640))
    label = (torch.arange(10_000) >= 9_900).long()  # all of a class in a few blocks
    drawn = label[list(EpochSampler(10_000, 0, balancing_weights(label), together=640))]
    assert len(drawn) == 10_000 and 0.45 < float(drawn.float().mean()) < 0.55
    assert list(EpochSampler(50, seed=3, together=50)) == list(EpochSampler(50, seed=3))


def test_items_of_some_rows_and_of_more_are_those_of_a_copy():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 4, generator=generator).bfloat16(), torch.arange(30)
    group, kept = torch.randint(5, (30,), generator=generator), torch.arange(30) % 3 > 0
    lazy, copied = Items(x, y, group, kept), Items(x[kept], y[kept], group[kept])
    for batch in ([2, 0], [1], []):
        for one, other in zip(lazy.__getitems__(batch), copied.__getitems__(batch), strict=True):
            assert torch.equal(one, other)
    more = torch.randn(3, 4, generator=generator), torch.tensor([7, 8, 9])
    lazy = Items(x, y, kept=kept, more=more)
    copied = Items(torch.cat([x[kept].float(), more[0]]), torch.cat([y[kept], more[1]]))
    batch = [22, 0, 20, 3, 19]
    for one, other in zip(lazy.__getitems__(batch), copied.__getitems__(batch), strict=True):
        assert torch.equal(one, other)


def test_constants_are_worked_out_from_parts_of_the_rows(monkeypatch: pytest.MonkeyPatch):
    x = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0)).double()
    x = x * 3 + torch.tensor([0.0, 1e3, -5.0])
    x[:, 2] = 0.1
    whole = torch.std_mean(x, 0, correction=0)
    monkeypatch.setattr("predictors.training.batches.CHUNK", 64)
    mean, scale = standardisation(x.float())
    assert torch.allclose(mean, whole[1].float(), rtol=1e-5) and scale[2] == 1.0
    assert torch.allclose(scale[:2], whole[0][:2].float(), rtol=1e-4)
