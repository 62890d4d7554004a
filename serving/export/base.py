"""Inputs and results of an export for a serving engine, and their description."""

import json
import pathlib
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

from decoding.cost import CostTable
from runtime.files import file_hash
from runtime.settings.kinds import Path, Text
from runtime.text import printable
from serving.schedule import Schedule

MARKER = "export.json"


@dataclass(frozen=True)
class Given:
    """The inputs of an export; None for those not given.

    calibration: `confidence_calibration.json`; thresholds: of tune.py; gamma: most draft tokens;
    target, draft: models as named to the engine; folder: where the files will lie."""

    calibration: Mapping[str, Any] | None
    costs: CostTable | None
    schedule: Schedule | None
    thresholds: Mapping[str, Any] | None
    gamma: int | None
    target: str
    draft: str
    folder: str

    def file(self, name: str) -> str:
        """Return the path of a written file, quoted for a shell."""
        return shlex.quote(f"{self.folder}/{name}")

    def left_out(self, **reasons: str) -> list[str]:
        """Return a line for each given input among `reasons`, which this engine cannot use."""
        return [
            f"{name}: {why}" for name, why in reasons.items() if getattr(self, name) is not None
        ]


@dataclass
class Export:
    """The result of an export. checked: version of the engine for which the files were checked;
    files: by name, their text or what writes them; launch: lines to paste; left_out: inputs that
    could not be carried over, or only with changes."""

    checked: str
    files: dict[str, str | Callable[[pathlib.Path], None]] = field(default_factory=dict)
    launch: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add_json(self, name: str, content: Any) -> None:
        self.files[name] = json.dumps(content, indent=2, allow_nan=False) + "\n"

    def facts(self, name: str, folder: pathlib.Path, command: str) -> dict[str, Any]:
        """Return the content of the file `MARKER` for an export for engine `name`, written to
        `folder`."""
        return {
            "serving": name,
            "checked_for": self.checked,
            "files": {file: file_hash(folder / file) for file in self.files},
            "launch": self.launch,
            "left_out": self.left_out,
            "command": command,
        }

    def answer(self, name: str) -> str:
        """Say how to start the engine, and how much could not be carried over."""
        started = "; ".join(map(printable, self.launch)) or "as before"
        count = len(self.left_out)
        lost = f"{count} things were not carried over" if count else "Nothing lost"
        return f"Start {name} (checked for {self.checked}): {started}\n{lost}; README.md says more."

    def page(self, name: str, command: str) -> str:
        lines = [f"- {printable(line)}." for line in self.left_out]
        launch = "\n".join(f"    {printable(line)}" for line in self.launch) or "    nothing"
        return "\n\n".join(
            [
                f"# Files for {name}, checked for {self.checked}",
                f"Files: {', '.join(self.files)}.",
                f"To start with:\n\n{launch}",
                "Not carried over, or said otherwise:\n\n"
                + ("\n".join(lines) or "- Everything was carried over."),
                f"Made with: `{printable(command)}`",
            ]
        )


class Engine(Protocol):
    def export(self, given: Given) -> Export: ...


@dataclass(frozen=True)
class Hub:
    """A folder for the Hugging Face hub, made from a predictor's checkpoint; unlike engines, it has
    no model to serve."""

    checkpoint: Annotated[Path, "folder that train.py has made"]
    repository: Annotated[Text | None, "owner/name on the hub; null: only the folder is made"]
    private: Annotated[bool, "whether a repository that is made is private"]


def temperatures(calibration: Mapping[str, Any]) -> tuple[list[float], list[str]]:
    """Return one temperature for each position, and lines on what they leave out of the
    calibration."""
    maps, lines = calibration["maps"], list[str]()
    freer = [str(n) for n, x in enumerate(maps["positions"], 1) if x["bias"] or x["curves"]]
    if freer:
        lines.append(
            f"calibration: the maps of positions {', '.join(freer)} are no temperatures"
            f" ({calibration['method']}). The file has temperatures fitted"
            f" {calibration['temperatures_fitted']}, instead"
        )
    survival = maps["survival"]
    if (survival["scale"], survival["bias"], survival["depth"]) != (1.0, 0.0, 0.0):
        lines.append("calibration: the map of survival. The engine multiplies the probabilities")
    if calibration["note"]:
        lines.append(f"calibration: kept although {calibration['note']}")
    return list(calibration["temperatures"]), lines


def calibration_errors(calibration: Mapping[str, Any], definition: str) -> list[list[float]]:
    """Return the calibration errors of each position by an engine's definition, as logged and after
    each stage."""
    domains = next(iter(calibration["scores"].values()))
    positions = next(iter(domains.values()))["positions"]
    return [[v[definition][0] for v in position["stages"].values()] for position in positions]
