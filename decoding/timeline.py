"""Modelled time of traces: what the same decode takes where draft and target each have a device of their own.

Counts are those of the run that was traced, seconds those of a cost table; drawing, verification and the stop rule cost
nothing. Prefill is left out. Every figure from here is *modelled*.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decoding.trace import RoundTrace, StageTrace, Trace

Seconds = Callable[[int], float]
"""Of one forward, by its number of rows."""


@dataclass(frozen=True)
class Devices:
    """Seconds of one forward of each model, alone on its device.

    pipeline: the target is split over two devices, and the draft runs on the half that is idle (SpecBranch, appendix
        G.1); moving it from one to the other costs nothing. The draft's own stages are as they are.
    """

    draft: Seconds
    target: Seconds
    pipeline: bool = False

    @classmethod
    def of_ratio(cls, c: float) -> "Devices":
        """c = T_p / T_q whatever the number of rows, in units of a draft forward: the papers' simplification."""
        return cls(lambda rows: 1.0, lambda rows: c)


def modelled_speedup(traces: Sequence[Trace], baseline: Sequence[Trace], devices: Devices) -> float:
    """Seconds per token of `baseline` / those of `traces`."""
    ours, theirs = (sum(modelled_seconds(trace, devices) for trace in found) for found in (traces, baseline))
    tokens, others = (sum(len(trace.tokens) for trace in found) for found in (traces, baseline))
    return (theirs / others) / (ours / tokens) if ours and others else 0.0


def modelled_seconds(trace: Trace, devices: Devices) -> float:
    """Of the whole decode, prefill excluded."""
    return sum(_overlapped(r, r.overlap, devices) if r.overlap else _in_turn(r, devices) for r in trace.rounds)


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
    steps = [devices.draft(rows) for rows in branch_rows(stages, round_.draft_forwards - stages.alone)]
    return stages.alone * devices.draft(1) + _side_by_side(steps, devices.target(target_rows(round_)), devices)


def branch_rows(stages: StageTrace, forwards: int) -> list[int]:
    """Rows of each of the `forwards` of a branch stage: first the tip's where it is not known yet, then the branches'
    that still grow."""
    longest = max(map(len, stages.branches), default=0)
    growing = [sum(len(branch) > depth for branch in stages.branches) for depth in range(1, longest)]
    return [1] * (forwards - len(growing)) + growing


def _side_by_side(steps: Sequence[float], target: float, devices: Devices) -> float:
    if not devices.pipeline:
        return max(sum(steps), target)
    half = target / 2
    return min(max(half, sum(steps[:n])) + max(half, sum(steps[n:])) for n in range(len(steps) + 1))
