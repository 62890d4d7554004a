"""Calibrate imported confidences, score the calibration on other data, save it and its page."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from torch import Tensor

from predictors.calibration import Fit
from predictors.confidences.maps import (
    FILE,
    PositionMaps,
    accepted_length_loss,
    as_logged,
    conditional_temperatures,
    fit_maps,
)
from predictors.confidences.sts import Sts, equal_width_ece, width_bins
from predictors.confidences.table import Confidences, is_imported, read_confidences
from predictors.reliability import mean, mean_gap, reliability, two_columns
from predictors.survival import better, cross_fitted
from runtime.compatibility import incompatible
from runtime.errors import UserError
from runtime.files import only_writer, refuse_foreign, replaced_folder
from runtime.job import command_line, result_folder
from runtime.json_files import write_checksummed
from runtime.processes import this_process
from runtime.settings.groups import Calibration
from runtime.text import printable
from runtime.tracking import tracked

CONTEXT = ("pair", "warp", "draft_warp")  # known for harvests; no engine logs it
LOGGED, HERE, ELSEWHERE = "as logged", "fitted here", "fitted elsewhere"
"""Stages whose errors are shown: the confidences as they are; maps fitted on other groups of the
same data; maps fitted on the data of another folder."""


@dataclass(frozen=True)
class Method:
    """A calibration method: `fit` on every position, or `sts`. name: of its config."""

    name: str
    fit: Fit | None
    sts: Sts | None
    survival: bool

    def maps(self, rows: Confidences) -> PositionMaps:
        return fit_maps(rows, self.fit, self.sts, self.survival)

    def held_out(self, rows: Confidences) -> Tensor:
        """Return the survival predicted by maps fitted on other groups, [n, gamma]; as logged if
        there is a single group."""
        if len(rows.group.unique()) < 2:
            return as_logged(rows)
        return cross_fitted(
            lambda kept: self.maps(rows.rows(kept)).surviving(rows.logits), rows.group
        )


def imported(data: str | Path, calibration: Calibration) -> bool:
    """Return whether `data` are imported confidences. Raises UserError if they are not, but the
    calibration is for these only."""
    if is_imported(data):
        return True
    if calibration.sequential is not None:
        raise UserError(
            f"calibration: sequential temperatures are for imported confidences, {data} holds"
            " none. Write e.g. calibration=temperature"
        )
    return False


def main(settings: Any) -> None:
    """Calibrate the confidences in `settings.data`, for train.py, score them there and in the
    folders `drift`, and write `out`; the first of several processes does it alone.

    Raises UserError as `refuse_other`."""
    if not this_process().is_main_process:
        return
    data, calibration = str(settings.data), settings.calibration
    fit, sts = (instantiate(part) for part in (calibration.fit, calibration.sequential))
    name = str(HydraConfig.get().runtime.choices["calibration"])
    method = Method(name, fit, sts, calibration.survival)
    folder = result_folder(settings.out, "confidences", FILE)
    refuse_foreign(folder, FILE)
    with (
        only_writer(folder),
        tracked(settings.logger, "train", settings.plain(), [], ["confidences"]) as logger,
    ):
        logger.used("imported", "confidences", Path(data))
        facts = calibrated(data, method, list(map(str, settings.drift)))
        with replaced_folder(folder, FILE) as fresh:
            write_checksummed(fresh / FILE, facts)
            (fresh / "README.md").write_text(page(facts) + "\n", encoding="utf-8")
        logger.artifact("confidences", "calibration", folder)
    print(f"\n{page(facts)}\n\nsaved in {folder}")


def calibrated(data: str, method: Method, drift: Sequence[str]) -> dict[str, Any]:
    """Return the content of the calibration file (`maps.MapsFile`)."""
    rows = read_confidences(data)
    others = {other: read_confidences(other, "drift") for other in drift}
    for other, log in others.items():
        refuse_other(data, rows, other, log)
    maps, held_out = method.maps(rows), method.held_out(rows)
    kept, temperatures = helps(rows, held_out), maps.temperatures()
    scores = {data: scored(rows, {LOGGED: as_logged(rows), HERE: held_out})}
    for other, log in others.items():
        elsewhere = maps.surviving(log.logits)
        stages = {LOGGED: as_logged(log), ELSEWHERE: elsewhere, HERE: method.held_out(log)}
        scores[other] = scored(log, stages)
    note = (
        f"{method.name} says no better than the confidences as logged how many tokens are accepted,"
        " on groups that it was not fitted on"
    )
    return {
        "schema_version": 1,
        "method": method.name,
        "gamma": rows.gamma,
        "maps": asdict(maps),
        "temperatures": conditional_temperatures(rows) if temperatures is None else temperatures,
        "temperatures_fitted": (
            "sequential, on the survival" if method.sts else "one by one, on what came so far"
        ),
        "accepted": [
            rows.labels[rows.counts(i), i].mean().nan_to_num(0.0).item() for i in range(rows.gamma)
        ],
        "proposals": len(rows.logits),
        "groups": len(rows.group.unique()),
        "sts": None if method.sts is None else asdict(method.sts),
        "kept": kept,
        "note": "" if kept else note,
        "scores": scores,
        "data": {"folder": data, "domains": list(rows.domains), **rows.facts},
        "command": command_line(),
    }


def refuse_other(data: str, rows: Confidences, other: str, log: Confidences) -> None:
    """Raise UserError if `other` is the same folder, or differs in gamma, pair or distribution
    where both name them."""
    if Path(other).resolve() == Path(data).resolve():
        raise UserError(
            f"drift: expected other folders than data, got {other}, on which the maps are fitted."
            " Leave it out"
        )
    if log.gamma != rows.gamma:
        raise UserError(
            f"drift: expected proposals of {rows.gamma} tokens, as in {data}, got {log.gamma} in"
            f" {other}. Leave it out"
        )
    context = {key: rows.facts[key] for key in CONTEXT if key in rows.facts and key in log.facts}
    if unlike := incompatible(log.facts, context):
        name, made, here = unlike[0]
        raise UserError(
            f"drift: {other} was made with {name}={made}, {data} with {here}. Leave it out"
        )


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
    (from 1) with the errors of every stage, `loss`: the estimate of the log loss of the accepted
    length, and its `change` from the first stage."""
    kept = {name: rows.domain == number for number, name in enumerate(rows.domains)}
    if len(kept) > 1:
        kept = {"all": torch.ones_like(rows.domain, dtype=torch.bool), **kept}
    return {
        name: _part(rows.rows(part), {stage: survival[part] for stage, survival in stages.items()})
        for name, part in kept.items()
    }


