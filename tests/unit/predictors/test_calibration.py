import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from predictors.calibration import (
    Calibration,
    balanced,
    calibrate,
    cross_entropy,
    fit_isotonic,
    fit_platt,
    fit_temperature,
    log_odds,
)
from runtime.errors import UserError

METHODS = {"temperature": fit_temperature, "platt": fit_platt, "isotonic": fit_isotonic}
each_method = pytest.mark.parametrize("method", METHODS)
hard_or_soft = pytest.mark.parametrize("hard", [False, True])


def drawn(probs: Tensor, generator: torch.Generator) -> Tensor:
    """One-hot rows of classes drawn from probs."""
    label = torch.multinomial(probs, 1, generator=generator)[:, 0]
    return torch.eye(probs.shape[1], dtype=torch.float64)[label]


def world(
    distortion: Callable[[Tensor], Tensor], classes: int, hard: bool = False
) -> tuple[Tensor, ...]:
    """Distorted logits, the targets (soft or drawn) that the true ones generate, prompts of 20
    rows, true logits."""
    generator, n = torch.Generator().manual_seed(0), 4000
    true = torch.randn(n, classes, generator=generator, dtype=torch.float64)
    targets = torch.softmax(true, dim=-1)
    if hard:
        targets = drawn(targets, generator)
    return distortion(true), targets, torch.arange(n) // 20, true


