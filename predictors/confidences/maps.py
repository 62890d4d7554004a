"""From logged confidences to probabilities: a map per position, and what is made of them
together."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import with_config
from torch import Tensor

from predictors.calibration import Calibration, Fit, calibrate, fit_temperature
from predictors.confidences.sts import Sts
from predictors.confidences.table import Confidences
from predictors.survival import CLIP, Prefixes, Survival, counted, fit_survival
from runtime.json_files import STRICT, Form, Length, read_json

FILE = "confidence_calibration.json"


@with_config(STRICT)
@dataclass(frozen=True)
class PositionMaps:
    """c_i = P(token i is accepted, if those before it are), by a `Calibration` of (0, z_i) for each
    position; survival: what is made of c_1 ... c_i, by default the product."""

    positions: tuple[Calibration, ...]
    survival: Survival = Survival()

    def conditional(self, logits: Tensor) -> Tensor:
        """[n, gamma] -> c_i, [n, gamma]."""
        columns = [each.apply(two(logits[:, i]))[:, 1] for i, each in enumerate(self.positions)]
        return torch.stack(columns, 1)

    def surviving(self, logits: Tensor) -> Tensor:
        """[n, gamma] -> P(the first i tokens are accepted), [n, gamma]."""
        return self.survival(self.conditional(logits))

    def temperatures(self) -> list[float] | None:
        """T_i, if c_i = sigmoid(z_i / T_i) everywhere; None where a position has another map."""
        if any(one.bias or one.curves or one.offset for one in self.positions):
            return None
        return [1 / one.scale[0] if one.scale else 1.0 for one in self.positions]


def two(z: Tensor) -> Tensor:
    """Log-odds [n] as the logits [n, 2] of two classes."""
    return torch.stack([torch.zeros_like(z), z], 1)


def of_temperatures(temperatures: list[float]) -> PositionMaps:
    return PositionMaps(
        tuple(Calibration("temperature", scale=(1 / t, 1 / t)) for t in temperatures)
    )


def fit_maps(rows: Confidences, fit: Fit | None, sts: Sts | None, survival: bool) -> PositionMaps:
    """Of every position as `calibrate` keeps it: what was accepted there among the proposals that
    were accepted up to there. With `sts`, its temperatures. survival: fit what is made of them,
    too, which is kept where it helps on other groups."""
    if sts is not None:
        return of_temperatures(sts(rows))
    found = PositionMaps(tuple(_fitted(rows, i, fit) for i in range(rows.gamma)))
    if not survival:
        return found
    return PositionMaps(found.positions, fit_survival(prefixes(rows, found)))


def conditional_temperatures(rows: Confidences) -> list[float]:
    """A temperature for each position, of lowest cross-entropy among the proposals that were
    accepted up to there; 1 where there is nothing to learn from."""
    found = []
    for position in range(rows.gamma):
        logits, targets, _ = reached(rows, position)
        learn = bool((targets.sum(0) > 0).all())
        found.append(1 / fit_temperature(logits, targets).scale[0] if learn else 1.0)
    return found


def reached(rows: Confidences, position: int) -> tuple[Tensor, Tensor, Tensor]:
    """Proposals that may have come to `position`: logits [m, 2], targets [m, 2] (rejected, accepted
    there) times the probability that they came, group [m]."""
    came = rows.before()[:, position]
    kept = rows.counts(position) & (came > 0)
    accepted = rows.labels[kept, position]
    targets = torch.stack([(came[kept] - accepted).clamp_min(0), accepted], 1)
    return two(rows.logits[kept, position]), targets, rows.group[kept]


def prefixes(rows: Confidences, maps: PositionMaps) -> Prefixes:
    """Every prefix that counts, by the product of what `maps` say."""
    said = maps.conditional(rows.logits).cumprod(1)
    return counted(said, rows.labels, rows.length, rows.group)


def accepted_length_loss(rows: Confidences, survival: Tensor) -> Tensor:
    """[n], - log of the probability that a predicted survival [n, gamma] gives to how many tokens
    were accepted: a proper score of all positions together, of expected labels their mean."""
    before = torch.cat([torch.ones_like(survival[:, :1]), survival[:, :-1]], 1)
    c = (survival / before.clamp_min(1e-30)).clamp(CLIP, 1 - CLIP)
    rejected = (rows.before() - rows.labels).clamp_min(0)
    each = -rows.labels * c.log() - rejected * (1 - c).log()
    counts = torch.arange(rows.gamma) < rows.length[:, None]
    return (each * counts).sum(1)


def _fitted(rows: Confidences, position: int, fit: Fit | None) -> Calibration:
    logits, targets, group = reached(rows, position)
    if not len(logits):
        return Calibration(note="nothing fitted: no proposal came so far")
    return calibrate(fit, logits, targets, group)


# In a file ----------------------------------------------------------------------------------------


class MapsFile(Form):
    """method: name of the config it was fitted with; temperatures: of the nearest map that is one
    temperature per position, and how they were fitted; accepted: mean label of every prefix."""

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
    """The file of a calibration that train.py has made of imported confidences."""
    remedy = "Make it: python train.py calibration=sts data=<imported>"
    return read_json(Path(folder) / FILE, MapsFile, key, remedy).written