def _part(rows: Confidences, stages: Stages) -> dict[str, Any]:
    losses = {name: accepted_length_loss(rows, survival) for name, survival in stages.items()}
    first, positions = next(iter(losses.values())), []
    for position in range(rows.gamma):
        counts = rows.counts(position)
        labels, group = rows.labels[counts, position], rows.group[counts]
        predicted = {name: survival[counts, position] for name, survival in stages.items()}
        estimates = {
            name: errors(each, labels, group) for name, each in predicted.items() if len(each)
        }
        about = {"position": position + 1, "rows": len(labels), "accepted": labels.mean().item()}
        positions.append({**about, "stages": estimates})  # accepted: NaN of none
    return {
        "proposals": len(rows.logits),
        "groups": len(rows.group.unique()),
        "positions": positions,
        "loss": {name: mean(loss, rows.group) for name, loss in losses.items()},
        "change": {name: mean(loss - first, rows.group) for name, loss in losses.items()},
    }


def errors(predicted: Tensor, labels: Tensor, group: Tensor) -> dict[str, Any]:
    """Return estimates: the calibration error as each engine defines it, `ours` (bins of equal
    mass), and `brier`; `perfect`: the first engine's error if all predictions were right.
    All arguments [n]."""
    gap = predicted - labels
    return {
        **{
            name: mean_gap(gap, group, 0, width_bins(predicted, bins))
            for name, bins in ENGINES.items()
        },
        "ours": reliability(two_columns(predicted), two_columns(labels), group)["ece"],
        "brier": mean_gap(gap.square(), group, 0),
        "perfect": perfect(predicted, ENGINES["deepspec"]),
    }


def perfect(predicted: Tensor, bins: int) -> list[float]:
    """Return the mean calibration error, and its 95 % range, of labels [n] drawn independently
    with the predicted probabilities: the error that so few rows show by chance."""
    generator = torch.Generator().manual_seed(0)
    shape, errors = predicted.shape, list[float]()
    for _ in range(DRAWS):
        coins = torch.rand(shape, generator=generator)
        errors.append(equal_width_ece(predicted, (coins < predicted).double(), bins))
    values = torch.tensor(errors, dtype=torch.float64)
    return [values.mean().item(), *values.quantile(values.new_tensor([0.025, 0.975])).tolist()]


def helps(rows: Confidences, held_out: Tensor) -> bool:
    """Return whether a survival [n, gamma], predicted for groups it was not fitted on, predicts the
    accepted length better than the logged confidences."""
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
