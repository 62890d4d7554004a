import math

import pytest
import torch
from torch import Tensor

from predictors.metrics import brier
from predictors.reliability import BINS, change, mass_bins, mean, reliability, stages, two_columns


def drawn(prompts: int, rows: int, shift: float = 0.0, seed: int = 0) -> tuple[Tensor, ...]:
    """Predictions [n, 2] off by `shift` in log-odds, outcomes, prompts; easy and hard prompts."""
    generator, shape = torch.Generator().manual_seed(seed), (prompts, rows)
    odds = torch.randn(prompts, 1, generator=generator) + torch.randn(shape, generator=generator)
    outcome = (torch.rand(shape, generator=generator) < torch.sigmoid(odds)).double().flatten()
    predicted = torch.sigmoid(odds + shift).double().flatten()
    group = torch.arange(prompts).repeat_interleave(rows)
    return two_columns(predicted), two_columns(outcome), group


def test_bins_hold_equal_mass_and_miscalibration_is_found():
    f = torch.rand(1000, generator=torch.Generator().manual_seed(0)).double()
    counts = torch.bincount(mass_bins(f), minlength=BINS).tolist()
    assert counts == pytest.approx([100] * BINS, abs=1)
    cells = mass_bins(torch.tensor([0.1] * 50 + [0.7] * 50).double())
    assert len(cells[:50].unique()) == len(cells[50:].unique()) == 1 and cells[0] < cells[50]
    assert mass_bins(torch.full((5,), 0.3).double()).unique().numel() == 1
    wrong, right = (reliability(*drawn(200, 30, shift)) for shift in (1.0, 0.0))
    assert wrong["ece"][1] > 0.1 and right["ece"][1] < 0.005 < right["ece"][2] < 0.04


def test_numbers_by_hand():
    probs = two_columns(torch.tensor([0.2, 0.2, 0.8, 0.8]).double())
    targets = two_columns(torch.tensor([0.0, 1.0, 1.0, 1.0]).double())
    result = reliability(probs, targets, torch.tensor([0, 1, 2, 3]))
    assert result["bins"] == [[0.5, pytest.approx(0.2), 0.5], [0.5, pytest.approx(0.8), 1.0]]
    assert result["ece"][0] == pytest.approx((0.3 + 0.2) / 2)
    assert result["brier"][0] == pytest.approx(brier(probs, targets))
    assert result["log_loss"][0] == pytest.approx(-(3 * math.log(0.8) + math.log(0.2)) / 4)
    assert (result["rows"], result["prompts"]) == (4, 4)
    probs = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.2, 0.7]]).double()
    result = reliability(probs, torch.eye(3).double()[[0, 1]], torch.arange(2))
    assert result["ece"][0] == pytest.approx((0.4 + 0.7) / 2)


def test_resamples_draw_whole_prompts():
    """200 prompts of 30 equal rows carry no more than 200 rows do."""
    value = torch.randn(200, generator=torch.Generator().manual_seed(0)).double()
    alone, group = mean(value, torch.arange(200)), torch.arange(200).repeat_interleave(30)
    repeated = value.repeat_interleave(30)
    assert mean(repeated, group) == pytest.approx(alone)
    assert alone[2] - alone[1] == pytest.approx(4 * float(value.std()) / math.sqrt(200), rel=0.1)
    naive = mean(repeated, torch.arange(6000))
    assert naive[2] - naive[1] < (alone[2] - alone[1]) / 4


@pytest.mark.slow
def test_intervals_cover():
    truth = reliability(*drawn(20000, 10, seed=99))["brier"][0]
    estimates = [reliability(*drawn(40, 10, seed=seed))["brier"] for seed in range(60)]
    assert 51 <= sum(low <= truth <= high for _, low, high in estimates) <= 60


def test_seed_order_of_rows_and_names_of_prompts():
    probs, targets, group = drawn(12, 9)
    result = reliability(probs, targets, group)
    assert result == reliability(probs, targets, group) != reliability(probs, targets, group, 1)
    order = torch.randperm(len(group), generator=torch.Generator().manual_seed(0))
    other = reliability(probs[order], targets[order], 100 + 3 * group[order])
    for name in ("ece", "log_loss"):
        assert result[name] == pytest.approx(other[name])
    value, low, high = reliability(*drawn(1, 30))["ece"]
    assert value >= 0 and math.isnan(low) and math.isnan(high), "one prompt has no interval"


def test_changes_are_paired():
    good, targets, group = drawn(100, 20)
    bad = drawn(100, 20, shift=0.5)[0]
    difference = change(bad, good, targets, group)
    assert difference["log_loss"][2] < 0 and difference["brier"][2] < 0
    score, (_, low, high) = reliability(good, targets, group)["log_loss"], difference["log_loss"]
    assert high - low < (score[2] - score[1]) * 0.7
    assert change(good, good, targets, group)["log_loss"] == [0, 0, 0]
    result = stages({"first": bad, "second": good}, targets, group)
    assert list(result) == ["first", "second"] and "change" not in result["first"]
    gain = result["second"]["log_loss"][0] - result["first"]["log_loss"][0]
    assert result["second"]["change"]["log_loss"][0] == pytest.approx(gain)
