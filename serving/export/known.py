"""What an engine can be told, and what is made of it."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from decoding.cost import CostTable
from serving.schedule import Schedule


@dataclass(frozen=True)
class Known:
    """What was given of it; None for what was not.

    calibration: `confidence_calibration.json`; thresholds: of tune.py; gamma: draft tokens at most;
    target, draft: models as the engine is told of them; folder: where the files will lie."""

    calibration: Mapping[str, Any] | None
    costs: CostTable | None
    schedule: Schedule | None
    thresholds: Mapping[str, Any] | None
    gamma: int | None
    target: str
    draft: str
    folder: str

    def file(self, name: str) -> str:
        """A file that is written, as a shell reads it."""
        return shlex.quote(f"{self.folder}/{name}")

    def draft_seconds(self) -> float | None:
        """Return the seconds of a whole draft."""
        if self.costs is None or self.gamma is None:
            return None
        return self.costs.draft * self.gamma


@dataclass
class Export:
    """files: by name, their text; launch: lines to paste; left_out: what was given and could not be
    carried over, or what a file says otherwise than it was given."""

    checked: str
    files: dict[str, str] = field(default_factory=dict)
    launch: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


class Engine(Protocol):
    def export(self, known: Known) -> Export: ...


def in_json(value: Any) -> str:
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def not_told(known: Known, **reasons: str) -> list[str]:
    """Lines about what was given of `reasons`, by name, and this engine has no place for."""
    return [
        f"{name}: {reason}" for name, reason in reasons.items() if getattr(known, name) is not None
    ]


def temperatures(known: Known) -> tuple[list[float], list[str]]:
    """One for each position, and what of the calibration they do not say."""
    found = known.calibration
    assert found is not None
    maps, lines = found["maps"], list[str]()
    freer = [n for n, one in enumerate(maps["positions"], 1) if one["bias"] or one["curves"]]
    if freer:
        lines.append(
            f"calibration: the maps of positions {', '.join(map(str, freer))} are no temperatures"
            f" ({found['method']}). The file has temperatures fitted"
            f" {found['temperatures_fitted']}, instead"
        )
    survival = maps["survival"]
    if (survival["scale"], survival["bias"], survival["depth"]) != (1.0, 0.0, 0.0):
        lines.append("calibration: the map of survival. The engine multiplies the probabilities")
    if found["note"]:
        lines.append(f"calibration: kept although {found['note']}")
    return list(found["temperatures"]), lines
