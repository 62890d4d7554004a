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


def test_tied_blocks_repeat_one_block() -> None:
    head, x = AcceptanceHead(H, 2, tie_blocks=True), torch.randn(3, H)
    (block,) = head.blocks
    once = x + F.silu(block(x))
    assert torch.allclose(head(x), head.out(once + F.silu(block(once))))


def test_untied_head_by_hand() -> None:
    head, x = AcceptanceHead(H, 2, tie_blocks=False), torch.randn(3, H)
    expected = x
    for block in head.blocks:
        expected = expected + F.silu(expected @ block.weight.T + block.bias)
    assert torch.allclose(head(x), expected @ head.out.weight.T + head.out.bias, atol=1e-6)


def test_depth_zero_is_logistic_regression() -> None:
    head, x = AcceptanceHead(H, 0, tie_blocks=False), torch.randn(3, H)
    assert torch.equal(head(x), head.out(x))


def test_class_mlp_shape_and_dropout() -> None:
    layers = ClassMLP(H, dropout=0.4).layers
    assert [tuple(layer.weight.shape) for layer in layers if hasattr(layer, "weight")] == [
        (256, H),
        (64, 256),
        (3, 64),
    ]
    assert [layer.p for layer in layers if isinstance(layer, torch.nn.Dropout)] == [0.4, 0.4]
