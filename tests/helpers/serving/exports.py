"""What an engine is told of, made up."""

from dataclasses import asdict
from typing import Any

from decoding.cost import cost_table
from predictors.calibration import Calibration
from predictors.confidences.maps import PositionMaps, of_temperatures
from predictors.survival import Survival
from serving.export.base import Given
from serving.schedule import Range, Schedule

SCHEDULE = Schedule((Range(1, 4, 3), Range(5, 8, 2), Range(9, 32, 0)))
COSTS = cost_table(0.002, {1: 0.02, 4: 0.024, 8: 0.0275})
TEMPERATURES = [1.5, 2.0, 0.5]
CURVES = PositionMaps(
    (
        Calibration("temperature", scale=(0.5, 0.5)),
        Calibration("platt", scale=(0.5, 0.5), bias=(0.0, 0.25)),
        Calibration("isotonic", curves=(((-1.0, 1.0), (0.25, 0.75)),)),
    ),
    Survival(0.75, 0.125, -0.5),
)
STS = {"lowest": 0.05, "highest": 20.0, "points": 256, "with_one": True, "bins": 20}


def calibration(maps: PositionMaps | None = None, **changed: Any) -> dict[str, Any]:
    """As `read_maps` gives it."""

    def errors(value: float) -> dict[str, list[float]]:
        return {error: [value, value / 2, value * 2] for error in ("deepspec", "sglang")}

    positions = []
    for n in (1, 2, 3):
        stages = {"as logged": errors(n / 16), "fitted here": errors(n / 64)}
        positions.append({"position": n, "rows": 1000, "accepted": 0.5, "stages": stages})
    return {
        "method": "sts" if maps is None else "isotonic",
        "gamma": 3,
        "maps": asdict(maps or of_temperatures(TEMPERATURES)),
        "temperatures": TEMPERATURES,
        "temperatures_fitted": "sequential, on the survival",
        "accepted": [0.75, 0.5, 0.25],
        "proposals": 1000,
        "note": "",
        "sts": STS if maps is None else None,
        "scores": {"data/served": {"chat": {"positions": positions}}},
        "data": {"folder": "data/served", "domains": ["chat"]},
        **changed,
    }


def thresholds(**rules: Any) -> dict[str, Any]:
    return {"results": {"chosen": {"advice": "x", "rules": rules}}}


def told(**changed: Any) -> Given:
    """Everything there is, but for what is changed."""
    tuned = {"threshold": 0.375, "speculate": True, "speedup": 1.5, "interval": (1.25, 1.75)}
    given = {
        "calibration": calibration(),
        "costs": COSTS,
        "schedule": SCHEDULE,
        "thresholds": thresholds(confidence=tuned),
        "gamma": 3,
        "target": "org/target",
        "draft": "org/draft",
        "folder": "runs/export",
    }
    return Given(**{**given, **changed})
