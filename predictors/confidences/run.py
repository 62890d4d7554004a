"""Calibrate imported confidences, see how that carries over, save it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor

from predictors.calibration import Fit
from predictors.confidences.maps import FILE, PositionMaps, conditional_temperatures, fit_maps
from predictors.confidences.page import page
from predictors.confidences.scores import as_logged, by_maps, helps, scored
from predictors.confidences.sts import Sts
from predictors.confidences.table import Confidences, is_imported, read_confidences
from predictors.survival import cross_fitted
from runtime.compatibility import incompatible
from runtime.errors import UserError
from runtime.files import checked_folder, only_writer, refuse_foreign, replaced_folder
from runtime.json_files import write_checksummed
from runtime.processes import this_process
from runtime.sweep import is_job, job_folder

CONTEXT = ("pair", "warp", "draft_warp")  # of harvests; no engine logs it
LOGGED, HERE, ELSEWHERE = "as logged", "fitted here", "fitted elsewhere"
"""What errors are told of: the confidences as they are; maps fitted on other groups of the same
data; maps fitted on the data of another folder."""


@dataclass(frozen=True)
class Method:
    """What is fitted: `fit` on every position, or `sts`; name: of its config."""

    name: str
    fit: Fit | None
    sts: Sts | None
    survival: bool

    def maps(self, rows: Confidences) -> PositionMaps:
        return fit_maps(rows, self.fit, self.sts, self.survival)

    def held_out(self, rows: Confidences) -> Tensor:
        """[n, gamma], survival by maps that were fitted on other groups. Of a single group: as
        logged."""
        if len(rows.group.unique()) < 2:
            return as_logged(rows)
        return cross_fitted(lambda kept: by_maps(rows, self.maps(rows.rows(kept))), rows.group)


def imported(cfg: DictConfig) -> bool:
    """Whether `cfg.data` are imported confidences. Raises UserError for a calibration that only
    they have, where they are none."""
    if is_imported(cfg.data):
        return True
    if cfg.calibration.sequential is not None:
        raise UserError(
            f"calibration: sequential temperatures are for imported confidences, {cfg.data} holds"
            " none. Write e.g. calibration=temperature"
        )
    return False


def main(cfg: DictConfig, command: str) -> None:
    """Of train.py, whose settings `cfg` are. The first of several processes does it alone."""
    if not this_process().is_main_process:
        return
    name = str(HydraConfig.get().runtime.choices["calibration"])
    fit, sts = (instantiate(cfg.calibration[key]) for key in ("fit", "sequential"))
    default = f"checkpoints/confidences{'-sweep' if is_job() else ''}"
    out = checked_folder("out", default if cfg.out is None else cfg.out)
    out = job_folder(out, FILE) if is_job() else out
    refuse_foreign(out, FILE)
    method = Method(name, fit, sts, cfg.calibration.survival)
    with only_writer(out):
        calibrate_imported(str(cfg.data), method, list(map(str, cfg.drift)), out, command)


def calibrate_imported(
    data: str, method: Method, drift: Sequence[str], out: Path, command: str
) -> None:
    """data, drift: folders of scripts/import_confidence.py; out: folder that is written. Raises
    UserError as `refuse_other`."""
    rows = read_confidences(data)
    others = {other: read_confidences(other, "drift") for other in drift}
    for other, found in others.items():
        refuse_other(data, rows, other, found)
    maps, held_out = method.maps(rows), method.held_out(rows)
    kept = helps(rows, held_out)
    scores = {data: scored(rows, {LOGGED: as_logged(rows), HERE: held_out})}
    for other, found in others.items():
        scores[other] = scored(found, _carried(found, method, maps))
    facts = {**_facts(rows, method, maps), "kept": kept, "note": _note(kept, method.name)}
    whole = {**facts, "scores": scores, "data": _origin(data, rows), "command": command}
    with replaced_folder(out, FILE) as fresh:
        write_checksummed(fresh / FILE, whole)
        (fresh / "README.md").write_text(page(whole) + "\n", encoding="utf-8")
    print(f"\n{page(whole)}\n\nsaved in {out}")


def refuse_other(data: str, rows: Confidences, other: str, found: Confidences) -> None:
    """Raise UserError where `other` is the same folder, or of another gamma, pair or distribution,
    as far as known."""
    if Path(other).resolve() == Path(data).resolve():
        raise UserError(
            f"drift: expected other folders than data, got {other}, on which the maps are fitted."
            " Leave it out"
        )
    if found.gamma != rows.gamma:
        raise UserError(
            f"drift: expected proposals of {rows.gamma} tokens, as in {data}, got {found.gamma} in"
            f" {other}. Leave it out"
        )
    known = {
        key: rows.facts[key] for key in CONTEXT if {key} <= rows.facts.keys() & found.facts.keys()
    }
    if unlike := incompatible(found.facts, known):
        name, made, here = unlike[0]
        raise UserError(
            f"drift: {other} was made with {name}={made}, {data} with {here}. Leave it out"
        )


def _carried(rows: Confidences, method: Method, maps: PositionMaps) -> Mapping[str, Tensor]:
    """As logged, by maps fitted elsewhere, and by maps fitted on these data (an oracle)."""
    return {LOGGED: as_logged(rows), ELSEWHERE: by_maps(rows, maps), HERE: method.held_out(rows)}


def _facts(rows: Confidences, method: Method, maps: PositionMaps) -> dict[str, Any]:
    plain = maps.temperatures()
    nearest = conditional_temperatures(rows) if plain is None else plain
    how = "sequential, on the survival" if method.sts else "one by one, on what came so far"
    accepted = [
        rows.labels[rows.counts(i), i].mean().nan_to_num(0.0).item() for i in range(rows.gamma)
    ]
    return {
        "schema_version": 1,
        "method": method.name,
        "gamma": rows.gamma,
        "maps": asdict(maps),
        "temperatures": nearest,
        "temperatures_fitted": how,
        "accepted": accepted,
        "proposals": len(rows.logits),
        "groups": len(rows.group.unique()),
        "sts": None if method.sts is None else asdict(method.sts),
    }


def _note(kept: bool, name: str) -> str:
    if kept:
        return ""
    return (
        f"{name} says no better than the confidences as logged how many tokens are accepted, on"
        " groups that it was not fitted on"
    )


def _origin(data: str, rows: Confidences) -> dict[str, Any]:
    return {"folder": data, "domains": list(rows.domains), **rows.facts}
