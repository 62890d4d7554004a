"""Figures of merit of one decoding method, from its traces.

Everything is a ratio of sums over requests, never a mean of ratios, except where the name says so
(`per_request`)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median, pstdev
from typing import Any

from decoding.trace import STAGES, RoundTrace, Trace


@dataclass(frozen=True)
class Spread:
    """Median and extremes over repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class OverlapMetrics:
    """How draft and target shared the work; draft steps are steps in time, branches side by side
    count once.

    waste_rate: `StageTrace.waste` / draft steps. target_bubbles, draft_bubbles: share of decode
        time (prefill excluded) the model was idle. draft_stages: share of rounds that began with a
        draft stage; classes: share of each among the rounds that asked for one.
    """

    waste_rate: float
    target_bubbles: float
    draft_bubbles: float
    draft_stages: float
    classes: tuple[float, float, float]


@dataclass(frozen=True)
class Metrics:
    """One method on one set of prompts.

    tokens_per_second: wall time of whole requests, prefill included, per repeat.
    speedup: the same divided by the baseline's in the same repeat; None for a method without
    baseline.
    tokens_per_target_call: committed tokens / target forwards (prefill excluded); 1 for
    autoregressive decoding.
    accepted_run: mean length of runs of consecutively accepted draft tokens; a run spans rounds and
        ends at a rejection or with the request. Not comparable with tokens_per_target_call.
    accepted_length: M as SpecBranch counts it (2506.01979, appendix E.3): a serial round is a run
        by itself, in an overlapped engine runs span rounds. Comparable with the paper's tables.
    discard_rate: draft tokens not accepted / committed tokens. verification_rate: target calls /
    committed tokens.
    rollback_rate: RB of SpecBranch, draft steps not accepted / draft steps, without what is wasted;
        steps in time, so that a chain has as many as its tokens and a tree as many as its depth.
    acceptance: accepted draft tokens / draft tokens, pooled, and mean and standard deviation over
        requests that drafted at all. In a tree every node is a draft token.
    predictor_share: share of wall time spent in the stop rule, the forwards it causes excluded.
    """

    requests: int
    repeats: int
    tokens: int
    tokens_per_second: Spread
    speedup: Spread | None
    tokens_per_target_call: float
    drafted_per_round: float
    draft_forwards_per_round: float
    accepted_run: float
    accepted_length: float
    discard_rate: float
    verification_rate: float
    rollback_rate: float
    acceptance: float
    acceptance_per_request: float
    acceptance_per_request_std: float
    predictor_share: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Metrics":
        spreads = {
            key: values[key] and Spread(**values[key]) for key in ("tokens_per_second", "speedup")
        }
        return cls(**{**values, **spreads})


def measure(
    repeats: Sequence[Sequence[Trace]], baseline: Sequence[Sequence[Trace]] | None = None
) -> Metrics:
    """Counts are pooled over `repeats`; speeds are kept per repeat. `baseline` has the same
    repeats."""
    traces = [trace for repeat in repeats for trace in repeat]
    rounds = sum(len(t.rounds) for t in traces)
    tokens = sum(len(t.tokens) for t in traces)
    drafted, accepted = sum(map(drafted_tokens, traces)), sum(map(accepted_tokens, traces))
    steps = [draft_steps(r) for t in traces for r in t.rounds]
    forwards = sum(r.draft_forwards for t in traces for r in t.rounds)
    runs = [run for trace in traces for run in accepted_runs(trace)]
    lengths = [length for trace in traces for length in accepted_lengths(trace)]
    per_request = [accepted_tokens(t) / drafted_tokens(t) for t in traces if drafted_tokens(t)]
    speeds = [tokens_per_second(repeat) for repeat in repeats]
    return Metrics(
        requests=len(traces),
        repeats=len(repeats),
        tokens=tokens,
        tokens_per_second=Spread.of(speeds),
        speedup=_speedup(speeds, baseline) if baseline else None,
        tokens_per_target_call=_ratio(tokens, rounds),
        drafted_per_round=_ratio(drafted, rounds),
        draft_forwards_per_round=_ratio(forwards, rounds),
        accepted_run=mean(runs) if runs else 0.0,
        accepted_length=mean(lengths) if lengths else 0.0,
        discard_rate=_ratio(drafted - accepted, tokens),
        verification_rate=_ratio(rounds, tokens),
        rollback_rate=_ratio(sum(lost for _, lost in steps), sum(drawn for drawn, _ in steps)),
        acceptance=_ratio(accepted, drafted),
        acceptance_per_request=mean(per_request) if per_request else 0.0,
        acceptance_per_request_std=pstdev(per_request) if per_request else 0.0,
        predictor_share=_ratio(
            sum(t.stages["stop"] for t in traces), sum(t.seconds for t in traces)
        ),
    )


