import math

import pytest
import torch

from predictors.calibration import fit_isotonic, fit_platt, fit_temperature
from predictors.confidences.maps import (
    accepted_length_loss,
    as_logged,
    conditional_temperatures,
    fit_maps,
    of_temperatures,
    reached,
)
from predictors.confidences.scores import errors, helps, scored
from predictors.confidences.sts import Sts, equal_width_ece
from predictors.confidences.table import Confidences, joined, table
from tests.helpers.training.confidences import TEMPERATURES, logged

STS = Sts(0.1, 10.0, 41, False, 15)


def test_temperatures_of_every_position() -> None:
    maps = fit_maps(logged(), fit_temperature, None, False)
    found = maps.temperatures()
    assert found is not None
    for one, true in zip(found, TEMPERATURES, strict=True):
        assert one == pytest.approx(true, rel=0.2)
    assert found == pytest.approx(conditional_temperatures(logged()), rel=0.1)
    z = torch.tensor([[1.0, -2.0, 0.5]]).double()
    assert torch.allclose(
        maps.surviving(z), torch.sigmoid(z / torch.tensor(found)).cumprod(1), atol=1e-9
    )


@pytest.mark.parametrize("fit", [fit_platt, fit_isotonic])
def test_freer_maps_have_no_temperatures(fit: object) -> None:
    rows = logged(8000)
    shifted = table("x", "toy", rows.logits + 2, rows.labels, rows.length, rows.group)
    maps = fit_maps(shifted, fit, None, False)  # type: ignore[arg-type]
    assert maps.temperatures() is None
    assert helps(shifted, maps.surviving(shifted.logits))
    bins = equal_width_ece(maps.surviving(shifted.logits)[:, 2], shifted.labels[:, 2], 15)
    assert bins < 0.02 < equal_width_ece(as_logged(shifted)[:, 2], shifted.labels[:, 2], 15)


def soft(rows: Confidences, times: int) -> Confidences:
    """The same proposals, each with the mean label of `times` in a row."""
    labels = rows.labels.view(-1, times, rows.gamma).mean(1)
    first = rows.rows(torch.arange(len(rows.logits)) % times == 0)
    return table("x", "toy", first.logits, labels, first.length, first.group)


@pytest.mark.parametrize("fit", [fit_temperature, fit_platt, fit_isotonic])
def test_expected_labels_fit_as_so_many_realised_ones(fit: object) -> None:
    base = logged(3000)
    coins = torch.rand(3000, 8, 3, generator=torch.Generator().manual_seed(3))
    true = base.logits / torch.tensor(TEMPERATURES)
    labels = (coins < torch.sigmoid(true)[:, None]).double().cumprod(2).view(-1, 3)
    many = table(
        "x", "toy", base.logits.repeat_interleave(8, 0), labels,
        base.length.repeat_interleave(8), base.group.repeat_interleave(8),
    )  # fmt: skip
    one, other = (
        fit_maps(rows, fit, None, False).surviving(base.logits)  # type: ignore[arg-type]
        for rows in (many, soft(many, 8))
    )
    assert torch.allclose(one, other, atol=5e-3)


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
        labels = (torch.arange(3) < accepted).double()[None]
        rows = table("x", "toy", z, labels, torch.tensor([3]), torch.tensor([0]))
        found = accepted_length_loss(rows, as_logged(rows))
        assert found.item() == pytest.approx(-math.log(p))


def test_scores_by_domain_and_position() -> None:
    rows = joined([logged(640, domain="a"), logged(640, 1, "b")], "x")
    held_out = of_temperatures(list(TEMPERATURES)).surviving(rows.logits)
    found = scored(rows, {"as logged": as_logged(rows), "true": held_out})
    assert list(found) == ["all", "a", "b"] and helps(rows, held_out)
    assert found["all"]["proposals"] == 1280 and found["a"]["groups"] == 10
    value, low, high = found["all"]["change"]["true"]
    assert low <= value <= high < 0
    first = found["all"]["positions"][0]
    assert first["position"] == 1
    ece = equal_width_ece(as_logged(rows)[:, 0], rows.labels[:, 0], 20)
    value, low, high = first["stages"]["as logged"]["deepspec"]
    assert value == pytest.approx(ece, abs=1e-6) and low <= value <= high
    assert first["stages"]["true"]["sglang"][0] < first["stages"]["as logged"]["sglang"][0]


def test_survival_is_fitted_where_it_helps() -> None:
    """One coin for the whole of a draft: the product of what is said of its tokens is too low."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(4000, 1, generator=generator).double()
    labels = (torch.rand(4000, 1, generator=generator) < torch.sigmoid(z)).double().repeat(1, 3)
    group = torch.arange(4000) // 64
    rows = table("x", "toy", z.repeat(1, 3), labels, torch.full((4000,), 3), group)
    assert not fit_maps(rows, None, None, True).survival.is_product
    assert fit_maps(rows, None, None, False).survival.is_product


def test_errors_of_perfect_predictions_are_small() -> None:
    p = torch.rand(20000, generator=torch.Generator().manual_seed(2)).double()
    coins = torch.rand(20000, generator=torch.Generator().manual_seed(1))
    found = errors(p, (coins < p).double(), torch.arange(20000) // 64)
    assert all(found[name][0] < 0.02 for name in ("deepspec", "sglang", "ours"))
    mean, low, high = found["perfect"]
    assert low < mean < high and low <= found["deepspec"][0] <= high
    few = errors(p[:500], (coins[:500] < p[:500]).double(), torch.arange(500) // 64)
    assert few["perfect"][0] > 3 * mean


def test_a_position_without_proposals_is_named() -> None:
    rows = logged(200)
    short = table("x", "toy", rows.logits, rows.labels, torch.full((200,), 2), rows.group)
    maps = fit_maps(short, fit_temperature, None, False)
    assert "no proposal came so far" in maps.positions[2].note
    assert scored(short, {"as logged": as_logged(short)})["toy"]["positions"][2]["rows"] == 0
    assert fit_maps(short, None, STS, False).temperatures()[2] == 1  # type: ignore[index]
