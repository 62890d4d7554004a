"""Maps from logged confidences to acceptance probabilities per position, and to the survival of
prefixes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import with_config
from torch import Tensor

from predictors.calibration import Calibration, Fit, calibrate, fit_temperature
from predictors.confidences.sts import Sts
from predictors.confidences.table import Confidences
from predictors.survival import CLIP, Survival, counted, fit_survival
from runtime.json_files import STRICT, Form, Length, read_json

FILE = "confidence_calibration.json"


@with_config(STRICT)
@dataclass(frozen=True)
class PositionMaps:
    """Maps to c_i = P(token i is accepted | those before it are), a `Calibration` of (0, z_i) for
    each position. survival: the map from c_1 ... c_i to survival, by default the product."""

    positions: tuple[Calibration, ...]
    survival: Survival = Survival()

    def conditional(self, logits: Tensor) -> Tensor:
        """Return c_i of logits, both [n, gamma]."""
        columns = [each.apply(two(logits[:, i]))[:, 1] for i, each in enumerate(self.positions)]
        return torch.stack(columns, 1)

    def surviving(self, logits: Tensor) -> Tensor:
        """Return P(the first i tokens are accepted) of logits, both [n, gamma]."""
        return self.survival(self.conditional(logits))

    def temperatures(self) -> list[float] | None:
        """Return T_i if c_i = sigmoid(z_i / T_i) everywhere, None where a position has another
        map."""
        if any(each.bias or each.curves or each.offset for each in self.positions):
            return None
        return [1 / each.scale[0] if each.scale else 1.0 for each in self.positions]


def two(z: Tensor) -> Tensor:
    """Return log-odds [n] as the logits [n, 2] of two classes."""
    return torch.stack([torch.zeros_like(z), z], 1)


def of_temperatures(temperatures: list[float]) -> PositionMaps:
    """Return the maps c_i = sigmoid(z_i / T_i)."""
    scales = [1 / t for t in temperatures]
    return PositionMaps(tuple(Calibration("temperature", scale=(s, s)) for s in scales))


def fit_maps(rows: Confidences, fit: Fit | None, sts: Sts | None, survival: bool) -> PositionMaps:
    """Fit a map for every position, as `calibrate` does, to the verdicts on the proposals that were
    accepted up to there; with `sts`, use its temperatures instead.

    survival: also fit the `Survival` of their product, which is kept if it helps on other
    groups."""
    if sts is not None:
        return of_temperatures(sts(rows))
    positions = []
    for position in range(rows.gamma):
        logits, targets, group = reached(rows, position)
        empty = Calibration(note="nothing fitted: no proposal came so far")
        positions.append(calibrate(fit, logits, targets, group) if len(logits) else empty)
    maps = PositionMaps(tuple(positions))
    if not survival:
        return maps
    products = maps.conditional(rows.logits).cumprod(1)
    prefixes = counted(products, rows.labels, rows.length, rows.group)
    return PositionMaps(maps.positions, fit_survival(prefixes))


def conditional_temperatures(rows: Confidences) -> list[float]:
    """Return for each position the temperature of lowest cross-entropy on the proposals that were
    accepted up to there; 1 where there are none."""
    temperatures = []
    for position in range(rows.gamma):
        logits, targets, _ = reached(rows, position)
        learn = bool((targets.sum(0) > 0).all())
        temperatures.append(1 / fit_temperature(logits, targets).scale[0] if learn else 1.0)
    return temperatures


def reached(rows: Confidences, position: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the proposals that may have reached `position`: logits [m, 2], targets [m, 2]
    (rejected, accepted there) times the probability that they did, group [m]."""
    came = rows.before()[:, position]
    kept = rows.counts(position) & (came > 0)
    accepted = rows.labels[kept, position]
    targets = torch.stack([(came[kept] - accepted).clamp_min(0), accepted], 1)
    return two(rows.logits[kept, position]), targets, rows.group[kept]


def accepted_length_loss(rows: Confidences, survival: Tensor) -> Tensor:
    """Return the log loss [n] of the accepted length under a predicted survival [n, gamma]: a
    proper score of all positions together; its mean where labels are probabilities."""
    before = torch.cat([torch.ones_like(survival[:, :1]), survival[:, :-1]], 1)
    c = (survival / before.clamp_min(1e-30)).clamp(CLIP, 1 - CLIP)
    rejected = (rows.before() - rows.labels).clamp_min(0)
    each = -rows.labels * c.log() - rejected * (1 - c).log()
    counts = torch.arange(rows.gamma) < rows.length[:, None]
    return (each * counts).sum(1)


def as_logged(rows: Confidences) -> Tensor:
    """Return the survival that the uncalibrated logits predict, [n, gamma]."""
    return torch.sigmoid(rows.logits).cumprod(1)


# In a file ----------------------------------------------------------------------------------------


class MapsFile(Form):
    """The form of a calibration file. method: name of the config it was fitted with; temperatures:
    those of the nearest map with one temperature per position, and how they were fitted; accepted:
    mean label of every prefix."""

    version: ClassVar[tuple[str, int] | None] = ("schema_version", 1)
    schema_version: int
    method: str
    gamma: Length
    maps: PositionMaps
    temperatures: list[float]
    temperatures_fitted: str
    accepted: list[float]
    proposals: Length
    groups: Length
    kept: bool
    note: str
    sts: dict[str, Any] | None
    scores: dict[str, Any]
    data: dict[str, Any]
    command: str
    checksum: str


def read_maps(folder: str | Path, key: str = "calibration") -> dict[str, Any]:
    """Return the calibration file that train.py has written for imported confidences."""
    remedy = "Make it: python train.py calibration=sts data=<imported>"
    return read_json(Path(folder) / FILE, MapsFile, key, remedy).written
