import torch

from pairs.rounded import rounded


def test_groups_of_a_row_have_so_many_values_between_lowest_and_highest() -> None:
    torch.manual_seed(0)
    weights = torch.randn(3, 70)
    found = rounded(weights, bits=3, group=32)
    for ours, theirs in zip(found.split(32, 1), weights.split(32, 1), strict=True):
        for row, before in zip(ours, theirs, strict=True):
            assert len(row.unique()) <= 8
            assert torch.allclose(row.aminmax()[0], before.min())
            assert torch.allclose(row.aminmax()[1], before.max())
            assert (row - before).abs().max() <= (before.max() - before.min()) / 14 + 1e-6


def test_what_is_rounded_already_stays() -> None:
    """As of a target that was stored at 4 bits in groups of 32."""
    levels = torch.arange(16.0).repeat(2, 4)[:, torch.randperm(64)]
    stored = (0.25 * levels - 1).bfloat16()
    assert torch.equal(rounded(stored, bits=4, group=64), stored)
    assert torch.equal(rounded(torch.full((2, 5), 0.3), 2, 4), torch.full((2, 5), 0.3))
