"""Calibrate imported confidences, see how that carries over, save it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from torch import Tensor

from predictors.calibration import Fit
from predictors.confidences.maps import (
    FILE,
    PositionMaps,
    as_logged,
    conditional_temperatures,
    fit_maps,
)
from predictors.confidences.scores import helps, page, scored
from predictors.confidences.sts import Sts
from predictors.confidences.table import Confidences, is_imported, read_confidences
from predictors.survival import cross_fitted
from runtime.compatibility import incompatible
from runtime.errors import UserError
from runtime.files import checked_folder, only_writer, refuse_foreign, replaced_folder
from runtime.job import command_line, is_job, job_folder
from runtime.json_files import write_checksummed
from runtime.processes import this_process
from runtime.settings.groups import Calibration

CONTEXT = ("pair", "warp", "draft_warp")  # of harvests; no engine logs it
LOGGED, HERE, ELSEWHERE = "as logged", "fitted here", "fitted elsewhere"
"""Stages whose errors are shown: the confidences as they are; maps fitted on other groups of the
same data; maps fitted on the data of another folder."""


@dataclass(frozen=True)
class Method:
    """Calibration method: `fit` on every position, or `sts`; name: of its config."""

    name: str
    fit: Fit | None
    sts: Sts | None
    survival: bool

    def maps(self, rows: Confidences) -> PositionMaps:
        return fit_maps(rows, self.fit, self.sts, self.survival)

    def held_out(self, rows: Confidences) -> Tensor:
        """Return the survival by maps that were fitted on other groups, [n, gamma]; of a single
        group as logged."""
        if len(rows.group.unique()) < 2:
            return as_logged(rows)
        return cross_fitted(
            lambda kept: self.maps(rows.rows(kept)).surviving(rows.logits), rows.group
        )


def imported(data: str | Path, calibration: Calibration) -> bool:
    """Return whether `data` are imported confidences. Raises UserError for a calibration that
    only they have, where they are none."""
    if is_imported(data):
        return True
    if calibration.sequential is not None:
        raise UserError(
            f"calibration: sequential temperatures are for imported confidences, {data} holds"
            " none. Write e.g. calibration=temperature"
        )
    return False


def main(
    data: str | Path, calibration: Calibration, drift: Sequence[str | Path], out: str | Path | None
) -> None:
    """Calibrate imported confidences, for train.py; the first of several processes does it alone.
    drift: folders that it is scored on besides; out: None for the default."""
    if not this_process().is_main_process:
        return
    name = str(HydraConfig.get().runtime.choices["calibration"])
    fit, sts = (instantiate(part) for part in (calibration.fit, calibration.sequential))
    default = f"checkpoints/confidences{'-sweep' if is_job() else ''}"
    folder = checked_folder("out", str(default if out is None else out))
    folder = job_folder(folder, FILE) if is_job() else folder
    refuse_foreign(folder, FILE)
    method = Method(name, fit, sts, calibration.survival)
    with only_writer(folder):
        calibrate_imported(str(data), method, list(map(str, drift)), folder)


def calibrate_imported(data: str, method: Method, drift: Sequence[str], out: Path) -> None:
    """Calibrate the confidences in `data`, score them there and in the folders `drift`, and write
    `out`. Raises UserError as `refuse_other`."""
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
    facts = {
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
    with replaced_folder(out, FILE) as fresh:
        write_checksummed(fresh / FILE, facts)
        (fresh / "README.md").write_text(page(facts) + "\n", encoding="utf-8")
    print(f"\n{page(facts)}\n\nsaved in {out}")


def refuse_other(data: str, rows: Confidences, other: str, log: Confidences) -> None:
    """Raise UserError where `other` is the same folder, or of another gamma, pair or distribution,
    as far as both name them."""
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
