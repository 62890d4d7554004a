"""Write what a serving engine reads."""

import shlex
from os.path import expanduser
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig

from decoding.cost import read_cost
from evaluation.replay import thresholds
from predictors.confidences.maps import read_maps
from programs.serving.publish import publish
from runtime.errors import UserError
from runtime.files import checked_folder, file_hash, only_writer, refuse_foreign, replaced_folder
from runtime.json_files import write_checksummed
from runtime.text import printable
from serving.export.hub import Hub
from serving.export.known import Engine, Export, Known
from serving.schedule import read_schedule

MARKER = "export.json"


def main(cfg: DictConfig) -> None:
    """Files in, files of an engine out."""
    out = checked_folder("out", cfg.out)
    engine: Engine | Hub = instantiate(cfg.serving)
    if isinstance(engine, Hub):
        publish(engine, out, cfg.thresholds)
        return
    refuse_foreign(out, MARKER)
    name = str(HydraConfig.get().runtime.choices["serving"])
    command = shlex.join(["python", "scripts/export.py", *HydraConfig.get().overrides.task])
    made = engine.export(known(cfg))
    if not made.files:
        why = f" ({made.left_out[0]})" if made.left_out else ""
        raise UserError(
            f"serving: nothing that was given can be told {name}{why}. Give"
            " confidences=, costs=, schedule= or thresholds="
        )
    text = page(name, made, command)
    with only_writer(out), replaced_folder(out, MARKER) as folder:
        for file, content in made.files.items():
            (folder / file).write_text(content, encoding="utf-8")
        write_checksummed(folder / MARKER, facts(name, made, folder, command))
        (folder / "README.md").write_text(text + "\n", encoding="utf-8")
    print(f"{text}\n\nsaved in {out}")


def known(cfg: DictConfig) -> Known:
    """Raises UserError for files that are none, and for another gamma than that of
    `confidences`."""
    calibration = None if cfg.confidences is None else read_maps(cfg.confidences, "confidences")
    gamma = cfg.gamma
    if calibration is not None:
        if gamma not in (None, calibration["gamma"]):
            raise UserError(
                f"gamma: expected {calibration['gamma']}, as in {cfg.confidences}, got {gamma}."
                " Leave it out"
            )
        gamma = calibration["gamma"]
    found = None if cfg.thresholds is None else thresholds.read(Path(cfg.thresholds))
    return Known(
        calibration=calibration,
        costs=None if cfg.costs is None else read_cost(cfg.costs, "costs"),
        schedule=None if cfg.schedule is None else read_schedule(cfg.schedule),
        thresholds=found,
        gamma=gamma,
        target=expanduser(cfg.target_model),
        draft=expanduser(cfg.draft_model),
        folder=str(cfg.out),
    )


def facts(name: str, made: Export, folder: Path, command: str) -> dict[str, Any]:
    return {
        "serving": name,
        "checked_for": made.checked,
        "files": {file: file_hash(folder / file) for file in made.files},
        "launch": made.launch,
        "left_out": made.left_out,
        "command": command,
    }


def page(name: str, made: Export, command: str) -> str:
    lines = [f"- {printable(line)}." for line in made.left_out] or [
        "- Everything was carried over."
    ]
    launch = "\n".join(f"    {printable(line)}" for line in made.launch) or "    nothing"
    return "\n\n".join(
        [
            f"# Files for {name}, checked for {made.checked}",
            f"Files: {', '.join(made.files)}.",
            f"To start with:\n\n{launch}",
            "Not carried over, or said otherwise:\n\n" + "\n".join(lines),
            f"Made with: `{printable(command)}`",
        ]
    )
