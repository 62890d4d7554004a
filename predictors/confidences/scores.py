"""How well logged confidences say what is accepted, before and after calibration."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from predictors.confidences.maps import PositionMaps, accepted_length_loss
from predictors.confidences.sts import equal_width_ece, width_bins
from predictors.confidences.table import Confidences
from predictors.reliability import mean_gap, reliability, two_columns
from predictors.survival import better

ENGINES = {"deepspec": 20, "sglang": 15}
"""Bins of equal width of the engines' calibration errors, both of the predicted survival."""
DRAWS = 100
Stages = Mapping[str, Tensor]
"""By name, a predicted survival [n, gamma] of the same proposals."""


def scored(rows: Confidences, stages: Stages) -> dict[str, Any]:
    """Per domain ("all" first where there are several): `proposals`, `groups`, `positions` with the
    errors of every stage, `loss`: the estimate of the log loss of the accepted length."""
    found = {}
    if len(rows.domains) > 1:
        found["all"] = _part(rows, stages)
    for number, name in enumerate(rows.domains):
        kept = rows.domain == number
        part = {stage: survival[kept] for stage, survival in stages.items()}
        found[name] = _part(rows.rows(kept), part)
    return found


def _part(rows: Confidences, stages: Stages) -> dict[str, Any]:
    losses = {name: accepted_length_loss(rows, said) for name, said in stages.items()}
    first = next(iter(losses.values()))
    return {
        "proposals": len(rows.logits),
        "groups": len(rows.group.unique()),
        "positions": [_position(rows, stages, i) for i in range(rows.gamma)],
        "loss": {name: _mean(loss, rows.group) for name, loss in losses.items()},
        "change": {name: _mean(loss - first, rows.group) for name, loss in losses.items()},
    }


def _position(rows: Confidences, stages: Stages, position: int) -> dict[str, Any]:
    """position: from 0; in what is returned, from 1."""
    counts = rows.counts(position)
    labels, group = rows.labels[counts, position], rows.group[counts]
    head = {"position": position + 1, "rows": len(labels), "accepted": _float(labels.mean())}
    if not len(labels):
        return {**head, "stages": {}}
    found = {name: errors(said[counts, position], labels, group) for name, said in stages.items()}
    return {**head, "stages": found}


def errors(predicted: Tensor, labels: Tensor, group: Tensor) -> dict[str, Any]:
    """Estimates: the calibration error as each engine defines it, `ours` (bins of equal mass), and
    `brier`; `perfect`: what the first engine's would be if all predictions were right. All [n]."""
    gap = (predicted - labels)[:, None]
    found: dict[str, Any] = {
        name: mean_gap(one_hot(width_bins(predicted, bins), bins) * gap, group, 0)
        for name, bins in ENGINES.items()
    }
    own = reliability(two_columns(predicted), two_columns(labels), group)
    return {
        **found,
        "ours": own["ece"],
        "brier": mean_gap(gap.square(), group, 0),
        "perfect": perfect(predicted, ENGINES["deepspec"]),
    }


def perfect(predicted: Tensor, bins: int) -> list[float]:
    """Mean calibration error, and where 95 % of them lie, of labels [n] drawn with the predicted
    probabilities, each by itself: what so few rows leave of it by chance."""
    generator = torch.Generator().manual_seed(0)
    shape, errors = predicted.shape, list[float]()
    for _ in range(DRAWS):
        coins = torch.rand(shape, generator=generator)
        errors.append(equal_width_ece(predicted, (coins < predicted).double(), bins))
    found = torch.tensor(errors, dtype=torch.float64)
    return [found.mean().item(), *found.quantile(found.new_tensor([0.025, 0.975])).tolist()]


def helps(rows: Confidences, held_out: Tensor) -> bool:
    """Whether a survival [n, gamma], of groups that it was not fitted on, says better than the
    confidences as logged how many tokens are accepted."""
    logged = accepted_length_loss(rows, as_logged(rows))
    return better(logged - accepted_length_loss(rows, held_out), rows.group)


def as_logged(rows: Confidences) -> Tensor:
    """[n, gamma], the survival that is said by the logits as they are."""
    return torch.sigmoid(rows.logits).cumprod(1)


def by_maps(rows: Confidences, maps: PositionMaps) -> Tensor:
    return maps.surviving(rows.logits)


def _mean(values: Tensor, group: Tensor) -> list[float]:
    return mean_gap(values[:, None], group, 0, signed=True)


def _float(value: Tensor) -> float:
    return float(value) if value.numel() else math.nan
