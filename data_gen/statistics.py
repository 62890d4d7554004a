"""Statistics of a harvest (counts, acceptance, accepted lengths), and the test whether given
responses have the distribution that their harvest states.

For a token drawn from p the mean of -log p is the entropy H(p). So the sum of -log p - H(p) over a
response, which is a martingale, has mean 0 whatever ends the response; with a lower temperature,
fewer candidates or penalties it has not. The mean is per token, its interval over prompts, since
the tokens of a response depend on each other. (Means of responses would be biased: a response that
a surprising end token cuts short would count as much as a long one.)"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

from data_gen.storage import shards
from data_gen.storage.chunks import Counts, Manifest, Statistics
from runtime.text import plural

# Least responses for a warning: with fewer, a few rare tokens make the sums far from normal.
ENOUGH = 50
# Half widths of the 95 % interval from 0 at which to warn: 1 of 20 correct harvests lies outside of
# the interval itself, 1 of 300 outside this one if sums are normal (5 of 400 simulated sets of 50).
FAR = 1.5
# Shares of tokens with p = 0 that rounding explains: of a sampled target, of a greedy one.
IMPOSSIBLE = 0.02, 0.05
CAUSES = (
    "a temperature, top_k, top_p, min_p or repetition_penalty that the server takes from its"
    " generation_config, another chat template or system prompt, other weights, or text that is"
    " tokenised otherwise than it was sampled (ask for token ids)"
)


def statistics(out: Path, chunk_count: int, gamma: int) -> Statistics:
    """Return counts and label statistics of a finished harvest, in one pass over its shards."""

    def values(kind: str, index: int, name: str) -> np.ndarray:
        column = pq.read_table(out / shards.shard_name(kind, index), columns=[name])[name]
        numbers: np.ndarray = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
        return numbers

    tokens, lengths, sums = 0, np.zeros(gamma + 1, int), np.zeros(3)
    for index in range(chunk_count):
        tokens += len(values("responses", index, "response_tokens"))
        overlap, accept = (
            values("mixed", index, c).astype(float) for c in ("overlap", "accept_prob")
        )
        sums += (len(overlap), overlap.sum(), accept.sum())
        lengths += np.bincount(values("rounds", index, "accepted"), minlength=gamma + 1)
    return Statistics(
        response_tokens=tokens,
        records=Counts(mixed=int(sums[0]), rounds=int(lengths.sum())),
        overlap=float(sums[1] / max(sums[0], 1)),
        accept_prob=float(sums[2] / max(sums[0], 1)),
        accepted_lengths=lengths.tolist(),
    )


def summary(manifest: Manifest) -> str:
    """Return the statistics of a manifest as a table."""
    measured = manifest.statistics
    assert measured is not None, "a harvest is measured when it is finished"
    lengths = np.array(measured.accepted_lengths)
    mean = (lengths * np.arange(len(lengths))).sum() / lengths.sum()
    shares = enumerate(lengths / lengths.sum())
    splits = ", ".join(f"{split} {count}" for split, count in manifest.splits.items())
    repeated, greedy = manifest.repeated_texts, manifest.warp.temperature == 0
    doubles = f"; {repeated:,} repeat the text of another, in its split" if repeated else ""
    doubles += f"; {manifest.left_out:,} of them left out" if manifest.left_out else ""
    for what, said in (("skip", "left out besides"), ("cut", "cut")):
        if count := manifest.too_long.get(what):
            doubles += f"; {count:,} too long, {said}"
    given = f" of {manifest.given_tokens:,} given" if manifest.given_tokens else ""
    stride = manifest.anchors.stride
    where = f"one every {stride} positions" if stride > 1 else "one at every position"
    rows = {
        "prompts": f"{manifest.prompts.count:,} ({splits}){doubles}",
        "response tokens": f"{measured.response_tokens:,}{given}",
        "mixed records": f"{measured.records.mixed:,}",
        "  mean sum(min(p, q))": f"{measured.overlap:.3f}",
        "  mean min(1, p/q)": f"{measured.accept_prob:.3f}",
        **(surprisal_lines(manifest.surprisal, greedy) if manifest.surprisal else {}),
        "rounds": f"{measured.records.rounds:,}, {where}",
        "  mean accepted length": f"{mean:.2f} of {manifest.gamma}",
        "  accepted lengths": "  ".join(f"{n}: {share:.1%}" for n, share in shares if share),
        "disk": f"{manifest.bytes / 1e6:.1f} MB",
        "content sha256": manifest.content,
    }
    return "\n".join(f"{name:24}{value}" for name, value in rows.items())


def small_splits(splits: Mapping[str, int]) -> str | None:
    """Return a warning if the calibration or the test split has one prompt or none, else None."""
    small = {name: splits.get(name, 0) for name in ("calibration", "test")}
    small = {name: count for name, count in small.items() if count < 2}
    if not small:
        return None
    told = " and ".join(f"the {name} split has {plural(n, 'prompt')}" for name, n in small.items())
    return (
        f"warning: {told}: calibration and intervals take 2 or more. Harvest more prompts: raise"
        " dataset.limit, or take a larger dataset"
    )


# Given responses ----------------------------------------------------------------------------------


def given_row(excess: Tensor) -> list[float]:
    """Return tokens, sum of -log p - H(p) in nats over those with p > 0, and tokens with p = 0 (at
    most 1: the target draws that token itself) of a given response. excess: [T]."""
    possible = torch.isfinite(excess)
    total = float(excess[possible].double().sum())
    return [int(possible.sum()), round(total, 6), int((~possible).sum())]


def surprisal(rows: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Sum up `given_row` over all responses: `prompts`, `tokens`, `impossible` tokens (p = 0),
    `mean` excess in nats per token, and its 95 % interval `low` to `high`; None if there are too
    few."""
    tokens, sums, impossible = np.array(rows, dtype=float).reshape(-1, 3).T
    total: dict[str, Any] = {
        **{"prompts": len(rows), "tokens": int(tokens.sum()), "impossible": int(impossible.sum())},
        **dict.fromkeys(("mean", "low", "high")),
    }
    if len(rows) > 1 and total["tokens"]:
        mean = sums.sum() / tokens.sum()  # a ratio of means: its error is that of sums - mean * T
        error = (sums - mean * tokens).std(ddof=1) / math.sqrt(len(rows)) / tokens.mean()
        edges = {"mean": mean, "low": mean - 1.96 * error, "high": mean + 1.96 * error}
        total |= {name: round(float(value), 6) for name, value in edges.items()}
    return total


