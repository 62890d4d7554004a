"""What a comparison has found: metrics of every method, the evidence for losslessness, and where
time went."""

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig

from decoding.trace import Trace
from evaluation import tables
from evaluation.interleaving import Engine, Traces, by_dataset
from evaluation.lossless import broken_invariants, greedy_differences
from evaluation.methods import Method, is_lossless
from evaluation.metrics import Metrics, measure, measure_overlap, profile
from evaluation.runner import Comparison
from evaluation.tables import BASELINE
from evaluation.timeline import modelled


def pooled(traces: Traces) -> dict[str, list[Trace]]:
    """All repeats of every method."""
    return {
        name: [trace for repeat in repeats for trace in repeat] for name, repeats in traces.items()
    }


def found_in(cfg: DictConfig, compared: Comparison, traces: Traces) -> dict[str, Any]:
    """Metrics per dataset and method, how models shared the work, modelled speed-ups, profile."""
    everything = pooled(traces)
    prompts = [request.tokens for request in compared.requests]
    overlaps = {name: found for name, of in everything.items() if (found := measure_overlap(of))}
    return {
        "metrics": by_dataset(traces).each(measure_all),
        "overlap": overlaps,  # of the methods whose models run side by side
        "modelled": modelled(cfg.modelled, compared.pair, prompts, everything, BASELINE),
        "profile": {name: profile(found) for name, found in everything.items()},
    }


def measure_all(traces: Traces) -> dict[str, Metrics]:
    return {
        name: measure(found, None if name == BASELINE else traces[BASELINE])
        for name, found in traces.items()
    }


def records_drafts(engine: Engine) -> bool:
    """Whether its traces say what was drafted: those of other libraries do not."""
    return bool(getattr(engine, "records_drafts", True))


def lossless(
    cfg: DictConfig,
    compared: Comparison,
    traces: Traces,
    methods: dict[str, Method],
    ours: set[str],
) -> list[str]:
    """Greedy: equality with the baseline, and how near a tie each difference is. Sampling: the
    fixed invariants. ours: methods whose traces say what was drafted."""
    lines = [invariants(cfg, compared, pooled({name: traces[name] for name in ours}))]
    if cfg.warp.temperature != 0:
        return [*lines, *_sampled([m for m in methods.values() if m.name in traces], ours)]
    pair, prompts = compared.pair, [request.tokens for request in compared.requests]
    dtype = pair.target.model.dtype
    found = {
        name: [
            difference
            for of, base in zip(repeats, traces[BASELINE], strict=True)
            for difference in greedy_differences(pair.target, prompts, of, base, dtype)
        ]
        for name, repeats in traces.items()
        if name != BASELINE
    }
    return [*lines, *tables.lossless_lines(found, len(prompts) * cfg.repeats)]


def invariants(cfg: DictConfig, compared: Comparison, traces: dict[str, list[Trace]]) -> str:
    everything = [trace for found in traces.values() for trace in found]
    eos_ids = frozenset(compared.pair.eos_ids)
    broken = {
        fact for one in everything for fact in broken_invariants(one, cfg.max_new_tokens, eos_ids)
    }
    said = "; ".join(sorted(broken)) or "hold"
    return f"invariants of a lossless decode: {said} ({len(everything)} traces)"


def _sampled(methods: Sequence[Method], ours: set[str]) -> list[str]:
    lossy = [method.name for method in methods if not is_lossless(method)]
    said = f"NOT lossless for {', '.join(lossy)}" if lossy else "proven lossless"
    lines = [f"sampled: the verifier's distribution is {said} by enumeration (tests/contract)"]
    theirs = [method.name for method in methods if method.name not in ours]
    return [*lines, f"not enumerated, as no code of ours: {', '.join(theirs)}"] if theirs else lines
