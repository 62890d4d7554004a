import json
import math
from collections.abc import Callable

import pytest
import scipy.optimize
import torch
from pydantic import TypeAdapter
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
from predictors.survival import FOLDS, Survival
from runtime.errors import UserError

METHODS = {"temperature": fit_temperature, "platt": fit_platt, "isotonic": fit_isotonic}
each_method = pytest.mark.parametrize("method", METHODS)


def world(
    distortion: Callable[[Tensor], Tensor], classes: int, hard: bool = False, n: int = 4000
) -> tuple[Tensor, ...]:
    """Distorted logits, the targets (soft or drawn) that the true ones generate, prompts of 20
    rows, true logits."""
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(n, classes, generator=generator, dtype=torch.float64)
    targets = torch.softmax(true, dim=-1)
    if hard:
        targets = torch.eye(classes, dtype=torch.float64)[
            torch.multinomial(targets, 1, generator=generator)[:, 0]
        ]
    return distortion(true), targets, torch.arange(n) // 20, true


def error(found: Calibration, logits: Tensor, true: Tensor) -> float:
    """Mean absolute error of the calibrated probabilities."""
    return float((found.apply(logits) - torch.softmax(true, -1)).abs().mean())


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("sharpness", [0.5, 1.0, 3.0])
def test_temperature_is_recovered(sharpness: float, classes: int) -> None:
    found = fit_temperature(*world(lambda z: z * sharpness, classes)[:2])
    assert found.scale == pytest.approx([1 / sharpness] * classes, rel=1e-2)


@pytest.mark.parametrize("hard", [False, True])
def test_platt_recovers_scale_and_bias(hard: bool) -> None:
    logits, targets, group, true = world(lambda z: 2 * z + torch.tensor([0.0, -1.5]), 2, hard)
    found = calibrate(fit_platt, logits, targets, group)
    assert found.method == "platt" and not found.note
    assert found.scale == pytest.approx([0.5, 0.5], abs=0.05 if hard else 1e-3)
    assert found.bias == pytest.approx([0.0, 0.75], abs=0.15 if hard else 1e-3)
    assert error(found, logits, true) < (0.02 if hard else 1e-3)


@pytest.mark.parametrize("hard", [False, True])
def test_vector_scaling_recovers_a_scale_and_a_bias_per_class(hard: bool) -> None:
    bend = torch.tensor([0.5, 1.0, 3.0]), torch.tensor([1.0, 0.0, -2.0])
    logits, targets, group, true = world(lambda z: z * bend[0] + bend[1], 3, hard)
    found = calibrate(fit_platt, logits, targets, group)
    assert found.scale == pytest.approx((1 / bend[0]).tolist(), rel=0.2 if hard else 1e-2)
    assert error(found, logits, true) < (0.02 if hard else 1e-3)


def bent(true: Tensor) -> Tensor:
    """Logits whose first-to-second log-odds are a monotone, not linear, function of the true
    ones."""
    odds = true[:, 1] - true[:, 0]
    return torch.stack([0 * odds, odds.sign() * odds.abs() ** 3 + 0.2 * odds], 1)


@pytest.mark.parametrize("hard", [False, True])
def test_isotonic_recovers_what_is_not_linear(hard: bool) -> None:
    logits, targets, group, true = world(bent, 2, hard)
    found = calibrate(fit_isotonic, logits, targets, group)
    assert found.method == "isotonic" and not found.note
    assert error(found, logits, true) < (0.03 if hard else 0.002)
    assert (
        error(found, logits, true)
        < error(calibrate(fit_platt, logits, targets, group), logits, true) / 2
    )


@pytest.mark.parametrize("hard", [False, True])
def test_isotonic_of_three_classes_is_one_against_the_rest(hard: bool) -> None:
    logits, targets, group, true = world(lambda z: 3 * z, 3, hard)
    found = fit_isotonic(logits, targets)
    assert len(found.curves) == 3
    assert torch.allclose(found.apply(logits).sum(-1), torch.ones(len(logits), dtype=torch.float64))
    assert error(found, logits, true) < error(Calibration(), logits, true) / 3


