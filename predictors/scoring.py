"""Fitting the calibration of a trained predictor, and scoring it beside trivial ones."""

from dataclasses import replace
from typing import Any

import torch

from predictors.base import Predictor, Records
from predictors.baselines import CONFIDENCES, base_rate, confidence, constant
from predictors.calibration import Fit, balanced, calibrate
from predictors.card import DECISION
from predictors.metrics import scores
from predictors.reliability import rollout_prefixes
from predictors.survival import fit_survival
from predictors.training.trainer import logits_in_chunks


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
    """Scores on the test split: the predictor before and after calibration, then the trivial
    predictors."""
    known, wanted, n = predictor.targets(train), predictor.targets(test), len(test["group"])
    logits = logits_in_chunks(predictor.head, test["inputs"])
    calibrated = predictor.calibration.apply(logits)
    probs = {
        predictor.name: calibrated,
        f"{predictor.name}, before calibration": torch.softmax(logits, dim=-1),
        "constant": constant(known, n),
        "base rate": base_rate(known, n),
    }
    if predictor.calibration.log_prior:
        probs[f"{predictor.name}, {DECISION}"] = balanced(
            calibrated, predictor.calibration.log_prior
        )
    for column in CONFIDENCES:
        if column in test:
            probs[f"draft confidence ({column})"] = confidence(train[column], known, test[column])
    return {name: scores(rows, wanted) for name, rows in probs.items()}
