"""Modelled time of traces: what the same decode takes where draft and target each have a device of
their own.

Counts are those of the run that was traced, seconds those of a cost table; drawing, verification
and the stop rule cost nothing. Prefill is left out. Every figure from here is *modelled*."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from decoding.cost import measure_cost
from decoding.interfaces import Pair
from decoding.trace import RoundTrace, StageTrace, Trace

TABLES = (
    "measured",
    "pipeline",
)  # cost tables that are no ratios; pipeline: a target on two devices
COST_ROWS, COST_REPEATS = (1, 2, 3, 4, 6, 9, 17, 33), 5
Seconds = Callable[[int], float]
"""Of one forward, by its number of rows."""


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
        """c = T_p / T_q whatever the number of rows, in units of a draft forward: the papers'
        simplification."""
        return cls(lambda rows: 1.0, lambda rows: c)


def modelled_speedup(traces: Sequence[Trace], baseline: Sequence[Trace], devices: Devices) -> float:
    """Seconds per token of `baseline` / those of `traces`."""
    ours, theirs = (
        sum(modelled_seconds(trace, devices) for trace in found) for found in (traces, baseline)
    )
    tokens, others = (sum(len(trace.tokens) for trace in found) for found in (traces, baseline))
    return (theirs / others) / (ours / tokens) if ours and others else 0.0


def modelled_seconds(trace: Trace, devices: Devices) -> float:
    """Of the whole decode, prefill excluded."""
    return sum(
        _overlapped(r, r.overlap, devices) if r.overlap else _in_turn(r, devices)
        for r in trace.rounds
    )


def target_rows(round_: RoundTrace) -> int:
    """Of the round's target call."""
    drafted = round_.overlap.pending if round_.overlap else len(round_.draft_tokens)
    return 1 + drafted + round_.extra_rows


def _in_turn(round_: RoundTrace, devices: Devices) -> float:
    """A sum. The forwards of a draft share its tokens evenly."""
    nodes, forwards = len(round_.draft_tokens), round_.draft_forwards
    rows = -(-nodes // forwards) if forwards else 0
    return forwards * devices.draft(max(1, rows)) + devices.target(target_rows(round_))


def _overlapped(round_: RoundTrace, stages: StageTrace, devices: Devices) -> float:
    """The draft stage, then the longer of what the two models do side by side."""
    steps = [
        devices.draft(rows) for rows in branch_rows(stages, round_.draft_forwards - stages.alone)
    ]
    return stages.alone * devices.draft(1) + _side_by_side(
        steps, devices.target(target_rows(round_)), devices
    )


def branch_rows(stages: StageTrace, forwards: int) -> list[int]:
    """Rows of each of the `forwards` of a branch stage: first the tip's where it is not known yet,
    then the branches' that still grow."""
    longest = max(map(len, stages.branches), default=0)
    growing = [
        sum(len(branch) > depth for branch in stages.branches) for depth in range(1, longest)
    ]
    return [1] * (forwards - len(growing)) + growing


def _side_by_side(steps: Sequence[float], target: float, devices: Devices) -> float:
    if not devices.pipeline:
        return max(sum(steps), target)
    half = target / 2
    return min(max(half, sum(steps[:n])) + max(half, sum(steps[n:])) for n in range(len(steps) + 1))


# Cost tables by name ------------------------------------------------------------------------------


def modelled(
    names: Sequence[Any],
    pair: Pair,
    prompts: Sequence[Tensor],
    traces: Mapping[str, Sequence[Trace]],
    baseline: str,
) -> dict[str, dict[str, float]]:
    """Speed-up of every method if draft and target had a device each, by cost table. names: of the
    tables, checked; prompts [n]: what the first traces of each method begin with."""
    tables = {f"{c:g}": Devices.of_ratio(c) for c in names if c not in TABLES}
    if asked := [name for name in TABLES if name in names]:
        texts = [
            [*prompt.tolist(), *trace.tokens]
            for prompt, trace in zip(prompts, traces[baseline], strict=False)
        ]
        rows = {
            target_rows(round_)
            for found in traces.values()
            for trace in found
            for round_ in trace.rounds
        }
        devices = measured_devices(pair, sorted(texts, key=len)[len(texts) // 2], max(rows))
        tables = {name: replace(devices, pipeline=name == "pipeline") for name in asked} | tables
    return {
        name: {
            table: modelled_speedup(found, traces[baseline], devices)
            for table, devices in tables.items()
        }
        for name, found in traces.items()
    }


def measured_devices(pair: Pair, text: Sequence[int], widest: int) -> Devices:
    """Seconds per forward of up to `widest` rows of each model alone, with all of this machine's
    threads, after `text` or what fits of it."""
    context = torch.tensor(text[: min(lm.max_length for lm in (pair.draft, pair.target)) - 1])
    rows = [n for n in COST_ROWS if n < widest] + [widest]
    draft, target = (
        measure_cost(lm, context, rows, COST_REPEATS) for lm in (pair.draft, pair.target)
    )
    return Devices(draft, target)
