"""The file of tuned thresholds: written by scripts/tune.py, read by scripts/evaluate.py."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from predictors.base import write_json
from predictors.errors import UserError

FORMAT_VERSION = 1
SERIAL = ("decoding.engines.serial.SerialEngine", "decoding.structures.chain.Chain")


def write(path: Path, facts: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    write_json(partial, {"format_version": FORMAT_VERSION, **facts})
    partial.replace(path)


def read(path: Path) -> dict[str, Any]:
    """Raises UserError for a file that is not one of `write`."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found["format_version"] == FORMAT_VERSION:
            return found
        problem = f"format {found['format_version']}, this version reads {FORMAT_VERSION}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise UserError(f"thresholds: {path} cannot be read ({problem}). Tune again: python scripts/tune.py")


def apply(cfg: DictConfig, found: Mapping[str, Any], run: Mapping[str, Any], given: Iterable[str]) -> list[str]:
    """Set the tuned thresholds in `cfg.method` and say which, a line each.

    run: pair identity, warp and draft_warp of this run; with others nothing is set. given: keys set on the command
    line, which win.
    """
    for key, value in run.items():
        if _known(found[key]) != _known(value):
            return [f"thresholds: those of {cfg.thresholds} are for another {key}, left out"]
    chosen = found["results"]["chosen"]
    names = [name for name in chosen["rules"] if name in cfg.methods and name != "fixed"]  # its pass chooses its own
    lines = [_apply_one(cfg, name, chosen["rules"][name], found["rules"][name], list(given)) for name in names]
    return [f"thresholds: {cfg.thresholds}, whose advice is: {chosen['advice']}", *lines]


def _apply_one(cfg: DictConfig, name: str, choice: Mapping[str, Any], rule: Mapping[str, Any], given: list[str]) -> str:
    method, key = cfg.method[name], f"method.{name}.stop.{rule['setting']}"
    engine, structure = (method.get(part, {}).get("_target_") for part in ("engine", "structure"))
    if (engine, structure) != SERIAL or method.stop["_target_"] != rule["rule"]:
        return f"{name}: built otherwise than it was tuned, thresholds left out"
    if any(key == other or key.startswith(f"{other}.") for other in given):
        return f"{name}: {key}={OmegaConf.select(cfg, key)}, as given"
    folder = method.stop.get("checkpoint")
    if folder and checkpoint_hash(folder) != rule["checkpoint"]:
        return f"{name}: {folder} is not the checkpoint it was tuned with, thresholds left out"
    OmegaConf.update(cfg, key, choice["threshold"])
    low, high = choice["interval"]
    return f"{name}: {key}={choice['threshold']:.3g}, tuned: {choice['speedup']:.2f}x ({low:.2f}-{high:.2f}) modelled"


def _known(value: Any) -> Any:
    """A pair may be renamed: its fingerprints decide."""
    return {key: part for key, part in value.items() if key != "name"} if isinstance(value, Mapping) else value


def file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def checkpoint_hash(folder: str | Path) -> str:
    """Of the files that decide what a checkpoint predicts."""
    names = ("config.json", "calibration.json", "model.safetensors")
    return hashlib.sha256("".join(file_hash(Path(folder) / name) for name in names).encode()).hexdigest()[:16]
