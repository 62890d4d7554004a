import pytest
import torch
from torch import nn

from predictors.training.batches import Items, Part, RowDropout, part_of


def test_items_are_all_rows_of_a_prompt() -> None:
    group = torch.tensor([7, 9, 7, 9, 9, 3])
    items = Items(torch.arange(6.0)[:, None].bfloat16(), torch.arange(6), group)
    x, y = items.__getitems__([2, 0])
    assert len(items) == 3 and y.tolist() == [1, 3, 4, 5] and x.dtype == torch.float32


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
def test_parts_of_a_micro_batch_are_the_micro_batch_in_order(processes: int) -> None:
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


def test_shares_differ_by_one_at_most() -> None:
    for size in (0, 1, 5, 32):
        sizes = [len(range(size)[part_of(size, rank, 3)]) for rank in range(3)]
        assert sum(sizes) == size and max(sizes) - min(sizes) <= 1


def test_dropout_of_the_parts_is_that_of_the_whole() -> None:
    x, layer, parts = torch.randn(7, 5), RowDropout(0.4), list[torch.Tensor]()
    torch.manual_seed(0)
    whole = nn.functional.dropout(x, 0.4)
    for part in (slice(0, 3), slice(3, 3), slice(3, 7)):
        torch.manual_seed(0)
        layer.part = part.start, 7
        parts.append(layer(x[part]))
    assert torch.equal(torch.cat(parts), whole) and (whole == 0).any()
    assert torch.equal(layer.eval()(x), x)
