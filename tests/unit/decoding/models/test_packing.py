"""Packed linear layers compute what they replace, and nothing else about the model changes."""

import pytest
import torch
from torch import nn

from decoding.models.packing import (
    FEW_ROWS,
    FEWEST_ROWS,
    PackedLinear,
    _multiplies,
    fewest_rows,
    pack_linears,
)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, FEWEST_ROWS, 7, FEW_ROWS, FEW_ROWS + 1])
def test_same_product(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(24, 40, bias=bias)
    packed = PackedLinear(linear)
    for shape in ((rows, 24), (1, rows, 24)):
        x = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(packed(x), linear(x), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(
    not _multiplies(torch.bfloat16), reason="oneDNN has no bfloat16 on this processor"
)
@pytest.mark.parametrize("rows", [1, 2, 21, 256, 257])
def test_same_product_in_bfloat16(rows: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(24, 40).bfloat16()
    model = nn.Sequential(linear)
    pack_linears(model)
    assert isinstance(model[0], PackedLinear)
    x = torch.randn(rows, 24).bfloat16()
    with torch.no_grad():
        exact = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
        torch.testing.assert_close(model(x).double(), exact, atol=1e-3, rtol=2**-8)


def test_parameters_and_gradients_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 2)))
    model[2][0].weight = nn.Parameter(model[0].weight[:2].detach())
    before = dict(model.named_parameters())
    pack_linears(model)
    assert isinstance(model[0], PackedLinear) and isinstance(model[2][0], PackedLinear)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert model.state_dict().keys() == before.keys()
    model(torch.randn(3, 4)).sum().backward()
    assert model[0].weight.grad is not None


class Quantised(torch.Tensor):
    """A weight that looks like float32 and is something else."""


def test_other_models_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    double, large = nn.Sequential(nn.Linear(2, 2).double()), nn.Sequential(nn.Linear(2, 2))
    quantised = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    quantised[1].weight = nn.Parameter(torch.eye(2).as_subclass(Quantised))
    pack_linears(quantised)
    monkeypatch.setattr("decoding.models.packing.MOST_BYTES", 15)
    for model in (double, large, quantised):
        pack_linears(model)
        assert {type(layer) for layer in model} == {nn.Linear}


def test_layers_with_hooks_are_not_packed_and_packed_ones_can_be_compiled() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(3, 4)
    model[0].register_forward_hook(lambda _, __, out: out * 2)
    right = model(x)
    pack_linears(model)
    assert type(model[0]) is nn.Linear and isinstance(model[1], PackedLinear)
    torch.testing.assert_close(model(x), right)
    with torch.no_grad():
        compiled = torch.compile(model[1:], backend="eager", dynamic=True)
        torch.testing.assert_close(compiled(x), model[1](x))


def test_packed_weights_serve_from_as_many_rows_as_pay_there() -> None:
    assert fewest_rows("AVX512", "vendor_id : GenuineIntel") == 4
    assert fewest_rows("AVX2", "vendor_id : GenuineIntel") == fewest_rows("AVX2", "") == 2
    assert fewest_rows("AVX512", "vendor_id : AuthenticAMD") == 1
