"""95 % bootstrap intervals over groups of what was observed: prompts, requests, rounds.

Observations of one group (the requests of one prompt) depend on each other, so a resample draws
whole groups with replacement."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
RESAMPLES = 1000
METHOD = "95 % bootstrap intervals over prompts"


class Estimate(NamedTuple):
    """A value and its 95 % interval. low, high: None where there is nothing to resample."""

    value: float
    low: float | None = None
    high: float | None = None


def columns(name: str) -> list[str]:
    """Return the columns of an estimate in a table."""
    return [name, f"{name} low", f"{name} high"]


def bootstrap(
    statistic: Callable[[NDArray[Any]], Any], groups: int, seed: int = 0, pivotal: bool = False
) -> Estimate:
    """Return a statistic and the interval between its 2.5 % and 97.5 % quantiles over `RESAMPLES`.

    statistic: maps `times` [..., groups], how often each group is drawn, to one value for each set
        of draws; the estimate is its value where each group is drawn once
    pivotal: mirror the interval about the value (2 value - upper quantile, 2 value - lower
        quantile), for a statistic that noise makes larger, such as an absolute difference
    """
    value = float(statistic(np.ones(groups, dtype=np.int64)))
    if groups < 2:
        return Estimate(value)
    low, high = np.quantile(statistic(draws(groups, seed)), (0.025, 0.975))
    if pivotal:
        low, high = 2 * value - high, 2 * value - low
    return Estimate(value, float(low), float(high))


def draws(groups: int, seed: int) -> NDArray[np.int64]:
    """Return [RESAMPLES, groups]: how often each resample draws each group."""
    share = np.full(groups, 1 / groups)
    return np.random.default_rng(seed).multinomial(groups, share, size=RESAMPLES)


def drawn(values: Array, times: NDArray[np.int64]) -> Array:
    """Return values [groups], each repeated as often as `times` [..., groups] says, as
    [..., groups]."""
    each = np.broadcast_to(values, times.shape).ravel()
    return np.repeat(each, times.ravel()).reshape(times.shape)
