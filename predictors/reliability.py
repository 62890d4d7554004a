"""How well predicted probabilities agree with what happened, with bootstrap intervals over prompts.

An estimate is a list [value, low, high]. Rows of one prompt depend on each other, so resamples draw
whole prompts with replacement. Intervals are 95 % pivotal ones (2 value - upper quantile, 2 value -
lower quantile), widened to contain the value: an absolute gap grows with every layer of noise, and
the quantiles themselves are too high by one layer."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from predictors.base import Predictor, Records
from predictors.metrics import log_loss, one_column, squared_error
from predictors.outcomes import foresees, survival
from predictors.survival import Prefixes, by_depth, counted
from predictors.training.trainer import logits_in_chunks
from runtime.intervals import Array, bootstrap

BINS = 10


def measured(predictor: Predictor, records: Records, rounds: Records | None) -> dict[str, Any]:
    """Stages of calibration on held-out rows: of what the head predicts ("token" or "class"), and
    with `rounds` of prefix survival, "prefix all", "prefix 1", ... by length."""
    logits = logits_in_chunks(predictor.head, records["inputs"])
    probs = {
        "as trained": torch.softmax(logits, dim=-1),
        "calibrated": predictor.calibration.apply(logits),
    }
    name = "token" if len(predictor.classes) == 2 else "class"
    found = {name: stages(probs, predictor.targets(records), records["group"])}
    return found if rounds is None else {**found, **prefix_stages(predictor, rounds)}


def prefix_stages(predictor: Predictor, rounds: Records) -> dict[str, Any]:
    """Survival by predictions as trained, by calibrated ones, and calibrated itself, against prod
    min(1, p/q)."""
    as_trained, calibrated = rollout_prefixes(predictor, rounds)
    mapped = calibrated._replace(product=predictor.calibration.survival.of_prefixes(calibrated))
    by_stage = {"as trained": as_trained, "calibrated": calibrated, "survival": mapped}
    found = {}
    for parts in zip(*map(by_depth, by_stage.values()), strict=True):
        (name, rows), *_ = parts
        columns = {
            stage: two_columns(part.product)
            for stage, (_, part) in zip(by_stage, parts, strict=True)
        }
        found[f"prefix {name}"] = stages(columns, two_columns(rows.accepted), rows.group)
    return found


def rollout_prefixes(predictor: Predictor, rounds: Records) -> tuple[Prefixes, Prefixes]:
    """Prefixes of a split's rollouts, by predictions as trained and by calibrated ones."""
    shape = rounds["accept_prob"].shape
    logits = logits_in_chunks(predictor.head, rounds["inputs"].reshape(shape.numel(), -1))
    as_trained, calibrated = (
        prefixes_by(predictor, rounds, survival(probs.view(*shape, -1)))
        for probs in (torch.softmax(logits, dim=-1), predictor.calibration.apply(logits))
    )
    return as_trained, calibrated


def prefixes_by(predictor: Predictor, rounds: Records, said: Tensor) -> Prefixes:
    """Prefixes with what is `said` [N, gamma] of each, and what became of it: whether all of its
    tokens are accepted, and the next one too where that is what `predictor` foresees."""
    accepted = rounds["accept_prob"].double().cumprod(1)
    length = torch.minimum(rounds["drafted"], rounds["known"])
    if foresees(len(predictor.classes)):
        accepted, length = accepted.roll(-1, 1), length - 1
    return counted(said, accepted, length, rounds["group"])


def two_columns(f: Tensor) -> Tensor:
    return torch.stack([1 - f, f], dim=-1)


def stages(
    probs: Mapping[str, Tensor], targets: Tensor, group: Tensor
) -> dict[str, dict[str, Any]]:
    """`reliability` of probabilities [n, C] by name and, from the second on, how they `change` the
    one before."""
    found, before = {}, None
    for name, after in probs.items():
        found[name] = reliability(after, targets, group)
        if before is not None:
            found[name]["change"] = change(before, after, targets, group)
        before = after
    return found


def reliability(probs: Tensor, targets: Tensor, group: Tensor, seed: int = 0) -> dict[str, Any]:
    """`rows`, `prompts`, the estimates `ece`, `brier`, `log_loss`, and `bins`: [share of rows, mean
    prediction, mean outcome] of bins of equal mass.

    probs, targets: [n, C] distributions; group: [n] prompts. ece and bins are of one column
    (`metrics.one_column`); the log loss is the cross-entropy, for soft targets too."""
    probs, targets = probs.double(), targets.double()
    predicted, outcome = one_column(probs, targets)
    cell = torch.nn.functional.one_hot(mass_bins(predicted), BINS).double()
    sums = cell.T @ torch.stack([torch.ones_like(predicted), predicted, outcome], 1)
    return {
        "rows": len(probs),
        "prompts": len(group.unique()),
        "ece": mean_gap(cell * (predicted - outcome)[:, None], group, seed),
        "brier": mean_gap(squared_error(probs, targets)[:, None], group, seed),
        "log_loss": mean_gap(log_loss(probs, targets)[:, None], group, seed),
        "bins": [[n / len(probs), f / n, s / n] for n, f, s in sums.tolist() if n],
    }


def change(
    before: Tensor, after: Tensor, targets: Tensor, group: Tensor, seed: int = 0
) -> dict[str, list[float]]:
    """Estimates of after - before for `brier` and `log_loss`, on the same rows and resamples; below
    0 is better."""
    before, after, targets = before.double(), after.double(), targets.double()
    return {
        name: mean_gap(
            (score(after, targets) - score(before, targets))[:, None], group, seed, signed=True
        )
        for name, score in (("brier", squared_error), ("log_loss", log_loss))
    }


def mean_gap(values: Tensor, group: Tensor, seed: int, signed: bool = False) -> list[float]:
    """Estimate of sum_b |mean over rows of values[:, b]|, or of the mean itself where `signed` (one
    column).

    values: [n, B]; group: [n]. With one prompt there is nothing to resample: the interval is [NaN,
    NaN]."""
    _, prompt = torch.unique(group, return_inverse=True)
    prompts = int(prompt.max()) + 1
    rows = torch.bincount(prompt).double().numpy()
    sums = torch.zeros(prompts, values.shape[1], dtype=torch.float64)
    table = sums.index_add_(0, prompt, values.double()).numpy()

    def statistic(times: Array) -> Array:
        means = times @ table / (times @ rows)[..., None]
        return means[..., 0] if signed else np.abs(means).sum(-1)

    value, low, high = bootstrap(statistic, prompts, seed, pivotal=True)
    if low is None or high is None:
        return [value, math.nan, math.nan]
    return [value, min(value, low if signed else max(0.0, low)), max(value, high)]


def mass_bins(predicted: Tensor) -> Tensor:
    """[n] bin of each prediction: cut at the quantiles, so equal predictions share one."""
    edges = predicted.quantile(torch.linspace(0, 1, BINS + 1, dtype=predicted.dtype)[1:-1])
    return torch.searchsorted(edges.unique(), predicted.contiguous(), right=True)
