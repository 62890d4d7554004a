"""Sequential temperature scaling, as the engines fit it: one temperature per position, in order,
each chosen so that the survival up to that position is calibrated."""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from predictors.confidences.table import Confidences
from runtime.settings.kinds import Field, Positive

EPS = 1e-8


@dataclass(frozen=True)
class Sts:
    """Fits c_i = sigmoid(z_i / T_i). T_i minimises over a grid, given the temperatures before it,
    the expected calibration error of c_1 ... c_i against the label of the prefix. The first minimum
    is taken."""

    lowest: Annotated[Positive, "temperature tried"]
    highest: Annotated[Positive, "temperature tried"]
    points: Annotated[int, Field(ge=2, le=10000), "temperatures tried, evenly spaced in logarithm"]
    with_one: Annotated[bool, "try 1 as well, which leaves the confidence as it is"]
    bins: Annotated[int, Field(ge=1, le=1000), "of the calibration error, of equal width"]

    def grid(self) -> Tensor:
        """Return the temperatures tried, float64, ascending."""
        lowest, highest = math.log10(self.lowest), math.log10(self.highest)
        # in float32, as the engines make it
        grid = torch.logspace(lowest, highest, steps=self.points).double()
        return torch.cat([grid, torch.ones(1).double()]).unique() if self.with_one else grid

    def __call__(self, rows: Confidences) -> list[float]:
        """Return a temperature for each position of `rows`."""
        temperatures, survival = list[float](), torch.ones(len(rows.logits), dtype=torch.float64)
        for position in range(rows.gamma):
            counts = rows.counts(position)
            z, labels = rows.logits[counts, position], rows.labels[counts, position]
            before = survival[counts]
            errors = [
                equal_width_ece(before * torch.sigmoid(z / t), labels, self.bins)
                for t in self.grid().tolist()
            ]
            best = self.grid()[errors.index(min(errors))].item() if len(z) else 1.0
            survival = survival * torch.sigmoid(rows.logits[:, position] / best)
            temperatures.append(best)
        return temperatures


def equal_width_ece(predicted: Tensor, labels: Tensor, bins: int) -> float:
    """Return the expected calibration error as engines define it: both [n], bins of equal width,
    weighted by their rows. NaN of none."""
    cell = width_bins(predicted, bins)
    gaps = torch.zeros(bins, dtype=torch.float64)
    gaps.index_add_(0, cell, _inside(predicted) - labels.double())
    return float(gaps.abs().sum()) / len(labels) if len(labels) else math.nan


def width_bins(predicted: Tensor, bins: int) -> Tensor:
    """Return the bin of each prediction, of equal widths, [n]."""
    return (_inside(predicted) * bins).long().clamp(0, bins - 1)


def _inside(predicted: Tensor) -> Tensor:
    return predicted.double().clamp(EPS, 1 - EPS)