def _speedup(speeds: Sequence[float], baseline: Sequence[Sequence[Trace]]) -> Spread:
    pairs = zip(speeds, baseline, strict=True)
    return Spread.of([speed / tokens_per_second(base) for speed, base in pairs])


def measure_overlap(traces: Sequence[Trace]) -> OverlapMetrics | None:
    """None where the traces are not of an overlapped engine."""
    rounds = [r.overlap for trace in traces for r in trace.rounds if r.overlap]
    if not rounds:
        return None
    total, steps = sum(t.decode_seconds for t in traces), sum(r.draft_steps for r in rounds)

    def bubbles(worker: str) -> float:
        busy = sum(
            span.end - span.start for r in rounds for span in r.spans if span.worker == worker
        )
        return 1 - _ratio(busy, total)

    asked = [r.outcome for r in rounds if r.outcome is not None]
    first, second, third = (_ratio(asked.count(outcome), len(asked)) for outcome in range(3))
    return OverlapMetrics(
        waste_rate=_ratio(sum(r.waste for r in rounds), steps),
        target_bubbles=bubbles("target"),
        draft_bubbles=bubbles("draft"),
        draft_stages=sum(r.stage == "draft" for r in rounds) / len(rounds),
        classes=(first, second, third),
    )


def profile(traces: Sequence[Trace]) -> dict[str, float]:
    """Share of decode time (prefill excluded) per stage; `overhead` is everything outside the two
    models' forwards. Where these overlap, their shares add up to more than 1, and overhead is the
    time in which neither has a job (a job of the draft's includes drawing)."""
    total = sum(trace.decode_seconds for trace in traces)
    seconds = {stage: sum(trace.stages[stage] for trace in traces) for stage in STAGES}
    seconds["other"] = max(0.0, seconds["other"] + total - sum(seconds.values()))
    shares: dict[str, float] = {stage: _ratio(value, total) for stage, value in seconds.items()}
    return {**shares, "overhead": max(0.0, 1 - _ratio(sum(map(_model_seconds, traces)), total))}


def tokens_per_second(traces: Sequence[Trace]) -> float:
    return _ratio(sum(len(t.tokens) for t in traces), sum(t.seconds for t in traces))


def draft_steps(round_: RoundTrace) -> tuple[int, int]:
    """Draft steps in time, and those lost to a rejection."""
    if round_.overlap:
        return round_.overlap.draft_steps, round_.overlap.rollback
    return round_.depth, round_.depth - round_.accepted


def drafted_tokens(trace: Trace) -> int:
    return sum(len(r.draft_tokens) for r in trace.rounds)


def accepted_tokens(trace: Trace) -> int:
    """Of the drafts that the trace knows; other libraries do not say what they drafted."""
    return sum(r.accepted for r in trace.rounds if r.draft_tokens)


def accepted_runs(trace: Trace) -> list[int]:
    """Lengths of the runs of accepted draft tokens; a rejected first token makes a run of length
    0."""
    runs, run = [], 0
    for round_ in trace.rounds:
        run += round_.accepted
        if round_.rejected:
            runs.append(run)
            run = 0
    return [*runs, run] if run else runs


def accepted_lengths(trace: Trace) -> list[int]:
    """The same with every serial round that drafted as a run of its own: SpecBranch's M. The rounds
    of an overlapped engine are one stretch of drafting until something is rejected."""
    if any(round_.overlap for round_ in trace.rounds):
        return accepted_runs(trace)
    return [round_.accepted for round_ in trace.rounds if round_.draft_tokens]


def _model_seconds(trace: Trace) -> float:
    """In which at least one of the models was at work: the forwards, or where models ran side by
    side, the jobs."""
    spans = [span for round_ in trace.rounds if round_.overlap for span in round_.overlap.spans]
    busy, end, side_by_side = 0.0, 0.0, False
    for span in sorted(spans, key=lambda span: span.start):
        side_by_side |= span.start < end
        busy += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return busy if side_by_side else trace.stages["draft"] + trace.stages["target"]


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
