"""Quality of a trained predictor: fits its calibration, compares its scores with those of trivial
predictors, and measures calibration errors with bootstrap intervals.

An estimate is a list [value, low, high]. Rows of one prompt depend on each other, so resamples draw
whole prompts with replacement. Intervals are 95 % pivotal ones (2 value - upper quantile, 2 value -
lower quantile), widened to contain the value: an absolute gap grows with every layer of noise, and
the quantiles themselves are too high by one layer."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from predictors.base import Predictor, Records
from predictors.calibration import Fit, balanced, calibrate
from predictors.card import DECISION
from predictors.metrics import kl, log_loss, one_column, scores, squared_error
from predictors.outcomes import foresees, survival
from predictors.survival import Prefixes, Survival, binary_nll, by_depth, counted, fit_survival
from predictors.training.trainer import logits_in_chunks
from runtime.intervals import Array, bootstrap

CONFIDENCES = ("q", "q_max")
"""Columns with a draft probability: of the drawn token, and the largest of its distribution."""
ENOUGH = 100_000


def fit_calibration(
    predictor: Predictor, samples: Records, rounds: Records | None, fit: Fit | None
) -> None:
    """Calibrate the head's predictions and, if there are `rounds`, the survival of prefixes. fit:
    None leaves the head as it is."""
    logits = logits_in_chunks(predictor.head, samples["inputs"])
    predictor.calibration = calibrate(
        fit, logits, predictor.targets(samples), samples["group"], predictor.offset
    )
    if rounds is not None:
        _, calibrated = rollout_prefixes(predictor, rounds)
        predictor.calibration = replace(predictor.calibration, survival=fit_survival(calibrated))


def test_scores(predictor: Predictor, train: Records, test: Records) -> dict[str, dict[str, Any]]:
    """Return scores on the test split: of the predictor before and after calibration, then of the
    trivial predictors."""
    learned, targets = predictor.targets(train), predictor.targets(test)
    logits = logits_in_chunks(predictor.head, test["inputs"])
    calibrated, log_prior = predictor.calibration.apply(logits), predictor.calibration.log_prior
    probs = {
        predictor.name: calibrated,
        f"{predictor.name}, before calibration": torch.softmax(logits, dim=-1),
        "constant": torch.full_like(targets, 1 / targets.shape[1]),
        "base rate": base_rate(learned, len(targets)),
    }
    if log_prior:
        probs[f"{predictor.name}, {DECISION}"] = balanced(calibrated, log_prior)
    for column in CONFIDENCES:
        if column in test:
            probs[f"draft confidence ({column})"] = confidence(train[column], learned, test[column])
    return {name: scores(rows, targets) for name, rows in probs.items()}


def train_scores(predictor: Predictor, train: Records) -> dict[str, dict[str, float]]:
    """Return the kl of the head as trained on the rows of the training split."""
    probs = torch.softmax(logits_in_chunks(predictor.head, train["inputs"]), dim=-1).double()
    return {f"{predictor.name}, before calibration": {"kl": kl(probs, predictor.targets(train))}}


def base_rate(targets: Tensor, n: int) -> Tensor:
    """Return the mean of the training targets [m, C] for every row, [n, C]."""
    return targets.mean(0).expand(n, -1)


def confidence(train_q: Tensor, targets: Tensor, q: Tensor) -> Tensor:
    """Return probabilities [n, C] for draft probabilities q [n] by logistic regression, fitted to
    targets [m, C] on the log-odds of train_q [m].

    A soft target is C weighted rows, one per class. If only one class occurs, it gets probability
    1. More than `ENOUGH` rows say no more about its few numbers: evenly spaced ones are taken."""
    from sklearn.linear_model import LogisticRegression

    step = -(-len(targets) // ENOUGH)
    train_q, targets = train_q[::step], targets[::step]
    m, classes = targets.shape
    x, y = np.repeat(_log_odds(train_q), classes, axis=0), np.tile(np.arange(classes), m)
    weight = targets.double().numpy().ravel()
    x, y, weight = x[weight > 0], y[weight > 0], weight[weight > 0]
    if len(np.unique(y)) < 2:
        return base_rate(targets, len(q))
    model = LogisticRegression(C=1e6).fit(x, y, sample_weight=weight)
    probs = torch.zeros(len(q), classes, dtype=torch.float64)
    probs[:, model.classes_] = torch.from_numpy(model.predict_proba(_log_odds(q)))
    return probs


def _log_odds(q: Tensor) -> np.ndarray:
    column: np.ndarray = torch.logit(q.double(), eps=1e-6)[:, None].numpy()
    return column


BINS = 10


def measured(predictor: Predictor, records: Records, rounds: Records | None) -> dict[str, Any]:
    """Return stages of calibration on held-out rows: of the head's predictions ("token" or
    "class") and, with `rounds`, of prefix survival ("prefix all", and by length "prefix 1", ...).
    The stages of survival are: from predictions as trained, from calibrated ones, and calibrated
    itself, against prod min(1, p/q)."""
    logits = logits_in_chunks(predictor.head, records["inputs"])
    probs = {
        "as trained": torch.softmax(logits, dim=-1),
        "calibrated": predictor.calibration.apply(logits),
    }
    name = "token" if len(predictor.classes) == 2 else "class"
    result = {name: stages(probs, predictor.targets(records), records["group"])}
    if rounds is None:
        return result
    as_trained, calibrated = rollout_prefixes(predictor, rounds)
    by_stage = {
        "as trained": as_trained.product,
        "calibrated": calibrated.product,
        "survival": predictor.calibration.survival.of_prefixes(calibrated),
    }
    for name, rows in by_depth(calibrated.k):
        result[f"prefix {name}"] = stages(
            {stage: two_columns(product[rows]) for stage, product in by_stage.items()},
            two_columns(calibrated.accepted[rows]),
            calibrated.group[rows],
        )
    return result


def rollout_prefixes(predictor: Predictor, rounds: Records) -> tuple[Prefixes, Prefixes]:
    """Return prefixes of a split's rollouts with survival from predictions as trained, and from
    calibrated ones."""
    shape = rounds["accept_prob"].shape
    logits = logits_in_chunks(predictor.head, rounds["inputs"].reshape(shape.numel(), -1))
    as_trained, calibrated = (
        prefixes_by(predictor, rounds, survival(probs.view(*shape, -1)))
        for probs in (torch.softmax(logits, dim=-1), predictor.calibration.apply(logits))
    )
    return as_trained, calibrated


def prefixes_by(predictor: Predictor, rounds: Records, predicted: Tensor) -> Prefixes:
    """Return prefixes with their `predicted` [N, gamma] survival and the probability that all of
    their tokens (and the next one, if `predictor` foresees it) are accepted."""
    accepted = rounds["accept_prob"].double().cumprod(1)
    length = torch.minimum(rounds["drafted"], rounds["known"])
    if foresees(len(predictor.classes)):
        accepted, length = accepted.roll(-1, 1), length - 1
    return counted(predicted, accepted, length, rounds["group"])


def draft_prefixes(predictor: Predictor, rounds: Records) -> dict[str, Prefixes]:
    """Return prefixes with survival from the unwarped q of their tokens: the product, and that of
    the last token."""
    q = rounds["q_drawn"].double()
    confidences = {"product of q": q.cumprod(1), "last q": q}
    return {name: prefixes_by(predictor, rounds, q) for name, q in confidences.items()}


def fit_confidences(predictor: Predictor, rounds: Records) -> dict[str, Survival]:
    """Calibrate each of `draft_prefixes` to the survival that `predictor` predicts."""
    return {name: fit_survival(rows) for name, rows in draft_prefixes(predictor, rounds).items()}


def compared(
    predictor: Predictor, confidences: Mapping[str, Survival], rounds: Records
) -> dict[str, Any]:
    """Compare predicted survival with the draft's own confidence, calibrated in the same way.

    Returns `rows` and `prompts` of prefixes of held-out rounds, the estimate `log_loss` of each way
    to predict their survival, and `difference`: by how much the predictor's is above the others',
    on the same rows and resamples; below 0 is better."""
    _, rows = rollout_prefixes(predictor, rounds)
    own = binary_nll(predictor.calibration.survival.of_prefixes(rows), rows.accepted)
    losses = {
        name: binary_nll(confidences[name].of_prefixes(prefixes), prefixes.accepted)
        for name, prefixes in draft_prefixes(predictor, rounds).items()
    }
    return {
        "rows": len(rows.k),
        "prompts": len(rows.group.unique()),
        "log_loss": {
            name: mean(loss, rows.group) for name, loss in {predictor.name: own, **losses}.items()
        },
        "difference": {name: mean(own - loss, rows.group) for name, loss in losses.items()},
    }


def two_columns(f: Tensor) -> Tensor:
    return torch.stack([1 - f, f], dim=-1)


def stages(
    probs: Mapping[str, Tensor], targets: Tensor, group: Tensor
) -> dict[str, dict[str, Any]]:
    """Return `reliability` of probabilities [n, C] by name and, from the second stage on, the
    `change` from the stage before."""
    result = {name: reliability(after, targets, group) for name, after in probs.items()}
    for before, (name, after) in zip(probs.values(), list(probs.items())[1:], strict=False):
        result[name]["change"] = change(before, after, targets, group)
    return result


def reliability(probs: Tensor, targets: Tensor, group: Tensor, seed: int = 0) -> dict[str, Any]:
    """Return `rows`, `prompts`, the estimates `ece`, `brier`, `log_loss`, and `bins`: [share of
    rows, mean prediction, mean outcome] of bins of equal mass.

    probs, targets: [n, C] distributions; group: [n] prompts. ece and bins are of one column
    (`metrics.one_column`); the log loss is the cross-entropy, for soft targets too."""
    probs, targets = probs.double(), targets.double()
    predicted, outcome = one_column(probs, targets)
    cells, bins = (
        torch.stack([torch.ones_like(predicted), predicted, outcome], 1),
        mass_bins(predicted),
    )
    sums = torch.zeros(BINS, 3, dtype=torch.float64).index_add_(0, bins, cells)
    return {
        "rows": len(probs),
        "prompts": len(group.unique()),
        "ece": mean_gap(predicted - outcome, group, seed, bins),
        "brier": mean_gap(squared_error(probs, targets), group, seed),
        "log_loss": mean_gap(log_loss(probs, targets), group, seed),
        "bins": [[n / len(probs), f / n, s / n] for n, f, s in sums.tolist() if n],
    }


def change(
    before: Tensor, after: Tensor, targets: Tensor, group: Tensor, seed: int = 0
) -> dict[str, list[float]]:
    """Return estimates of after - before for `brier` and `log_loss`, on the same rows and
    resamples; below 0 is better."""
    before, after, targets = before.double(), after.double(), targets.double()
    return {
        name: mean(score(after, targets) - score(before, targets), group, seed)
        for name, score in (("brier", squared_error), ("log_loss", log_loss))
    }


def mean(values: Tensor, group: Tensor, seed: int = 0) -> list[float]:
    """Return the estimate of the mean of values [n]."""
    return mean_gap(values, group, seed, signed=True)


def mean_gap(
    values: Tensor, group: Tensor, seed: int, bins: Tensor | None = None, signed: bool = False
) -> list[float]:
    """Return the estimate of the sum over bins of |sum of the values in a bin| / rows, of one bin
    without `bins` [n], or of the mean itself if `signed`.

    values: [n]; group: [n]. With one prompt there is nothing to resample: the interval is [NaN,
    NaN]."""
    _, prompt = torch.unique(group, return_inverse=True)
    prompts, columns = int(prompt.max()) + 1, 1 if bins is None else int(bins.max()) + 1
    rows = torch.bincount(prompt).double().numpy()
    places = prompt * columns + (0 if bins is None else bins)
    sums = torch.zeros(prompts * columns, dtype=torch.float64)
    table = sums.index_add_(0, places, values.double()).view(prompts, columns).numpy()

    def statistic(times: Array) -> Array:
        means = times @ table / (times @ rows)[..., None]
        return means[..., 0] if signed else np.abs(means).sum(-1)

    value, low, high = bootstrap(statistic, prompts, seed, pivotal=True)
    if low is None or high is None:
        return [value, math.nan, math.nan]
    return [value, min(value, low if signed else max(0.0, low)), max(value, high)]


def mass_bins(predicted: Tensor) -> Tensor:
    """Return the bin of each prediction, [n]: cut at the quantiles, so equal ones share a bin."""
    edges = predicted.quantile(torch.linspace(0, 1, BINS + 1, dtype=predicted.dtype)[1:-1])
    return torch.searchsorted(edges.unique(), predicted.contiguous(), right=True)
