"""The file of tuned thresholds: written by scripts/tune.py, read by scripts/evaluate.py."""

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from omegaconf import DictConfig, OmegaConf
from pydantic import AfterValidator, model_validator

from decoding.models.machine import DECIDES_COSTS
from predictors.base import read_config
from runtime.json_files import Length, OpenForm, digest, read_json, write_checksummed

FORMAT_VERSION = 4
KIND = "thresholds"  # in checksums: the file may be renamed
WEIGHTS = ("model.safetensors", "calibration.json")
NO_ADVICE = "do not speculate"


class Chosen(OpenForm):
    """The choice for a rule under one cost table: fields of `evaluation.replay.tuning.Choice`."""

    threshold: float
    speculate: bool
    speedup: float
    interval: tuple[float | None, float | None]


class Tuned(OpenForm):
    """The choices under one cost table."""

    advice: str
    rules: dict[str, Chosen]


class Rule(OpenForm):
    """A rule as it was replayed."""

    setting: str
    stop: dict[str, Any]
    checkpoint: str | None


class Data(OpenForm):
    """The harvest."""

    folder: str
    identity: str


class Thresholds(OpenForm):
    """The fields of the file that `evaluation.methods` reads."""

    version = ("format_version", FORMAT_VERSION)
    format_version: int
    pair: dict[str, Any]
    warp: dict[str, Any]
    draft_warp: dict[str, Any]
    cost: str
    gamma: Length
    measured_on: dict[str, Any] | None
    data: Data
    command: Annotated[str, AfterValidator(shlex.split)]
    rules: dict[str, Rule]
    results: dict[str, Tuned]
    checksum: str

    @model_validator(mode="after")
    def _speaks_of_one_thing(self) -> "Thresholds":
        lacking = self.results["chosen"].rules.keys() - self.rules.keys()
        if self.measured_on is not None:
            lacking |= set(DECIDES_COSTS) - self.measured_on.keys()
        if lacking:
            raise ValueError(f"nothing about {', '.join(sorted(lacking))}")
        return self


def write(path: Path, facts: Mapping[str, Any]) -> None:
    write_checksummed(path, {"format_version": FORMAT_VERSION, **facts}, KIND)


def read(path: Path) -> dict[str, Any]:
    """Read a file of `write`. Raises UserError for any other."""
    remedy = "Tune again: python scripts/tune.py"
    return read_json(path, Thresholds, "thresholds", remedy, KIND).written


def misfit(file: Mapping[str, Any], run: Mapping[str, Any]) -> str | None:
    """Return in which of pair, warp and draft_warp the file differs from the `run`, None if in
    none; a pair may be renamed."""

    def named(value: Any) -> Any:
        return {**value, "name": ""} if isinstance(value, Mapping) else value

    return next((key for key, value in run.items() if named(file[key]) != named(value)), None)


def command_anew(command: str, overrides: Iterable[str]) -> str:
    """Return the tuning command with measured costs, and with the pair of this run's
    `overrides`."""

    def of_pair(word: str) -> bool:
        return word.lstrip("+~").startswith(("pair=", "pair."))

    words = [word for word in shlex.split(command) if word != "cost=measured" and not of_pair(word)]
    return shlex.join([*words, *filter(of_pair, overrides)])


def rule_settings(stop: DictConfig, setting: str) -> dict[str, Any]:
    """Return a rule's settings without its threshold (the key `setting`, perhaps a nested one) and
    without the folder of its checkpoint."""
    settings = DictConfig(OmegaConf.to_container(stop, resolve=True))
    OmegaConf.update(settings, setting, None)
    settings.pop("checkpoint", None)
    resolved: Any = OmegaConf.to_container(settings)
    return dict(resolved)


def checkpoint_hash(folder: str | Path, key: str) -> str:
    """Return a hash of all that decides a checkpoint's predictions. Raises UserError naming `key`
    if there is no checkpoint."""
    config = read_config(Path(folder), key)
    decides = [config[name] for name in ("predictor", "settings", "inputs", "dim")]
    return digest([*decides, *(config["sha256"].get(name) for name in WEIGHTS)])[:16]
