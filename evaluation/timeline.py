"""Modelled time of traces: that of the same decode with draft and target on one device each.

Counts are those of the run that was traced, seconds those of a cost table; drawing, verification
and the stop rule cost nothing. Prefill is left out. Every figure from here is *modelled*."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from decoding.cost import measure_cost
from decoding.interfaces import Pair
from decoding.trace import RoundTrace, StageTrace, Trace
from evaluation.table import BASELINE, MODELLED, target_rows

TABLES = ("measured", "pipeline")
"""Cost tables that are no ratios; pipeline: a target on two devices."""
COST_ROWS, COST_REPEATS = (1, 2, 3, 4, 6, 9, 17, 33), 5
Seconds = Callable[[int], float]
"""Seconds of one forward by its number of rows."""


@dataclass(frozen=True)
class Devices:
    """Seconds of one forward of each model, alone on its device.

    pipeline: the target is split over two devices, and the draft runs on the half that is idle
        (SpecBranch, appendix G.1); moving it from one to the other costs nothing. The draft's own
        stages are as they are.
    """

    draft: Seconds
    target: Seconds
    pipeline: bool = False

    @classmethod
    def of_ratio(cls, c: float) -> "Devices":
        """Return the papers' simplification: c = T_p / T_q for any number of rows, in units of a
        draft forward."""
        return cls(lambda rows: 1.0, lambda rows: c)


def modelled_seconds(trace: Trace, devices: Devices) -> float:
    """Return the modelled seconds of the whole decode, prefill excluded."""
    return sum(_seconds(round_, devices) for round_ in trace.rounds)


def _seconds(round_: RoundTrace, devices: Devices) -> float:
    """Return the seconds of a round: in turn, the sum over both models, with a draft's tokens
    divided evenly among its forwards; side by side, the draft stage plus the longer of both."""
    stages, target = round_.overlap, devices.target(target_rows(round_))
    nodes, forwards = len(round_.draft_tokens), round_.draft_forwards
    if stages is None:
        rows = -(-nodes // forwards) if forwards else 0
        return forwards * devices.draft(max(1, rows)) + target
    alone, half = stages.alone * devices.draft(1), target / 2
    steps = [devices.draft(rows) for rows in branch_rows(stages, forwards - stages.alone)]
    if not devices.pipeline:
        return alone + max(sum(steps), target)
    cuts = range(len(steps) + 1)
    return alone + min(max(half, sum(steps[:n])) + max(half, sum(steps[n:])) for n in cuts)


def branch_rows(stages: StageTrace, forwards: int) -> list[int]:
    """Return the rows of each of the `forwards` of a branch stage: first the tip's, if it has not
    been run yet, then those of the branches that still grow."""
    longest = max(map(len, stages.branches), default=0)
    growing = [
        sum(len(branch) > depth for branch in stages.branches) for depth in range(1, longest)
    ]
    return [1] * (forwards - len(growing)) + growing


# Cost tables by name ------------------------------------------------------------------------------


def priced(
    measurements: pd.DataFrame,
    traces: Mapping[str, Sequence[Trace]],
    names: Sequence[Any],
    pair: Pair,
    prompts: Sequence[Tensor],
) -> pd.DataFrame:
    """Return the table of these traces with a column `modelled <name>` for each cost table:
    seconds, or draft forwards, if draft and target had a device each.

    names: measured, pipeline, or speed ratios; prompts [n]: those of the first traces of plain
    decoding."""
    devices = {f"c={c:g}": Devices.of_ratio(c) for c in names if c not in TABLES}
    decoded = [trace for policy in traces.values() for trace in policy]
    if asked := [name for name in TABLES if name in names]:
        plain = zip(prompts, traces[BASELINE], strict=False)
        texts = sorted(([*prompt.tolist(), *trace.tokens] for prompt, trace in plain), key=len)
        widest = max(target_rows(round_) for trace in decoded for round_ in trace.rounds)
        here = measured_devices(pair, texts[len(texts) // 2], widest)
        devices = {name: replace(here, pipeline=name == "pipeline") for name in asked} | devices
    columns = {
        f"{MODELLED} {name}": [modelled_seconds(trace, each) for trace in decoded]
        for name, each in devices.items()
    }
    return measurements.assign(**columns)


def measured_devices(pair: Pair, text: Sequence[int], widest: int) -> Devices:
    """Measure seconds per forward of up to `widest` rows of each model alone, with all threads of
    this machine, after `text` or the part that fits."""
    context = torch.tensor(text[: min(lm.max_length for lm in (pair.draft, pair.target)) - 1])
    rows = [n for n in COST_ROWS if n < widest] + [widest]
    draft, target = (
        measure_cost(lm, context, rows, COST_REPEATS) for lm in (pair.draft, pair.target)
    )
    return Devices(draft, target)
