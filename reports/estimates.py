"""What is estimated of a run, with bootstrap intervals over prompts: speed-up, tokens per target
call, accepted length, rollback."""

from collections.abc import Sequence

from decoding.trace import Trace
from evaluation.table import BASELINE, accepted_lengths, draft_steps
from evaluation.timeline import TABLES, Devices, modelled_seconds
from reports.ratios import Count, compared, counted, divided, ratio
from reports.runs import Run
from runtime.intervals import Array, Estimate

SPEED, CALLS, LENGTH, ROLLBACK = (
    "speed-up",
    "tokens/target call",
    "accepted length M",
    "rollback rate RB",
)


def speedup(run: Run) -> Estimate:
    """Measured."""
    return _over_baseline(run, lambda trace: trace.seconds)


def modelled_speedup(run: Run, c: float) -> Estimate:
    devices = Devices.of_ratio(c)
    return _over_baseline(run, lambda trace: modelled_seconds(trace, devices))


def tokens_per_call(run: Run) -> Estimate:
    return ratio(run.traces, tokens, lambda trace: len(trace.rounds))


def accepted_length(run: Run) -> Estimate:
    """SpecBranch's M."""
    return ratio(
        run.traces,
        lambda trace: sum(accepted_lengths(trace)),
        lambda trace: len(accepted_lengths(trace)),
    )


def rollback_rate(run: Run) -> Estimate:
    """RB: draft steps lost to a rejection."""
    lost, drawn = (
        lambda trace, place=place: sum(draft_steps(r)[place] for r in trace.rounds)
        for place in (1, 0)
    )
    return ratio(run.traces, lost, drawn)


def tokens(trace: Trace) -> int:
    return len(trace.tokens)


def ratios_of(found: Sequence[Run]) -> list[float]:
    """The speed ratios that evaluations were asked to price, else the papers'; counts can be priced
    at any."""
    asked = {
        c for run in found for c in run.evaluation.config.get("modelled", []) if c not in TABLES
    }
    return sorted(asked) or [4, 5, 10, 15]


def over(run: Run, other: Run) -> Estimate:
    """Its measured speed over that of another method, on the prompts both have."""
    return _ratio(run.traces, other.traces, lambda trace: trace.seconds)


def _over_baseline(run: Run, seconds: Count) -> Estimate:
    return Estimate(1.0) if run.name == BASELINE else _ratio(run.traces, run.baseline, seconds)


def _ratio(ours: Sequence[Trace], theirs: Sequence[Trace], seconds: Count) -> Estimate:
    return compared(counted(ours, tokens, seconds), counted(theirs, tokens, seconds), _faster)


def _faster(ours: Array, theirs: Array) -> Array:
    speed, other = (divided(sums[..., 0], sums[..., 1]) for sums in (ours, theirs))
    faster: Array = divided(speed, other)
    return faster