def test_isotonic_never_decreases_and_keeps_ties_together() -> None:
    odds = torch.tensor([-2.0, -1.0, -1.0, -1.0, 0.0, 3.0], dtype=torch.float64)
    s = torch.tensor([0.2, 0.0, 1.0, 0.5, 0.4, 0.9], dtype=torch.float64)
    found = fit_isotonic(torch.stack([0 * odds, odds], 1), torch.stack([1 - s, s], 1))
    (x, y), *_ = found.curves
    assert sorted(x) == list(x) and sorted(y) == list(y)
    # the tied rows have mean .5 and pool with the .4 above them: (3 * .5 + .4) / 4
    grid = torch.linspace(-9, 9, 200, dtype=torch.float64)
    curve = found.apply(torch.stack([0 * grid, grid], 1))[:, 1]
    assert curve.diff().min() >= 0
    assert curve[0] == pytest.approx(0.2) and curve[-1] == pytest.approx(
        1 - 1 / 8
    )  # the end is no certainty
    assert found.apply(torch.tensor([[0.0, -1.0]]))[0, 1].item() == pytest.approx(0.475)


@each_method
@pytest.mark.parametrize("classes", [2, 3])
def test_no_method_makes_the_calibration_split_worse(method: str, classes: int) -> None:
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        logits = 3 * torch.randn(30, classes, generator=generator)
        targets = torch.eye(classes)[torch.randint(classes, (30,), generator=generator)]
        found = calibrate(METHODS[method], logits, targets, torch.arange(30) // 3)
        assert (
            cross_entropy(found.apply(logits).log(), targets)
            <= cross_entropy(logits, targets) + 1e-6
        )
        assert (
            found.nll_after is not None
            and found.nll_before is not None
            and found.nll_after <= found.nll_before
        )


@each_method
def test_what_is_calibrated_already_is_left_alone_or_hardly_changed(method: str) -> None:
    logits, targets, group, true = world(lambda z: z, 2, hard=True)
    assert error(calibrate(METHODS[method], logits, targets, group), logits, true) < 0.02


def test_a_fit_that_does_not_carry_over_to_other_prompts_is_left_out() -> None:
    """Each prompt's rows lie at a place of their own and have one outcome: isotonic fits them, and
    learns nothing."""
    generator = torch.Generator().manual_seed(1)
    place, outcome = torch.randn(12, generator=generator), torch.rand(12, generator=generator) < 0.5
    odds, s = place.repeat_interleave(20), outcome.double().repeat_interleave(20)
    logits, targets = torch.stack([0 * odds, odds], 1), torch.stack([1 - s, s], 1)
    found = calibrate(fit_isotonic, logits, targets, torch.arange(240) // 20)
    assert found.method == "none" and "isotonic left out" in found.note
    assert torch.equal(found.apply(logits), torch.softmax(logits, -1))


def test_a_temperature_that_is_asked_for_is_fitted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = []
    minimize = scipy.optimize.minimize_scalar
    monkeypatch.setattr(
        scipy.optimize, "minimize_scalar", lambda *a, **kw: fits.append(1) or minimize(*a, **kw)
    )
    calibrate(fit_temperature, *world(lambda z: 3 * z, 2, hard=True)[:3])
    assert len(fits) == 1 + FOLDS


@each_method
def test_where_a_temperature_is_all_it_takes_it_is_all_there_is(method: str) -> None:
    found = calibrate(METHODS[method], *world(lambda z: 3 * z, 2, hard=True)[:3])
    assert found.method == "temperature"
    assert (f"{method} left out" in found.note) == (method != "temperature")


@pytest.mark.parametrize(
    ("targets", "group", "note"),
    [
        (torch.tensor([[0.0, 1.0]] * 6), torch.arange(6), "a class does not occur"),
        (torch.tensor([[0.5, 0.5], [1.0, 0.0]] * 3), torch.zeros(6).long(), "two prompts"),
    ],
)
@each_method
def test_nothing_is_fitted_to_one_class_or_one_prompt(
    method: str, targets: Tensor, group: Tensor, note: str
) -> None:
    logits = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    found = calibrate(METHODS[method], logits, targets, group)
    assert found.method == "none" and note in found.note


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_head_that_returns_nan_is_an_error(bad: float) -> None:
    with pytest.raises(UserError, match="^calibration: .*trainer.lr") as refusal:
        calibrate(fit_platt, torch.tensor([[0.0, bad]]), torch.tensor([[0.0, 1.0]]), torch.zeros(1))
    assert "\n" not in str(refusal.value)


@each_method
def test_perfectly_separated_rows_stay_within_bounds(method: str) -> None:
    logits = torch.tensor([[5.0, -5.0], [-5.0, 5.0]]).repeat(10, 1)
    found = METHODS[method](logits, torch.eye(2).repeat(10, 1))
    assert all(0.04 < scale < 21 for scale in found.scale)
    if method == "isotonic":
        assert found.apply(torch.tensor([[90.0, -90.0]]))[0, 1].item() == pytest.approx(1 / 22)


@each_method
@pytest.mark.parametrize("classes", [2, 3])
def test_round_trip_is_exact(method: str, classes: int) -> None:
    logits, targets, _, _ = world(lambda z: 2 * z + 0.3, classes, hard=True, n=300)
    saved = calibrate(
        METHODS[method], logits, targets, torch.arange(300) // 10, offset=(0.0, 0.1, 0.2)[:classes]
    )
    saved = Calibration(**{**vars(saved), "survival": Survival(0.9, 0.1, -0.2, 3, 2, 0.5, 0.4)})
    loaded = TypeAdapter(Calibration).validate_json(json.dumps(saved.to_dict()))
    assert loaded == saved
    assert torch.equal(loaded.apply(logits.float()), saved.apply(logits.float()))
    assert saved.apply(logits.float()).dtype == torch.float32


def test_a_known_shift_is_undone_before_the_temperature() -> None:
    shift = torch.tensor([0.0, math.log(6)])
    logits, targets, group, true = world(lambda z: 2 * z - shift, 2)
    found = calibrate(fit_temperature, logits, targets, group, offset=tuple(shift.tolist()))
    assert found.scale == pytest.approx([0.5, 0.5], rel=1e-2)
    assert error(found, logits, true) < 1e-2


def test_a_shift_alone_is_kept_where_nothing_more_helps() -> None:
    shift = torch.tensor([0.0, 1.0])
    logits, targets, _, true = world(lambda z: z - shift, 2)
    found = calibrate(fit_temperature, logits, targets, torch.zeros(len(logits)), offset=(0.0, 1.0))
    assert (found.method, found.offset) == ("offset", (0.0, 1.0)) and found.note
    assert error(found, logits, true) < 1e-6


def test_a_shift_that_makes_it_worse_is_left_out() -> None:
    logits, targets, group, _ = world(lambda z: z, 2)
    found = calibrate(fit_temperature, logits, targets, group, offset=(0.0, 30.0))
    assert found.offset == () and found.nll_after == pytest.approx(found.nll_before)


def test_none_is_the_head_as_trained() -> None:
    logits, targets, group, _ = world(lambda z: 3 * z, 2)
    found = calibrate(None, logits, targets, group, offset=(0.0, 1.0))
    assert found.method == "none" and not found.note and found.nll_after == found.nll_before
    assert torch.equal(found.apply(logits), torch.softmax(logits, -1))


def test_priors_of_balanced_training_are_multiplied_in_and_divided_out() -> None:
    """A head for equal priors, classes 8 : 1 : 1 in fact: its posteriors come out right, the
    decisions stay its own."""
    prior = torch.tensor([0.8, 0.1, 0.1], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    evidence = 0.5 * torch.randn(6000, 3, generator=generator, dtype=torch.float64)
    posterior = torch.softmax(evidence + prior.log(), -1)
    targets = torch.eye(3, dtype=torch.float64)[
        torch.multinomial(posterior, 1, generator=generator)[:, 0]
    ]
    offset = tuple((prior * 3).log().tolist())
    found = calibrate(fit_temperature, evidence, targets, torch.arange(6000) // 10, offset)
    probs = found.apply(evidence)
    assert (probs - posterior).abs().mean() < 0.01
    assert (probs.argmax(-1) == 0).double().mean() > 0.98  # the most probable class collapses
    assert torch.equal(balanced(probs, found.log_prior).argmax(-1), evidence.argmax(-1))
    assert torch.equal(balanced(probs, found.log_prior, 0.0).argmax(-1), probs.argmax(-1))
    assert torch.equal(balanced(probs, ()), probs)


def test_log_odds_are_those_of_softmax() -> None:
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).double()
    assert torch.allclose(log_odds(logits), torch.logit(torch.softmax(logits, -1)))


def test_the_prior_is_what_the_offset_amounts_to() -> None:
    assert Calibration().log_prior == Calibration(scale=(2.0, 2.0, 2.0)).log_prior == ()
    assert Calibration(offset=(0.5, -1.0)).log_prior == (0.5, -1.0)
    assert Calibration(offset=(0.5, -1.0), scale=(2.0, 3.0)).log_prior == (1.0, -3.0)
