"""The file of tuned thresholds: written by scripts/tune.py, read by scripts/evaluate.py."""

import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from decoding.models.machine import DECIDES_COSTS, other_machine
from evaluation.replay.decoding import REPLAYED
from evaluation.replay.tuning import span
from evaluation.tables import BASELINE
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
    """`found`, if it holds what `apply` reads; else a KeyError or TypeError."""
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


def apply(
    cfg: DictConfig, found: Mapping[str, Any], overrides: Sequence[str], here: Mapping[str, Any]
) -> list[str]:
    """Set the tuned thresholds in `cfg.method` and say which, a line each; and whether they were
    tuned for another machine than `here` (`setup_facts`). A method that no threshold makes worth
    its draft becomes plain decoding, draft and its prefill left out. overrides: of the command
    line; what they set wins."""
    chosen, names = found["results"]["chosen"], tuned(cfg, found)
    rules = {
        name: {**found["rules"][name], **chosen["rules"][name], "gamma": found["gamma"]}
        for name in names
    }
    lines = [_apply_one(cfg, name, rule, keys(overrides)) for name, rule in rules.items()]
    lines = [
        (
            f"thresholds: {cfg.thresholds}, for cost {found['cost']}, whose advice is:"
            f" {chosen['advice']}"
        ),
        *lines,
    ]
    other = other_machine(found["measured_on"], here) if found["measured_on"] else None
    if other:
        anew = command_anew(found["command"], overrides)
        lines.append(
            f"warning: {cfg.thresholds} was tuned on another machine: {other}. Tune anew: {anew}"
        )
    return lines


def tuned(cfg: DictConfig, found: Mapping[str, Any]) -> list[str]:
    """The methods of this run that have a tuned threshold; fixed lengths are chosen in a pass of
    their own."""
    return [
        name
        for name in found["results"]["chosen"]["rules"]
        if name in cfg.methods and name != "fixed"
    ]


def keys(overrides: Iterable[str]) -> list[str]:
    """What they set."""
    return [override.split("=")[0].lstrip("+~").split("@")[-1] for override in overrides]


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


def _apply_one(cfg: DictConfig, name: str, rule: Mapping[str, Any], given: list[str]) -> str:
    """rule: what was tuned, and what was found."""
    method, key = cfg.method[name], f"method.{name}.stop.{rule['setting']}"
    if not _as_tuned(method, rule):
        return f"{name}: built otherwise than it was tuned, thresholds left out"
    if any(key == other or key.startswith(f"{other}.") for other in given):
        return f"{name}: {key}={OmegaConf.select(cfg, key)}, as given"
    folder = method.stop.get("checkpoint")
    if folder and checkpoint_hash(folder, f"method.{name}.stop.checkpoint") != rule["checkpoint"]:
        return f"{name}: {folder} is not the checkpoint it was tuned with, thresholds left out"
    chosen = f"{key}={rule['threshold']:.3g}"
    speed = f"{rule['speedup']:.3f}x ({span(rule['interval'])}) modelled"
    if not rule["speculate"]:
        OmegaConf.update(cfg, f"method.{name}", cfg.method[BASELINE], merge=False)
        return f"{name}: {NO_ADVICE}, tuned: the best, {chosen}, is {speed}"
    OmegaConf.update(cfg, key, rule["threshold"])
    return f"{name}: {chosen}, tuned: {speed}"


def _as_tuned(method: DictConfig, rule: Mapping[str, Any]) -> bool:
    """Whether a method is what was replayed: chains, verified token by token, and a rule of the
    same settings."""
    parts = {part: method.get(part, {}).get("_target_") for part in REPLAYED}
    if parts != REPLAYED or method.structure.gamma_max < rule["gamma"]:
        return False
    return rule_settings(method.stop, rule["setting"]) == rule["stop"]


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
        raise damaged(Path(folder), key, "specdecpp (or hrad)", error) from error
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]
