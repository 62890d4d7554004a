"""Seconds per forward, measured: what modelled speed-ups are priced with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from torch import Tensor

from decoding.lm import LM


@dataclass(frozen=True)
class MeasuredCost:
    """rows: increasing; seconds: of one forward with so many, medians. Linear in between, constant outside."""

    rows: Sequence[int]
    seconds: Sequence[float]

    def __call__(self, rows: int) -> float:
        return float(np.interp(rows, self.rows, self.seconds))


@torch.inference_mode()
def measure_cost(
    lm: LM, context: Tensor, rows: Sequence[int], repeats: int, advance: Callable[[], object] = lambda: None
) -> MeasuredCost:
    """Time tree forwards of so many `rows` after `context` [n] (all rows siblings; the mask's pattern costs nothing).

    The row counts take turns, so that drift of the machine hits all of them alike.
    """
    lm.reset()
    lm.forward(context, logits="none")
    times: dict[int, list[float]] = {count: [] for count in rows}
    for repeat in range(repeats + 1):
        for count in rows:
            before = lm.seconds
            lm.forward(context[-1:].expand(count), torch.full((count,), -1))
            lm.crop(len(context))
            if repeat > 0:  # the first turn warms up
                times[count].append(lm.seconds - before)
            advance()
    return MeasuredCost(list(rows), [median(times[count]) for count in rows])