def two(odds: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and targets of two classes."""
    return torch.stack([0 * odds, odds], 1), torch.stack([1 - s, s], 1)


def error(calibration: Calibration, logits: Tensor, true: Tensor) -> float:
    """Mean absolute error of the calibrated probabilities."""
    assert calibration.apply(logits.float()).dtype == torch.float32
    return float((calibration.apply(logits) - torch.softmax(true, -1)).abs().mean())


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("sharpness", [0.5, 1.0, 3.0])
def test_temperature_is_recovered(sharpness, classes):
    fitted = fit_temperature(*world(lambda z: z * sharpness, classes)[:2])
    assert fitted.scale == pytest.approx([1 / sharpness] * classes, rel=1e-2)


@hard_or_soft
def test_platt_recovers_scale_and_bias(hard):
    logits, targets, group, true = world(lambda z: 2 * z + torch.tensor([0.0, -1.5]), 2, hard)
    fitted = calibrate(fit_platt, logits, targets, group)
    assert fitted.method == "platt" and not fitted.note
    assert fitted.scale == pytest.approx([0.5, 0.5], abs=0.05 if hard else 1e-3)
    assert fitted.bias == pytest.approx([0.0, 0.75], abs=0.15 if hard else 1e-3)
    assert error(fitted, logits, true) < (0.02 if hard else 1e-3)


@hard_or_soft
def test_vector_scaling_recovers_a_scale_and_a_bias_per_class(hard):
    bend = torch.tensor([0.5, 1.0, 3.0]), torch.tensor([1.0, 0.0, -2.0])
    logits, targets, group, true = world(lambda z: z * bend[0] + bend[1], 3, hard)
    fitted = calibrate(fit_platt, logits, targets, group)
    assert fitted.scale == pytest.approx((1 / bend[0]).tolist(), rel=0.2 if hard else 1e-2)
    assert error(fitted, logits, true) < (0.02 if hard else 1e-3)


def bent(true: Tensor) -> Tensor:
    """Logits whose log-odds are a monotone, not linear, function of the true ones."""
    odds = true[:, 1] - true[:, 0]
    return torch.stack([0 * odds, odds.sign() * odds.abs() ** 3 + 0.2 * odds], 1)


@hard_or_soft
def test_isotonic_recovers_what_is_not_linear(hard):
    logits, targets, group, true = world(bent, 2, hard)
    fitted, platt = (calibrate(fit, logits, targets, group) for fit in (fit_isotonic, fit_platt))
    assert fitted.method == "isotonic" and not fitted.note
    assert error(fitted, logits, true) < (0.03 if hard else 0.002)
    assert error(fitted, logits, true) < error(platt, logits, true) / 2


@hard_or_soft
def test_isotonic_of_three_classes_is_one_against_the_rest(hard):
    logits, targets, _, true = world(lambda z: 3 * z, 3, hard)
    fitted = fit_isotonic(logits, targets)
    assert len(fitted.curves) == 3
    assert torch.allclose(fitted.apply(logits).sum(-1), torch.ones(len(logits)).double())
    assert error(fitted, logits, true) < error(Calibration(), logits, true) / 3


def test_isotonic_never_decreases_and_keeps_ties_together():
    odds = torch.tensor([-2.0, -1.0, -1.0, -1.0, 0.0, 3.0], dtype=torch.float64)
    s = torch.tensor([0.2, 0.0, 1.0, 0.5, 0.4, 0.9], dtype=torch.float64)
    fitted = fit_isotonic(*two(odds, s))
    (x, y), *_ = fitted.curves
    assert sorted(x) == list(x) and sorted(y) == list(y)
    grid = torch.linspace(-9, 9, 200, dtype=torch.float64)
    curve = fitted.apply(two(grid, grid)[0])[:, 1]
    assert curve.diff().min() >= 0 and curve[0] == pytest.approx(0.2)
    assert curve[-1] == pytest.approx(1 - 1 / 8), "the end is no certainty"
    # the tied rows have mean .5 and pool with the .4 above them: (3 * .5 + .4) / 4
    assert fitted.apply(torch.tensor([[0.0, -1.0]]))[0, 1].item() == pytest.approx(0.475)


@each_method
@pytest.mark.parametrize("classes", [2, 3])
def test_no_method_makes_the_calibration_split_worse(method, classes):
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        logits = 3 * torch.randn(30, classes, generator=generator)
        targets = torch.eye(classes)[torch.randint(classes, (30,), generator=generator)]
        fitted = calibrate(METHODS[method], logits, targets, torch.arange(30) // 3)
        after = cross_entropy(fitted.apply(logits).log(), targets)
        assert after <= cross_entropy(logits, targets) + 1e-6
        assert fitted.nll_after <= fitted.nll_before  # type: ignore[operator]


@each_method
def test_no_more_is_fitted_than_it_takes(method):
    """What is calibrated already hardly changes; where a temperature is enough, it is the whole."""
    logits, targets, group, true = world(lambda z: z, 2, hard=True)
    assert error(calibrate(METHODS[method], logits, targets, group), logits, true) < 0.02
    fitted = calibrate(METHODS[method], *world(lambda z: 3 * z, 2, hard=True)[:3])
    assert fitted.method == "temperature"
    assert (f"{method} left out" in fitted.note) == (method != "temperature")


def test_a_fit_that_does_not_carry_over_to_other_prompts_is_left_out():
    """Each prompt's rows have log-odds and an outcome of their own: isotonic fits them, and learns
    nothing."""
    generator = torch.Generator().manual_seed(1)
    odds, outcome = torch.randn(12, generator=generator), torch.rand(12, generator=generator) < 0.5
    logits, targets = two(odds.repeat_interleave(20), outcome.double().repeat_interleave(20))
    fitted = calibrate(fit_isotonic, logits, targets, torch.arange(240) // 20)
    assert fitted.method == "none" and "isotonic left out" in fitted.note
    assert torch.equal(fitted.apply(logits), torch.softmax(logits, -1))


@each_method
def test_nothing_is_fitted_to_one_class_or_one_prompt(method):
    logits = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    one_class = torch.tensor([[0.0, 1.0]] * 6), torch.arange(6)
    one_prompt = torch.tensor([[0.5, 0.5], [1.0, 0.0]] * 3), torch.zeros(6).long()
    cases = ((one_class, "a class does not occur"), (one_prompt, "two prompts"))
    for (targets, group), note in cases:
        fitted = calibrate(METHODS[method], logits, targets, group)
        assert fitted.method == "none" and note in fitted.note


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_head_that_returns_nan_is_an_error(bad):
    with pytest.raises(UserError, match="^calibration: .*trainer.lr") as refusal:
        calibrate(fit_platt, torch.tensor([[0.0, bad]]), torch.tensor([[0.0, 1.0]]), torch.zeros(1))
    assert "\n" not in str(refusal.value)


@each_method
def test_perfectly_separated_rows_stay_within_bounds(method):
    logits = torch.tensor([[5.0, -5.0], [-5.0, 5.0]]).repeat(10, 1)
    fitted = METHODS[method](logits, torch.eye(2).repeat(10, 1))
    assert all(0.04 < scale < 21 for scale in fitted.scale)
    if method == "isotonic":
        assert fitted.apply(torch.tensor([[90.0, -90.0]]))[0, 1].item() == pytest.approx(1 / 22)


def test_a_known_shift_is_undone_before_the_temperature():
    shift = torch.tensor([0.0, math.log(6)])
    logits, targets, group, true = world(lambda z: 2 * z - shift, 2)
    fitted = calibrate(fit_temperature, logits, targets, group, offset=tuple(shift.tolist()))
    assert fitted.scale == pytest.approx([0.5, 0.5], rel=1e-2)
    assert error(fitted, logits, true) < 1e-2


def test_a_shift_is_kept_where_it_helps_alone_and_none_is_the_head_as_trained():
    logits, targets, group, true = world(lambda z: z - torch.tensor([0.0, 1.0]), 2)
    fitted = calibrate(fit_temperature, logits, targets, 0 * group, offset=(0.0, 1.0))
    assert (fitted.method, fitted.offset) == ("offset", (0.0, 1.0)) and fitted.note
    assert error(fitted, logits, true) < 1e-6
    fitted = calibrate(fit_temperature, true, targets, group, offset=(0.0, 30.0))
    assert fitted.offset == () and fitted.nll_after == pytest.approx(fitted.nll_before)
    logits, targets, group, _ = world(lambda z: 3 * z, 2)
    kept = calibrate(None, logits, targets, group, offset=(0.0, 1.0))
    assert kept.method == "none" and not kept.note and kept.nll_after == kept.nll_before
    assert torch.equal(kept.apply(logits), torch.softmax(logits, -1))


def test_priors_of_balanced_training_are_multiplied_in_and_divided_out():
    """A head for equal priors, classes 8 : 1 : 1 in fact: its posteriors come out right, the
    decisions stay its own."""
    prior = torch.tensor([0.8, 0.1, 0.1], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    evidence = 0.5 * torch.randn(6000, 3, generator=generator, dtype=torch.float64)
    posterior = torch.softmax(evidence + prior.log(), -1)
    targets, offset = drawn(posterior, generator), tuple((prior * 3).log().tolist())
    fitted = calibrate(fit_temperature, evidence, targets, torch.arange(6000) // 10, offset)
    probs = fitted.apply(evidence)
    assert (probs - posterior).abs().mean() < 0.01
    assert (probs.argmax(-1) == 0).double().mean() > 0.98  # the most probable class collapses
    assert torch.equal(balanced(probs, fitted.log_prior).argmax(-1), evidence.argmax(-1))
    assert torch.equal(balanced(probs, fitted.log_prior, 0.0).argmax(-1), probs.argmax(-1))
    assert torch.equal(balanced(probs, ()), probs)


def test_log_odds_are_those_of_softmax_and_the_prior_is_what_the_offset_amounts_to():
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).double()
    assert torch.allclose(log_odds(logits), torch.logit(torch.softmax(logits, -1)))
    assert Calibration().log_prior == Calibration(scale=(2.0, 2.0, 2.0)).log_prior == ()
    assert Calibration(offset=(0.5, -1.0)).log_prior == (0.5, -1.0)
    assert Calibration(offset=(0.5, -1.0), scale=(2.0, 3.0)).log_prior == (1.0, -3.0)
