"""Calibration on held-out prompts: maps from a head's logits to calibrated probabilities."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from pydantic import with_config
from torch import Tensor

from predictors.survival import Survival, better, cross_fitted
from runtime.errors import UserError
from runtime.json_files import STRICT

BOUNDS = (0.05, 20.0)  # of the scale
LARGEST_BIAS = 20.0
FITTED = ("method", "scale", "bias", "curves")
Curve = tuple[tuple[float, ...], tuple[float, ...]]
"""Knots (x, y) of a non-decreasing map: x log-odds of a class against the rest, y its
probability."""


@with_config(STRICT)
@dataclass(frozen=True)
class Calibration:
    """A map from logits to probabilities: softmax(scale * (logits + offset) + bias), or `curves` of
    its log-odds.

    offset: [C] constants that undo the known effect of training on the class odds; () for none.
    scale, bias: [C], () for 1 and for 0. curves: for two classes one, of the second class; else one
    per class, whose values are then normalised. rows, prompts: numbers it was fitted on.
    nll_before, nll_after: mean cross-entropy there of softmax(logits) and of the calibrated
    probabilities. note: why it differs from what was asked for; "" if it does not.
    survival: map from the acceptance probabilities of single draft tokens to that of prefixes.
    """

    method: str = "none"
    offset: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()
    bias: tuple[float, ...] = ()
    curves: tuple[Curve, ...] = ()
    rows: int = 0
    prompts: int = 0
    nll_before: float | None = None
    nll_after: float | None = None
    note: str = ""
    survival: Survival = field(default=Survival())

    def apply(self, logits: Tensor) -> Tensor:
        """Return probabilities of logits, both [n, C], on the host, wherever the head is."""
        logits = logits.cpu()
        if self.offset:
            logits = logits + logits.new_tensor(self.offset)
        if self.scale:
            logits = logits * logits.new_tensor(self.scale)
        if self.bias:
            logits = logits + logits.new_tensor(self.bias)
        if not self.curves:
            return torch.softmax(logits, dim=-1)
        odds = log_odds(logits.double()).numpy()
        if len(self.curves) == 1:
            second = np.interp(odds[:, 1], *self.curves[0])
            values = np.stack([1 - second, second], axis=-1)
        else:
            columns = [np.interp(odds[:, c], *curve) for c, curve in enumerate(self.curves)]
            values = np.stack(columns, axis=-1)
            values = values / values.sum(-1, keepdims=True)
        return torch.from_numpy(values).to(logits)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def log_prior(self) -> tuple[float, ...]:
        """Return the offset's effect on the log-probabilities, [C]; () for none."""
        if not (self.offset and self.scale):
            return self.offset
        return tuple(o * s for o, s in zip(self.offset, self.scale, strict=True))


def balanced(probs: Tensor, log_prior: tuple[float, ...], balance: float = 1.0) -> Tensor:
    """Return posteriors [n, C] with the class priors divided out again: probs / exp(log_prior) **
    balance, normalised.

    Their arg max at balance 1 is the decision when every class counts the same, however rare it is;
    at 0 it is the most probable class. log_prior: as in `Calibration`; () leaves probs alone."""
    if not log_prior:
        return probs
    return torch.softmax(probs.log() - balance * probs.new_tensor(log_prior), dim=-1)


# Fitting: (logits with the offset added [n, C], targets [n, C]) -> Calibration without offset -----

Fit = Callable[[Tensor, Tensor], Calibration]


def fit_temperature(logits: Tensor, targets: Tensor) -> Calibration:
    """Fit one scale 1 / T for all classes by cross-entropy (Guo et al. 2017), convex in it."""
    from scipy.optimize import minimize_scalar

    best = minimize_scalar(
        lambda log_scale: cross_entropy(logits * math.exp(log_scale), targets),
        bounds=[math.log(bound) for bound in BOUNDS],
        method="bounded",
    )
    return Calibration("temperature", scale=(math.exp(best.x),) * logits.shape[1])


