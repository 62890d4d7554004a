"""How well logged confidences predict what is accepted, before and after calibration, and the
page that shows it."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from predictors.confidences.maps import accepted_length_loss, as_logged
from predictors.confidences.sts import equal_width_ece, width_bins
from predictors.confidences.table import Confidences
from predictors.reliability import mean, mean_gap, reliability, two_columns
from predictors.survival import better
from runtime.text import printable

ENGINES = {"deepspec": 20, "sglang": 15}
"""Bins of equal width of the engines' calibration errors, both of the predicted survival."""
DEFINITIONS = {
    "deepspec": "20 bins of equal width (DeepSpec)",
    "sglang": "15 bins of equal width (SGLang)",
    "ours": "10 bins of equal mass (ours)",
}
DRAWS = 100
Stages = Mapping[str, Tensor]
"""By name, a predicted survival [n, gamma] of the same proposals."""


def scored(rows: Confidences, stages: Stages) -> dict[str, Any]:
    """Return per domain ("all" first where there are several) `proposals`, `groups`, `positions`
    with the errors of every stage, `loss`: the estimate of the log loss of the accepted length, and
    its `change` from the first stage."""
    parts = {}
    if len(rows.domains) > 1:
        parts["all"] = _part(rows, stages)
    for number, name in enumerate(rows.domains):
        kept = rows.domain == number
        part = {stage: survival[kept] for stage, survival in stages.items()}
        parts[name] = _part(rows.rows(kept), part)
    return parts


def _part(rows: Confidences, stages: Stages) -> dict[str, Any]:
    losses = {name: accepted_length_loss(rows, survival) for name, survival in stages.items()}
    first = next(iter(losses.values()))
    return {
        "proposals": len(rows.logits),
        "groups": len(rows.group.unique()),
        "positions": [_position(rows, stages, i) for i in range(rows.gamma)],
        "loss": {name: mean(loss, rows.group) for name, loss in losses.items()},
        "change": {name: mean(loss - first, rows.group) for name, loss in losses.items()},
    }


def _position(rows: Confidences, stages: Stages, position: int) -> dict[str, Any]:
    """position: from 0; in what is returned, from 1."""
    counts = rows.counts(position)
    labels, group = rows.labels[counts, position], rows.group[counts]
    parts = stages.items() if len(labels) else ()
    return {
        "position": position + 1,
        "rows": len(labels),
        "accepted": labels.mean().item(),  # NaN of none
        "stages": {
            name: errors(survival[counts, position], labels, group) for name, survival in parts
        },
    }


def errors(predicted: Tensor, labels: Tensor, group: Tensor) -> dict[str, Any]:
    """Return estimates: the calibration error as each engine defines it, `ours` (bins of equal
    mass), and `brier`; `perfect`: what the first engine's would be if all predictions were right.
    All arguments [n]."""
    gap = (predicted - labels)[:, None]
    return {
        **{
            name: mean_gap(one_hot(width_bins(predicted, bins), bins) * gap, group, 0)
            for name, bins in ENGINES.items()
        },
        "ours": reliability(two_columns(predicted), two_columns(labels), group)["ece"],
        "brier": mean_gap(gap.square(), group, 0),
        "perfect": perfect(predicted, ENGINES["deepspec"]),
    }


def perfect(predicted: Tensor, bins: int) -> list[float]:
    """Return the mean calibration error, and where 95 % of them lie, of labels [n] drawn with the
    predicted probabilities, each by itself: what so few rows leave of it by chance."""
    generator = torch.Generator().manual_seed(0)
    shape, errors = predicted.shape, list[float]()
    for _ in range(DRAWS):
        coins = torch.rand(shape, generator=generator)
        errors.append(equal_width_ece(predicted, (coins < predicted).double(), bins))
    values = torch.tensor(errors, dtype=torch.float64)
    return [values.mean().item(), *values.quantile(values.new_tensor([0.025, 0.975])).tolist()]


def helps(rows: Confidences, held_out: Tensor) -> bool:
    """Return whether a survival [n, gamma], of groups that it was not fitted on, predicts better
    than the confidences as logged how many tokens are accepted."""
    logged = accepted_length_loss(rows, as_logged(rows))
    return better(logged - accepted_length_loss(rows, held_out), rows.group)


def page(facts: Mapping[str, Any]) -> str:
    """Return the page beside a calibration. facts: `confidence_calibration.json`."""
    parts = [
        f"# Confidences of {printable(facts['data']['folder'])}, calibration={facts['method']}",
        f"{facts['proposals']} proposals of {facts['gamma']} tokens at most, {facts['groups']}"
        " groups. Intervals: 95 % bootstrap over groups. Errors are of the predicted survival (all"
        " tokens so far accepted); `fitted here` is fitted on other groups of the same data (five"
        " folds), `fitted elsewhere` on the data above. `by chance`: of labels that are drawn with"
        " the probabilities of the column before.",
        f"Temperatures ({facts['temperatures_fitted']}): "
        + ", ".join(f"{value:.3f}" for value in facts["temperatures"]),
    ]
    if facts["note"]:
        parts.append(f"{facts['note'].capitalize()}.")
    for data, domains in facts["scores"].items():
        for domain, scores in domains.items():
            losses = [
                f"{stage}: {_shown(value, 3)}"
                + (f" (change {_shown(scores['change'][stage], 3, '+')})" if number else "")
                for number, (stage, value) in enumerate(scores["loss"].items())
            ]
            parts += [
                f"## {printable(data)}, {printable(domain)}",
                f"{scores['proposals']} proposals, {scores['groups']} groups. Log loss of the"
                f" accepted length: {'; '.join(losses)}.",
                *(_table(scores, key, title) for key, title in DEFINITIONS.items()),
            ]
    parts.append(f"Made with: `{printable(facts['command'])}`")
    return "\n\n".join(parts)


def _table(scores: Mapping[str, Any], key: str, title: str) -> str:
    stages = list(scores["loss"])
    chance = ["by chance"] if key == "deepspec" else []
    header = [f"calibration error, %, {title}: position", "accepted", *stages, *chance]
    lines = [header, ["---"] * len(header)]
    for row in scores["positions"]:
        columns = [row["stages"][stage][key] for stage in stages if row["stages"]]
        columns += [row["stages"][stages[-1]]["perfect"] for _ in chance if row["stages"]]
        cells = [_shown([100 * value for value in column], 1) for column in columns]
        lines.append([str(row["position"]), f"{row['accepted']:.3f}", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(estimate: list[float], digits: int, sign: str = "") -> str:
    value, low, high = (f"{number:{sign}.{digits}f}" for number in estimate)
    return value if math.isnan(estimate[1]) else f"{value} ({low} to {high})"
