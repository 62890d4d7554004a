"""Fitting the calibration of a trained predictor, and scoring it beside trivial ones, which have
neither a head nor hidden states."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from predictors.base import Predictor, Records
from predictors.calibration import Fit, balanced, calibrate
from predictors.card import DECISION
from predictors.metrics import scores
from predictors.reliability import rollout_prefixes
from predictors.survival import fit_survival
from predictors.training.trainer import logits_in_chunks

CONFIDENCES = ("q", "q_max")
"""Columns with a draft probability: of the drawn token, and the largest of its distribution."""


def fit_calibration(
    predictor: Predictor, samples: Records, rounds: Records | None, fit: Fit | None
) -> None:
    """Calibrate what the head predicts, then, where there are `rounds`, the survival of prefixes.
    fit: None leaves the head as it is."""
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


def base_rate(targets: Tensor, n: int) -> Tensor:
    """Return the mean of the training targets [m, C] for every row, [n, C]."""
    return targets.mean(0).expand(n, -1)


def confidence(train_q: Tensor, targets: Tensor, q: Tensor) -> Tensor:
    """Return a logistic regression of the targets [m, C] on the log-odds of one draft probability,
    train_q [m], for q [n]: probabilities [n, C].

    A soft target is C weighted rows, one per class. Where only one class occurs, it is certain."""
    from sklearn.linear_model import LogisticRegression

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
