"""Methods against each other on the same prompts: medians of paired ratios, measured."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from decoding.trace import Trace
from evaluation.interleaving import Traces
from evaluation.metrics import profile
from evaluation.tables import BASELINE, markdown
from runtime.intervals import Estimate, bootstrap, drawn


@dataclass(frozen=True)
class PairedComparison:
    """One method on one set of prompts.

    tokens_per_second: of whole requests, prefill included, median over prompts; accepted: draft
    tokens per target call;
    ratios: of tokens per second, by what it is compared with (`median_ratio`); outside: share of
    decode time outside model forwards, None where that is not known"""

    tokens_per_second: float
    accepted: float
    ratios: dict[str, Estimate]
    outside: float | None


def paired_comparisons(
    traces: Traces, against: Mapping[str, str], ours: Collection[str]
) -> dict[str, PairedComparison]:
    """Of every method. against: what to compare with -> method; ours: methods whose traces know
    their forwards."""
    speeds = {name: speed_of_prompts(repeats) for name, repeats in traces.items()}
    found = {}
    for name, repeats in traces.items():
        everything = [trace for repeat in repeats for trace in repeat]
        rounds = [round_ for trace in everything for round_ in trace.rounds]
        found[name] = PairedComparison(
            median(speeds[name]),
            sum(round_.accepted for round_ in rounds) / len(rounds),
            {what: median_ratio(speeds[name], speeds[other]) for what, other in against.items()},
            profile(everything)["overhead"] if name in ours else None,
        )
    return found


def against_of(against: Mapping[str, Sequence[str]], traces: Traces) -> dict[str, str]:
    """The method that each of `against` stands for: the fastest of those that were decoded. What
    none was decoded of is left out."""
    decoded = {what: [name for name in names if name in traces] for what, names in against.items()}
    return {what: fastest(traces, names, BASELINE) for what, names in decoded.items() if names}


def fastest(traces: Traces, names: Sequence[str], baseline: str) -> str:
    """Which of `names` has the largest median ratio to `baseline`; the first of equals."""
    base = speed_of_prompts(traces[baseline])
    return max(names, key=lambda name: median_ratio(speed_of_prompts(traces[name]), base).value)


def speed_of_prompts(repeats: Sequence[Sequence[Trace]]) -> list[float]:
    """Tokens per second of every prompt, its repeats pooled."""
    return [
        sum(len(t.tokens) for t in same) / sum(t.seconds for t in same)
        for same in zip(*repeats, strict=True)
    ]


def median_ratio(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Estimate:
    """Median over prompts of ours / theirs, both of the same prompts, with the 95 % bootstrap
    interval over prompts; no interval for a single prompt."""
    ratios = np.array(ours, dtype=float) / np.array(theirs, dtype=float)
    return bootstrap(lambda times: np.median(drawn(ratios, times), -1), len(ratios), seed)


def paired_table(found: Mapping[str, PairedComparison]) -> str:
    """Every ratio as median (interval)."""
    against = list(next(iter(found.values())).ratios)
    header = [
        "method",
        "tokens/s",
        "accepted/round",
        *(f"vs {what}, measured" for what in against),
        "outside forwards",
    ]
    rows = [
        [
            name,
            f"{one.tokens_per_second:.1f}",
            f"{one.accepted:.2f}",
            *(_cell(one.ratios[what]) for what in against),
            "-" if one.outside is None else f"{one.outside:.1%}",
        ]
        for name, one in found.items()
    ]
    return markdown(header, rows)


def _cell(ratio: Estimate) -> str:
    interval = "" if ratio.low is None else f" ({ratio.low:.2f}-{ratio.high:.2f})"
    return f"{ratio.value:.2f}x{interval}"
