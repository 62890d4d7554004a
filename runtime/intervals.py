"""Ratios of what traces count, with 95 % bootstrap intervals over prompts.

A ratio is one of sums over requests. Requests of one prompt depend on each other, so resamples draw
whole prompts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoding.trace import Trace
from evaluation.replay.tuning import RESAMPLES

Array = NDArray[np.float64]
Count = Callable[[Trace], float]
Sums = Mapping[tuple[str, str], Sequence[float]]
"""What is counted, by dataset and prompt."""
METHOD = "95 % bootstrap intervals over prompts"


class Estimate(NamedTuple):
    """low, high: None where there is nothing to resample."""

    value: float
    low: float | None = None
    high: float | None = None


def columns(name: str) -> list[str]:
    """Of an estimate in a table."""
    return [name, f"{name} low", f"{name} high"]


def counted(traces: Sequence[Trace], *counts: Count) -> Sums:
    """Sums over the requests of each prompt."""
    found: dict[tuple[str, str], list[float]] = {}
    for trace in traces:
        sums = found.setdefault((trace.dataset, trace.prompt_id), [0.0] * len(counts))
        for place, count in enumerate(counts):
            sums[place] += count(trace)
    return found


def ratio(traces: Sequence[Trace], above: Count, below: Count) -> Estimate:
    """0 where nothing is counted below."""
    return bootstrap(
        counted(traces, above, below), lambda sums: divided(sums[..., 0], sums[..., 1])
    )


def compared(ours: Sums, theirs: Sums, statistic: Callable[[Array, Array], Any]) -> Estimate:
    """A statistic of two methods' sums [..., k] on the prompts both have; the same prompts are
    drawn for both."""
    shared = [prompt for prompt in ours if prompt in theirs]
    width = len(ours[shared[0]])
    both = {prompt: [*ours[prompt], *theirs[prompt]] for prompt in shared}
    return bootstrap(both, lambda sums: statistic(sums[..., :width], sums[..., width:]))


def bootstrap(sums: Sums, statistic: Callable[[Array], Any], seed: int = 0) -> Estimate:
    """statistic: of sums [..., k] over prompts, one value for each."""
    table = np.array(list(sums.values()), dtype=np.float64)
    value = float(statistic(table.sum(0)))
    prompts = len(table)
    if prompts < 2:
        return Estimate(value)
    drawn = np.random.default_rng(seed).multinomial(
        prompts, np.full(prompts, 1 / prompts), size=RESAMPLES
    )
    low, high = np.quantile(statistic(drawn @ table), (0.025, 0.975))
    return Estimate(value, float(low), float(high))


def divided(above: Any, below: Any) -> Any:
    """0 where `below` is 0."""
    above, below = np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)
