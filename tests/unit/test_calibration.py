import json
import math

import pytest
import torch

from predictors.calibration import Temperature, cross_entropy, fit_temperature


def world(sharpness: float, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `sharpness` times those that generate the (soft) targets."""
    true = torch.randn(400, classes, generator=torch.Generator().manual_seed(0))
    return true * sharpness, torch.softmax(true, dim=-1)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("sharpness", [0.5, 1.0, 3.0])
def test_it_recovers_the_temperature(sharpness: float, classes: int) -> None:
    assert fit_temperature(*world(sharpness, classes)).temperature == pytest.approx(sharpness, rel=1e-2)


def test_it_never_makes_the_calibration_split_worse() -> None:
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        logits = 3 * torch.randn(30, 3, generator=generator)
        targets = torch.eye(3)[torch.randint(3, (30,), generator=generator)]
        found = fit_temperature(logits, targets)
        assert cross_entropy(logits / found.temperature, targets) <= cross_entropy(logits, targets) + 1e-12
        assert found.nll_after is not None and found.nll_before is not None and found.nll_after <= found.nll_before


def test_perfectly_separated_rows_stay_within_bounds() -> None:
    logits = torch.tensor([[5.0, -5.0], [-5.0, 5.0]])
    assert 0.04 < fit_temperature(logits, torch.eye(2)).temperature <= 1


def test_round_trip_and_apply() -> None:
    saved = Temperature(2.0, (0.0, 4.0), 7, 0.5, 0.4)
    assert Temperature.from_dict(json.loads(json.dumps(saved.to_dict()))) == saved
    assert torch.allclose(saved.apply(torch.tensor([[0.0, 2.0]])), torch.softmax(torch.tensor([[0.0, 3.0]]), -1))


def test_a_known_shift_is_undone_before_the_temperature() -> None:
    true, targets = world(1.0, 2)
    shift = torch.tensor([0.0, math.log(6)])
    found = fit_temperature(2 * true - shift, targets, offset=tuple(shift.tolist()))
    assert found.temperature == pytest.approx(2.0, rel=1e-2)
    assert torch.allclose(found.apply(2 * true - shift), targets, atol=1e-2)


def test_a_shift_that_makes_it_worse_is_left_out() -> None:
    logits, targets = world(1.0, 2)
    assert fit_temperature(logits, targets, offset=(0.0, 30.0)) == Temperature(
        1.0, (), 400, *[cross_entropy(logits, targets)] * 2
    )
