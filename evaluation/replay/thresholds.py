"""The file of tuned thresholds: written by scripts/tune.py, read by scripts/evaluate.py."""

import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from decoding.models.machine import DECIDES_COSTS
from evaluation.replay.tuning import span
from predictors.base import damaged
from runtime.errors import UserError
from runtime.files import file_hash, write_json

FORMAT_VERSION = 3
NO_ADVICE = "do not speculate"


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
            return _whole(found)
        problem = f"format {found['format_version']}, this version reads {FORMAT_VERSION}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise UserError(
        f"thresholds: {path} cannot be read ({problem}). Tune again: python scripts/tune.py"
    )


def _whole(found: dict[str, Any]) -> dict[str, Any]:
    """`found`, if it holds what `evaluation.choices` reads; else a KeyError or TypeError."""
    chosen, _ = (
        found["results"]["chosen"],
        [
            found[key]
            for key in (
                "pair",
                "warp",
                "draft_warp",
                "cost",
                "gamma",
                "measured_on",
                "command",
                "data",
            )
        ],
    )
    for name, choice in {"advice": chosen["advice"], **chosen}["rules"].items():
        _ = [choice["threshold"] + choice["speedup"], span(choice["interval"]), choice["speculate"]]
        _ = [found["rules"][name][key] for key in ("setting", "stop", "checkpoint")]
    _ = [found["measured_on"][key] for key in DECIDES_COSTS] if found["measured_on"] else []
    return found


def misfit(found: Mapping[str, Any], run: Mapping[str, Any]) -> str | None:
    """What thresholds are for another one of. run: pair identity, warp and draft_warp."""
    return next((key for key, value in run.items() if _known(found[key]) != _known(value)), None)


def command_anew(command: str, overrides: Iterable[str]) -> str:
    """The command that has tuned, made to measure costs, with the pair as this run's `overrides`
    have it."""
    kept = [
        word
        for word in shlex.split(command)
        if word != "cost=measured" and not word.startswith(("pair=", "pair."))
    ]
    return shlex.join(
        [
            *kept,
            *(
                override
                for override in overrides
                if override.lstrip("+~").startswith(("pair=", "pair."))
            ),
        ]
    )


def rule_settings(stop: DictConfig, setting: str) -> dict[str, Any]:
    """Of a rule's config, all but its threshold (a key, perhaps a nested one) and the folder of its
    checkpoint."""
    settings = DictConfig(OmegaConf.to_container(stop, resolve=True))
    OmegaConf.update(settings, setting, None)
    settings.pop("checkpoint", None)
    found: Any = OmegaConf.to_container(settings)
    return dict(found)


def _known(value: Any) -> Any:
    """A pair may be renamed: its fingerprints decide."""
    return (
        {key: part for key, part in value.items() if key != "name"}
        if isinstance(value, Mapping)
        else value
    )


def checkpoint_hash(folder: str | Path, key: str) -> str:
    """Of the files that decide what a checkpoint predicts. Raises UserError naming `key` where one
    is missing."""
    try:
        hashes = [
            file_hash(Path(folder) / name)
            for name in ("config.json", "calibration.json", "model.safetensors")
        ]
    except OSError as error:
        raise damaged(Path(folder), key, "<its predictor>", error) from error
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]
