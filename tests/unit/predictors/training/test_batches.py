import pytest
import torch
from torch import nn

from predictors.training.batches import Items, Part, RowDropout, part_of


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
def test_parts_of_a_micro_batch_are_the_micro_batch_in_order(processes: int) -> None:
    items = Items(
        torch.arange(20.0)[:, None],
        torch.arange(20),
        torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3] * 2),
    )
    for batch in ([4, 0, 2, 1, 3], [6, 0], []):
        parts = [Part(items, rank, processes).__getitems__(batch) for rank in range(processes)]
        assert (
            torch.cat([y for _, y, _, _ in parts]).tolist() == items.__getitems__(batch)[1].tolist()
        )
        assert (
            torch.cat([x for x, _, _, _ in parts]).flatten().tolist()
            == items.__getitems__(batch)[1].tolist()
        )
        before = 0
        for x, _, rows_before, rows in parts:
            assert rows == items.count(batch) and rows_before == before
            before += len(x)


def test_shares_differ_by_one_at_most() -> None:
    for size in (0, 1, 5, 32):
        sizes = [len(range(size)[part_of(size, rank, 3)]) for rank in range(3)]
        assert sum(sizes) == size and max(sizes) - min(sizes) <= 1


def test_dropout_of_the_parts_is_that_of_the_whole() -> None:
    x, layer = torch.randn(7, 5), RowDropout(0.4)
    parts = []
    torch.manual_seed(0)
    whole = nn.functional.dropout(x, 0.4)
    for part in (slice(0, 3), slice(3, 3), slice(3, 7)):
        torch.manual_seed(0)
        layer.part = part.start, 7
        parts.append(layer(x[part]))
    assert torch.equal(torch.cat(parts), whole) and (whole == 0).any()
    assert torch.equal(layer.eval()(x), x)
