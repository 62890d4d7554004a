"""The paired presentation: every method against others on the same prompt."""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from decoding.models.machine import in_words
from evaluation import tables
from evaluation.interleaving import Traces, by_dataset
from evaluation.paired.comparison import against_of, paired_comparisons, paired_table
from evaluation.paired.draft import draft_of
from evaluation.runner import Comparison
from runtime.text import printable


def paired(cfg: DictConfig, compared: Comparison, traces: Traces, ours: set[str]) -> dict[str, Any]:
    """What results.json says in addition. ours: methods whose traces know their forwards."""

    def compared_in(of: Traces) -> dict[str, Any]:
        against = against_of(cfg.against, of)
        return {"against": against, "methods": paired_comparisons(of, against, ours)}

    found = by_dataset(traces).each(compared_in)
    return {"paired": found, "draft": draft_of(cfg, compared, traces)}


def page(cfg: DictConfig, results: Mapping[str, Any]) -> str:
    """Everything in words and tables."""
    parts = [tables.heading(cfg), *tables.simulated(cfg.pair), conditions(cfg, results["run"])]
    matches = dict(results["draft"]["match"].shown())
    for dataset, found in results["paired"].shown():
        parts += [f"## {printable(dataset)}", paired_table(found["methods"])]
        parts += [
            f"{what}: {found['against'][what]} is the fastest."
            for what, names in cfg.against.items()
            if len(names) > 1 and what in found["against"]
        ]
        parts += draft_lines(matches[dataset])
    parts += [seconds_line(results["draft"]["seconds"]), *tables.remarks(results)]
    return "\n\n".join([*parts, "## Lossless", *results["lossless"]])


def conditions(cfg: DictConfig, facts: Mapping[str, Any]) -> str:
    """Where, with what and how it was measured."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return (
        f"{in_words(facts['hardware'])}, {facts['threads']} threads, {in_words(facts['dtypes'])};"
        f" {versions}. Measured: tokens/s of whole requests, prefill included, until EOS or"
        f" {cfg.max_new_tokens} tokens, medians over prompts; ratios on the same prompt, on which"
        f" the methods take turns, {cfg.repeats} repeat(s), medians with 95 % bootstrap intervals"
        " over prompts."
    )


def seconds_line(seconds: Mapping[str, Any]) -> str:
    rows = ", ".join(f"{count}: {1e3 * value:.1f}" for count, value in seconds["target"].items())
    return (
        f"Measured: ms of a draft forward {1e3 * seconds['draft']:.1f}, of a target forward by its"
        f" rows {rows}."
    )


def draft_lines(found: Mapping[str, Any]) -> list[str]:
    """found: of `draft_of`, one dataset."""
    best, later = found["speedup_bound"], ", ".join(f"{p:.3f}" for p in found["accepted_after"])
    reads = " (then {}, for it reads its own states after the first token of a draft)"
    return [
        (
            f"The draft along the {found['positions']} tokens of plain decoding: acceptance sum"
            f" min(p, q) at temperature 1 {found['overlap']:.3f}, greedy agreement"
            f" {found['greedy']:.3f}."
        ),
        (
            f"Modelled: a token accepted with probability {found['accepted']:.3f} under these"
            f" warps{reads.format(later) if later else ''}, drafts of {best['gamma']} would make"
            f" {best['tokens_per_round']:.2f} tokens per target call and {best['speedup']:.2f}x the"
            " speed of our plain decoding, if nothing but forwards cost time."
        ),
    ]
