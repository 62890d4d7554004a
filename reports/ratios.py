"""Ratios of what traces count, with bootstrap intervals over prompts.

A ratio is one of sums over requests."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from decoding.trace import Trace
from runtime.intervals import Array, Estimate, bootstrap

Count = Callable[[Trace], float]
Sums = Mapping[tuple[str, str], Sequence[float]]
"""What is counted, by dataset and prompt."""


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
    return estimate(counted(traces, above, below), lambda sums: divided(sums[..., 0], sums[..., 1]))


def compared(ours: Sums, theirs: Sums, statistic: Callable[[Array, Array], Any]) -> Estimate:
    """A statistic of two methods' sums [..., k] on the prompts both have; the same prompts are
    drawn for both."""
    shared = [prompt for prompt in ours if prompt in theirs]
    width = len(ours[shared[0]])
    both = {prompt: [*ours[prompt], *theirs[prompt]] for prompt in shared}
    return estimate(both, lambda sums: statistic(sums[..., :width], sums[..., width:]))


def estimate(sums: Sums, statistic: Callable[[Array], Any], seed: int = 0) -> Estimate:
    """statistic: of sums [..., k] over prompts, one value for each."""
    table = np.array(list(sums.values()), dtype=np.float64)
    return bootstrap(lambda times: statistic(times @ table), len(table), seed)


def divided(above: Any, below: Any) -> Any:
    """0 where `below` is 0."""
    above, below = np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)