def fit_platt(logits: Tensor, targets: Tensor) -> Calibration:
    """Fit scale and bias of the log-odds of two classes (Platt 1999); of more by vector scaling, a
    scale and a bias each (Guo et al. 2017). By cross-entropy, convex in both; scales stay positive,
    so rankings by log-odds stay."""
    from scipy.optimize import minimize

    z, s, classes = logits.double(), targets.double(), logits.shape[1]
    scales = 1 if classes == 2 else classes

    def loss(values: np.ndarray) -> tuple[float, np.ndarray]:
        v = torch.from_numpy(values).requires_grad_()
        scaled = z * v[:scales] + torch.cat([v.new_zeros(1), v[scales:]])
        value = -(s * torch.log_softmax(scaled, -1)).sum(-1).mean()
        (gradient,) = torch.autograd.grad(value, v)
        return value.item(), gradient.numpy()

    bounds = [BOUNDS] * scales + [(-LARGEST_BIAS, LARGEST_BIAS)] * (classes - 1)
    start = np.array([1.0] * scales + [0.0] * (classes - 1))
    best = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds).x.tolist()
    scale, bias = tuple(best[:scales] * (classes // scales)), (0.0, *best[scales:])
    return Calibration("platt", scale=scale, bias=bias)


def fit_isotonic(logits: Tensor, targets: Tensor) -> Calibration:
    """Fit non-decreasing maps of the log-odds, one class against the rest (Zadrozny & Elkan 2002),
    linear between knots.

    A soft label s is a row of weight s and one of weight 1 - s, which regression on s itself
    amounts to; a row counts as much as its targets sum to. Rows with equal log-odds become one
    knot. Ends keep 1 / (rows + 2) away from 0 and 1: no finite split shows certainty."""
    from sklearn.isotonic import IsotonicRegression

    odds, s = log_odds(logits.double()).numpy(), targets.double().numpy()
    weight, least = s.sum(1), 1 / (len(logits) + 2)
    curves = []
    for c in [1] if logits.shape[1] == 2 else range(logits.shape[1]):
        rising = IsotonicRegression(y_min=least, y_max=1 - least)
        fitted = rising.fit(odds[:, c], s[:, c] / weight, weight)
        curves.append((tuple(fitted.X_thresholds_.tolist()), tuple(fitted.y_thresholds_.tolist())))
    return Calibration("isotonic", curves=tuple(curves))


def log_odds(logits: Tensor) -> Tensor:
    """Return the log-odds of each class against all others, [n, C]."""
    classes = range(logits.shape[1])
    others = [torch.cat([logits[:, :c], logits[:, c + 1 :]], 1).logsumexp(1) for c in classes]
    return logits - torch.stack(others, 1)


# Choosing a calibration ---------------------------------------------------------------------------


def calibrate(
    fit: Fit | None, logits: Tensor, targets: Tensor, group: Tensor, offset: tuple[float, ...] = ()
) -> Calibration:
    """Fit the calibration of a head's logits [n, C] for targets [n, C] (distributions, each times
    the weight of its row) on the prompts `group` [n].

    fit: None for the head as it was trained. Offset, temperature and `fit` are tried in this order.
    Each is kept if it lowers the cross-entropy below that of the one kept before on prompts it was
    not fitted on (`better`), and below that of softmax(logits) on all prompts."""
    if not torch.isfinite(logits).all():
        raise UserError(
            "calibration: the head returns NaN or infinite logits. Train with a lower trainer.lr"
        )
    logits, before = logits.double(), cross_entropy(logits, targets)
    rows, prompts = len(logits), len(group.unique())
    kept = Calibration(rows=rows, prompts=prompts, nll_before=before, nll_after=before)
    if fit is None:
        return kept
    if offset:
        shifted = logits + logits.new_tensor(offset)
        after = cross_entropy(shifted, targets)
        if after < before:
            logits, kept = shifted, replace(kept, method="offset", offset=offset, nll_after=after)
    nothing = "nothing fitted but the offset of the priors" if kept.offset else "nothing fitted"
    if (targets.sum(0) <= 0).any():
        return replace(kept, note=f"{nothing}: a class does not occur in the calibration split")
    if kept.prompts < 2:
        note = f"{nothing}: a fit takes two prompts, the calibration split has one"
        return replace(kept, note=note)
    return _best(fit, kept, logits, targets, group)


def _best(
    fit: Fit, kept: Calibration, logits: Tensor, targets: Tensor, group: Tensor
) -> Calibration:
    """Return the best of `kept`, a temperature and the result of `fit`. logits: with the offset
    that was kept."""
    loss = _nll(torch.softmax(logits, -1), targets)
    for step in dict.fromkeys((fit_temperature, fit)):

        def refit(rows: Tensor, step: Fit = step) -> Tensor:
            return step(logits[rows], targets[rows]).apply(logits)

        fitted = step(logits, targets)
        after = float(_nll(fitted.apply(logits), targets).mean())
        held_out = _nll(cross_fitted(refit, group), targets)
        if after <= (kept.nll_before or 0.0) and better(loss - held_out, group):
            loss = held_out
            kept = replace(kept, **{key: getattr(fitted, key) for key in FITTED}, nll_after=after)
    if kept.method == fitted.method:
        return kept
    note = f"{fitted.method} left out: no better on prompts it was not fitted on"
    return replace(kept, note=note)


def cross_entropy(logits: Tensor, targets: Tensor) -> float:
    """Return the mean over rows of -sum_c targets log softmax(logits). Both [n, C]."""
    return float(-(targets.double() * torch.log_softmax(logits.double(), dim=-1)).sum(-1).mean())


def _nll(probs: Tensor, targets: Tensor) -> Tensor:
    return -torch.special.xlogy(targets.double(), probs.double()).sum(-1)
