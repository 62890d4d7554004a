import pytest
import torch
import torch.nn.functional as F

from predictors.hrad import ClassMLP
from predictors.specdecpp import AcceptanceHead

H = 6


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_parameter_counts(depth: int, tied: bool) -> None:
    blocks = min(depth, 1) if tied else depth
    head = AcceptanceHead(H, depth, tied)
    assert sum(p.numel() for p in head.parameters()) == blocks * (H * H + H) + 2 * H + 2


@pytest.mark.parametrize(("depth", "tied"), [(0, False), (2, False), (2, True)])
def test_acceptance_head_by_hand(depth: int, tied: bool) -> None:
    """Tied blocks repeat one block; depth 0 is logistic regression."""
    head, x = AcceptanceHead(H, depth, tied), torch.randn(3, H)
    expected, blocks = x, list(head.blocks) * (2 if tied else 1)
    assert len(blocks) == depth
    for block in blocks:
        expected = expected + F.silu(expected @ block.weight.T + block.bias)
    assert torch.allclose(head(x), expected @ head.out.weight.T + head.out.bias, atol=1e-6)


def test_class_mlp_shape_and_dropout() -> None:
    layers = ClassMLP(H, dropout=0.4).layers
    shapes = [tuple(layer.weight.shape) for layer in layers if hasattr(layer, "weight")]
    assert shapes == [(256, H), (64, 256), (3, 64)]
    assert [layer.p for layer in layers if isinstance(layer, torch.nn.Dropout)] == [0.4, 0.4]
