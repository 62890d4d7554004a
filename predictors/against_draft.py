"""How well it is predicted that a draft survives, against what the draft's own confidence says of
that, calibrated in the same way."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from predictors.base import Predictor, Records
from predictors.reliability import mean_gap, prefixes_by, rollout_prefixes
from predictors.survival import Prefixes, Survival, binary_nll, fit_survival

CONFIDENCES = ("product of q", "last q")


def fit_confidences(predictor: Predictor, rounds: Records) -> dict[str, Survival]:
    """What each of `CONFIDENCES` says of the survival that `predictor` predicts, fitted on
    `rounds`."""
    return {name: fit_survival(rows) for name, rows in confidence_rows(predictor, rounds).items()}


def confidence_rows(predictor: Predictor, rounds: Records) -> dict[str, Prefixes]:
    """Prefixes by the draft's probabilities, at temperature 1 and unfiltered, of the tokens."""
    q = rounds["q_drawn"].double()
    said: Mapping[str, Tensor] = dict(zip(CONFIDENCES, (q.cumprod(1), q), strict=True))
    return {name: prefixes_by(predictor, rounds, values) for name, values in said.items()}


def compared(
    predictor: Predictor, confidences: Mapping[str, Survival], rounds: Records
) -> dict[str, Any]:
    """`rows` and `prompts` of prefixes of held-out rounds, the estimate `log_loss` of each way to
    predict their survival, and `difference`: by how much the predictor's is above the others', on
    the same rows and resamples; below 0 is better."""
    _, ours = rollout_prefixes(predictor, rounds)
    found = {
        predictor.name: binary_nll(predictor.calibration.survival.of_prefixes(ours), ours.accepted)
    }
    for name, rows in confidence_rows(predictor, rounds).items():
        found[name] = binary_nll(confidences[name].of_prefixes(rows), rows.accepted)
    return {
        "rows": len(ours.k),
        "prompts": len(ours.group.unique()),
        "log_loss": {name: _mean(loss, ours.group) for name, loss in found.items()},
        "difference": {
            name: _mean(found[predictor.name] - found[name], ours.group) for name in confidences
        },
    }


def _mean(loss: Tensor, group: Tensor) -> list[float]:
    return mean_gap(loss[:, None], group, 0, signed=True)
