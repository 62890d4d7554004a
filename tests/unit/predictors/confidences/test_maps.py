import math
from typing import Any

import pytest
import torch
from torch import Tensor

from predictors.calibration import fit_isotonic, fit_platt, fit_temperature
from predictors.confidences.maps import (
    accepted_length_loss,
    as_logged,
    conditional_temperatures,
    fit_maps,
    of_temperatures,
    reached,
)
from predictors.confidences.run import errors, helps, scored
from predictors.confidences.sts import Sts, equal_width_ece
from predictors.confidences.table import Confidences, joined, table
from tests.helpers.training.confidences import TEMPERATURES, logged

STS = Sts(0.1, 10.0, 41, False, 15)


def made(logits: Tensor, labels: Tensor, group: Tensor, length: int = 3) -> Confidences:
    return table("x", "toy", logits, labels, torch.full((len(logits),), length), group)


def coins(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def test_temperatures_of_every_position() -> None:
    maps = fit_maps(logged(), fit_temperature, None, False)
    temperatures = maps.temperatures() or []
    assert temperatures == pytest.approx(TEMPERATURES, rel=0.2)
    assert temperatures == pytest.approx(conditional_temperatures(logged()), rel=0.1)
    z = torch.tensor([[1.0, -2.0, 0.5]]).double()
    expected = torch.sigmoid(z / torch.tensor(temperatures)).cumprod(1)
    assert torch.allclose(maps.surviving(z), expected, atol=1e-9)


@pytest.mark.parametrize("fit", [fit_platt, fit_isotonic])
def test_freer_maps_have_no_temperatures(fit: Any) -> None:
    rows = logged(8000)
    shifted = made(rows.logits + 2, rows.labels, rows.group)
    maps = fit_maps(shifted, fit, None, False)
    survival, third = maps.surviving(shifted.logits), shifted.labels[:, 2]
    assert maps.temperatures() is None and helps(shifted, survival)
    after, before = (equal_width_ece(s[:, 2], third, 15) for s in (survival, as_logged(shifted)))
    assert after < 0.02 < before


@pytest.mark.parametrize("fit", [fit_temperature, fit_platt, fit_isotonic])
def test_expected_labels_fit_as_so_many_realised_ones(fit: Any) -> None:
    base, times = logged(3000), 8
    true = torch.sigmoid(base.logits / torch.tensor(TEMPERATURES))
    labels = (coins((3000, times, 3), 3) < true[:, None]).double().cumprod(2)
    many, group = base.logits.repeat_interleave(times, 0), base.group.repeat_interleave(times)
    realised = made(many, labels.view(-1, 3), group)
    expected = made(base.logits, labels.mean(1), base.group)
    ours, theirs = (
        fit_maps(rows, fit, None, False).surviving(base.logits) for rows in (realised, expected)
    )
    assert torch.allclose(ours, theirs, atol=5e-3)


def test_only_proposals_that_came_so_far_are_learned_from() -> None:
    rows = logged(500)
    logits, targets, group = reached(rows, 1)
    assert len(logits) == len(group) == int(rows.labels[:, 0].sum())
    assert torch.equal(targets.sum(1), torch.ones(len(targets)).double())


def test_the_loss_of_the_accepted_length() -> None:
    z = torch.tensor([[0.3, -0.2, 1.0]]).double()
    c = torch.sigmoid(z)[0].tolist()
    likely = [1 - c[0], c[0] * (1 - c[1]), c[0] * c[1] * (1 - c[2]), c[0] * c[1] * c[2]]
    for accepted, p in enumerate(likely):
        rows = made(z, (torch.arange(3) < accepted).double()[None], torch.tensor([0]))
        loss = accepted_length_loss(rows, as_logged(rows))
        assert loss.item() == pytest.approx(-math.log(p))


def test_scores_by_domain_and_position() -> None:
    rows = joined([logged(640, domain="a"), logged(640, 1, "b")], "x")
    held_out = of_temperatures(list(TEMPERATURES)).surviving(rows.logits)
    scores = scored(rows, {"as logged": as_logged(rows), "true": held_out})
    assert list(scores) == ["all", "a", "b"] and helps(rows, held_out)
    assert scores["all"]["proposals"] == 1280 and scores["a"]["groups"] == 10
    value, low, high = scores["all"]["change"]["true"]
    assert low <= value <= high < 0
    first = scores["all"]["positions"][0]
    assert first["position"] == 1
    ece = equal_width_ece(as_logged(rows)[:, 0], rows.labels[:, 0], 20)
    value, low, high = first["stages"]["as logged"]["deepspec"]
    assert value == pytest.approx(ece, abs=1e-6) and low <= value <= high
    assert first["stages"]["true"]["sglang"][0] < first["stages"]["as logged"]["sglang"][0]


def test_survival_is_fitted_where_it_helps() -> None:
    """One coin for the whole of a draft: the product of its tokens' probabilities is too low."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(4000, 1, generator=generator).double()
    labels = (torch.rand(4000, 1, generator=generator) < torch.sigmoid(z)).double()
    rows = made(z.repeat(1, 3), labels.repeat(1, 3), torch.arange(4000) // 64)
    assert not fit_maps(rows, None, None, True).survival.is_product
    assert fit_maps(rows, None, None, False).survival.is_product


def test_errors_of_perfect_predictions_are_small() -> None:
    p, group = coins((20000,), 2).double(), torch.arange(20000) // 64
    labels = (coins((20000,), 1) < p).double()
    result = errors(p, labels, group)
    assert all(result[name][0] < 0.02 for name in ("deepspec", "sglang", "ours"))
    mean, low, high = result["perfect"]
    assert low < mean < high and low <= result["deepspec"][0] <= high
    assert errors(p[:500], labels[:500], group[:500])["perfect"][0] > 3 * mean


def test_a_position_without_proposals_is_named() -> None:
    rows = logged(200)
    short = made(rows.logits, rows.labels, rows.group, length=2)
    maps = fit_maps(short, fit_temperature, None, False)
    assert "no proposal came so far" in maps.positions[2].note
    assert scored(short, {"as logged": as_logged(short)})["toy"]["positions"][2]["rows"] == 0
    assert fit_maps(short, None, STS, False).temperatures()[2] == 1  # type: ignore[index]
