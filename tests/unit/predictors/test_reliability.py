import math

import pytest
import torch
from torch import Tensor

from predictors.metrics import brier
from predictors.reliability import (
    BINS,
    change,
    mass_bins,
    mean_gap,
    reliability,
    stages,
    two_columns,
)


def drawn(
    prompts: int, rows: int, shift: float = 0.0, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Predictions [n, 2] off by `shift` in log-odds, outcomes, prompts; easy and hard prompts."""
    generator = torch.Generator().manual_seed(seed)
    odds = torch.randn(prompts, 1, generator=generator) + torch.randn(
        prompts, rows, generator=generator
    )
    outcome = (
        (torch.rand(prompts, rows, generator=generator) < torch.sigmoid(odds)).double().flatten()
    )
    group = torch.arange(prompts).repeat_interleave(rows)
    return two_columns(torch.sigmoid(odds + shift).double().flatten()), two_columns(outcome), group


def test_bins_hold_equal_mass_and_ties_stay_together() -> None:
    f = torch.rand(1000, generator=torch.Generator().manual_seed(0)).double()
    assert torch.bincount(mass_bins(f), minlength=BINS).tolist() == pytest.approx(
        [100] * BINS, abs=1
    )
    tied = torch.tensor([0.1] * 50 + [0.7] * 50).double()
    cells = mass_bins(tied)
    assert len(cells[:50].unique()) == len(cells[50:].unique()) == 1 and cells[0] < cells[50]
    assert mass_bins(torch.full((5,), 0.3).double()).unique().numel() == 1


def test_numbers_by_hand() -> None:
    probs = two_columns(torch.tensor([0.2, 0.2, 0.8, 0.8]).double())
    targets = two_columns(torch.tensor([0.0, 1.0, 1.0, 1.0]).double())
    found = reliability(probs, targets, torch.tensor([0, 1, 2, 3]))
    assert found["bins"] == [[0.5, pytest.approx(0.2), 0.5], [0.5, pytest.approx(0.8), 1.0]]
    assert found["ece"][0] == pytest.approx((0.3 + 0.2) / 2)
    assert found["brier"][0] == pytest.approx(brier(probs, targets))
    assert found["log_loss"][0] == pytest.approx(-(3 * math.log(0.8) + math.log(0.2)) / 4)
    assert (found["rows"], found["prompts"]) == (4, 4)


def test_three_classes_are_read_at_the_top_label() -> None:
    probs = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.2, 0.7]]).double()
    found = reliability(probs, torch.eye(3).double()[[0, 1]], torch.arange(2))
    assert found["ece"][0] == pytest.approx((0.4 + 0.7) / 2)


def test_miscalibration_is_found_and_the_calibrated_is_not_accused() -> None:
    wrong, right = (reliability(*drawn(200, 30, shift)) for shift in (1.0, 0.0))
    assert wrong["ece"][1] > 0.1 and right["ece"][1] < 0.005 < right["ece"][2] < 0.04


def test_resamples_draw_whole_prompts() -> None:
    """200 prompts of 30 equal rows carry no more than 200 rows do."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(200, 1, generator=generator).double()
    alone = mean_gap(value, torch.arange(200), 0, signed=True)
    repeated = mean_gap(
        value.repeat_interleave(30, 0), torch.arange(200).repeat_interleave(30), 0, signed=True
    )
    assert repeated == pytest.approx(alone)
    assert alone[2] - alone[1] == pytest.approx(4 * float(value.std()) / math.sqrt(200), rel=0.1)
    naive = mean_gap(value.repeat_interleave(30, 0), torch.arange(6000), 0, signed=True)
    assert naive[2] - naive[1] < (alone[2] - alone[1]) / 4


@pytest.mark.slow
def test_intervals_cover() -> None:
    """The mean squared error of a known predictor lies in most of 60 intervals."""
    truth = brier(*drawn(20000, 10, seed=99)[:2])
    found = [reliability(*drawn(40, 10, seed=seed))["brier"] for seed in range(60)]
    assert 51 <= sum(low <= truth <= high for _, low, high in found) <= 60


def test_same_seed_same_interval() -> None:
    rows = drawn(10, 10)
    assert reliability(*rows) == reliability(*rows) != reliability(*rows, seed=1)


def test_order_of_rows_and_names_of_prompts_do_not_matter() -> None:
    probs, targets, group = drawn(12, 9)
    order = torch.randperm(len(group), generator=torch.Generator().manual_seed(0))
    a, b = (
        reliability(probs, targets, group),
        reliability(probs[order], targets[order], 100 + 3 * group[order]),
    )
    assert a["ece"] == pytest.approx(b["ece"]) and a["log_loss"] == pytest.approx(b["log_loss"])


def test_one_prompt_has_no_interval() -> None:
    value, low, high = reliability(*drawn(1, 30))["ece"]
    assert value >= 0 and math.isnan(low) and math.isnan(high)


def test_changes_are_paired() -> None:
    """Two predictors on the same rows: their difference is far better known than either score."""
    good, targets, group = drawn(100, 20)
    bad = drawn(100, 20, shift=0.5)[0]
    found = change(bad, good, targets, group)
    assert found["log_loss"][2] < 0 and found["brier"][2] < 0
    score = reliability(good, targets, group)["log_loss"]
    assert found["log_loss"][2] - found["log_loss"][1] < (score[2] - score[1]) * 0.7
    assert change(good, good, targets, group)["log_loss"] == [0, 0, 0]


def test_each_stage_is_compared_with_the_one_before() -> None:
    good, targets, group = drawn(20, 20)
    found = stages({"first": drawn(20, 20, shift=1.0)[0], "second": good}, targets, group)
    assert list(found) == ["first", "second"] and "change" not in found["first"]
    assert found["second"]["change"]["log_loss"][0] == pytest.approx(
        found["second"]["log_loss"][0] - found["first"]["log_loss"][0]
    )
