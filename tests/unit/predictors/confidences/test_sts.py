import math
from dataclasses import replace

import pytest
import torch

from predictors.confidences.sts import Sts, equal_width_ece
from predictors.confidences.table import blocks, table
from tests.helpers.training.confidences import TEMPERATURES, logged

DEEPSPEC = Sts(0.05, 20.0, 256, True, 20)
SGLANG = Sts(0.1, 10.0, 41, False, 15)


def plain_ece(predicted: list[float], labels: list[float], bins: int) -> float:
    """As the engines' notes have it, a proposal at a time."""
    cells: dict[int, list[tuple[float, float]]] = {}
    for p, label in zip(predicted, labels, strict=True):
        p = min(max(p, 1e-8), 1 - 1e-8)
        cells.setdefault(min(int(p * bins), bins - 1), []).append((p, label))
    gaps = [
        len(rows) * abs(sum(p for p, _ in rows) / len(rows) - sum(s for _, s in rows) / len(rows))
        for rows in cells.values()
    ]
    return sum(gaps) / len(predicted)


def test_the_error_is_that_of_the_engines() -> None:
    predicted = torch.rand(500, generator=torch.Generator().manual_seed(1)).double()
    predicted[:2] = torch.tensor([0.0, 1.0])
    labels = (predicted > 0.4).double()
    for bins in (15, 20):
        expected = plain_ece(predicted.tolist(), labels.tolist(), bins)
        assert equal_width_ece(predicted, labels, bins) == pytest.approx(expected, abs=1e-12)
    assert math.isnan(equal_width_ece(predicted[:0], labels[:0], 20))


@pytest.mark.parametrize("sts", [DEEPSPEC, SGLANG], ids=["deepspec", "sglang"])
def test_known_temperatures_are_found(sts: Sts) -> None:
    for found, true in zip(sts(logged(20000)), TEMPERATURES, strict=True):
        assert found == pytest.approx(true, rel=0.25)


def test_each_temperature_is_the_first_of_lowest_error_given_those_before() -> None:
    rows = logged(300)
    survival = torch.ones(300).double()
    for position, found in enumerate(SGLANG(rows)):
        z, labels = rows.logits[:, position], rows.labels[:, position].tolist()
        errors = {
            t: plain_ece((survival * torch.sigmoid(z / t)).tolist(), labels, 15)
            for t in torch.logspace(-1, 1, 41).double().tolist()
        }
        least = min(errors.values())
        assert found == next(t for t, error in errors.items() if error <= least + 1e-12)
        survival = survival * torch.sigmoid(rows.logits[:, position] / found)


def test_grids() -> None:
    assert len(DEEPSPEC.grid()) == 257 and 1.0 in DEEPSPEC.grid()
    assert torch.equal(SGLANG.grid(), torch.logspace(-1, 1, steps=41).double())


def test_only_what_counts_is_fitted_on() -> None:
    whole = logged(400)
    noise = torch.where(torch.arange(400)[:, None] % 2 == 0, whole.logits, -whole.logits * 9)
    half = torch.where(torch.arange(400) % 2 == 0, 3, 1)
    noise[:, 0] = whole.logits[:, 0]
    rows = table("toy", "toy", noise, whole.labels, half, blocks(400))
    found, clean = SGLANG(rows), SGLANG(whole)
    assert found[0] == clean[0]
    kept = whole.rows(half == 3)
    first = torch.sigmoid(kept.logits[:, 0] / found[0])
    errors = [
        equal_width_ece(first * torch.sigmoid(kept.logits[:, 1] / t), kept.labels[:, 1], 15)
        for t in SGLANG.grid().tolist()
    ]
    assert found[1] == SGLANG.grid()[errors.index(min(errors))]


def test_a_position_that_nothing_came_to_stays_as_it_is() -> None:
    assert SGLANG(replace(logged(100), length=torch.full((100,), 2)))[2] == 1.0