def surprisal_lines(total: dict[str, Any], greedy: bool) -> dict[str, str]:
    """Return rows of a summary, by their heads. greedy: the target has one token at each place."""
    all_tokens, zero = total["tokens"] + total["impossible"], total["impossible"]
    if greedy:
        share = total["tokens"] / max(1, all_tokens)
        return {"given = argmax": f"{share:.2%} of {all_tokens:,} tokens looked at"}
    rows = {"-log p(token) - H(p)": "no interval: it takes tokens of two prompts or more"}
    if total["mean"] is not None:
        rows["-log p(token) - H(p)"] = (
            f"{total['mean']:+.3f} nats a token ({total['low']:+.3f} to {total['high']:+.3f}, 95 %"
            f" over {total['prompts']:,} prompts; 0: drawn as warp says)"
        )
    if zero:
        rows["  tokens with p = 0"] = (
            f"{zero:,} of {all_tokens:,}, left out; their responses end there"
        )
    return rows


def warning(total: dict[str, Any], greedy: bool) -> str | None:
    """Return a warning, with the usual causes, if the responses do not have the distribution that
    the harvest states, else None."""
    if total["prompts"] < ENOUGH:
        return None
    impossible, reasons = total["impossible"] / max(1, total["tokens"] + total["impossible"]), []
    if not greedy and total["mean"] is not None:
        half = (total["high"] - total["low"]) / 2
        if abs(total["mean"]) > FAR * half:
            reasons.append(f"-log p - H(p) is {total['mean']:+.3f} nats a token, not 0")
    if impossible > IMPOSSIBLE[greedy]:
        what = "differ from the target's argmax" if greedy else "have p = 0 under warp"
        reasons.append(f"{impossible:.1%} of their tokens {what}")
    if not reasons:
        return None
    return (
        f"warning: the given responses are not drawn as warp says: {'; '.join(reasons)}. Usual"
        f" causes: {CAUSES}"
    )
