"""Means over rows of prompts, with bootstrap intervals, as cells of a table."""

import math

from torch import Tensor

from predictors.reliability import mean_gap
from reports.figure import Cell


def mean(values: Tensor, group: Tensor) -> list[Cell]:
    """[mean, low, high] of values [n]; group: [n], the prompt of each. No interval for a single
    prompt."""
    return cells(mean_gap(values.double()[:, None], group, 0, signed=True))


def cells(estimate: list[float] | list[float | None]) -> list[Cell]:
    """NaN, and what JSON has for it, is an empty cell."""
    return [None if value is None or math.isnan(value) else value for value in estimate]
