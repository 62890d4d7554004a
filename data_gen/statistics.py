"""What a harvest contains: counts, acceptance, accepted lengths; and how long one will take."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from data_gen import shards
from data_gen.harvest import Recipe, chunks, draws, label
from data_gen.requests import Request
from data_gen.responses import read_answers
from decoding.models import ModelPair


def statistics(out: Path, chunk_count: int, gamma: int) -> dict[str, Any]:
    """Counts and label statistics of a finished harvest (JSON values), one pass over its shards."""
    tokens, lengths = 0, np.zeros(gamma + 1, int)
    overlap, soft_label = [], []
    for index in range(chunk_count):
        tokens += len(_values(_columns(out, "responses", index, "response_tokens")["response_tokens"]))
        candidates = _columns(out, "specdecpp", index, "overlap", "soft_label")
        overlap.append(_values(candidates["overlap"]))
        soft_label.append(_values(candidates["soft_label"]))
        rounds = _columns(out, "rounds", index, "accepted")
        lengths += np.bincount(_values(rounds["accepted"]), minlength=gamma + 1)
    return {
        "response_tokens": tokens,
        "records": {"specdecpp": int(sum(map(len, overlap))), "rounds": int(lengths.sum())},
        "overlap": float(np.concatenate(overlap).mean(dtype=float)),
        "soft_label": float(np.concatenate(soft_label).mean(dtype=float)),
        "accepted_lengths": lengths.tolist(),
    }


def _columns(out: Path, kind: str, index: int, *names: str) -> Any:
    return pq.read_table(out / shards.shard_name(kind, index), columns=list(names))


def _values(column: Any) -> np.ndarray:
    return column.combine_chunks().flatten().to_numpy(zero_copy_only=False)


def summary(manifest: dict[str, Any]) -> str:
    """The statistics of a manifest as a table."""
    found, counts = manifest["statistics"], manifest["statistics"]["records"]
    lengths = np.array(found["accepted_lengths"])
    mean = (lengths * np.arange(len(lengths))).sum() / lengths.sum()
    shares = "  ".join(f"{n}: {share:.1%}" for n, share in enumerate(lengths / lengths.sum()) if share)
    splits = ", ".join(f"{split} {count}" for split, count in manifest["splits"].items())
    rows = {
        "prompts": f"{manifest['prompts']['count']:,} ({splits})",
        "response tokens": f"{found['response_tokens']:,}",
        "SpecDec++ records": f"{counts['specdecpp']:,}",
        "  mean sum(min(p, q))": f"{found['overlap']:.3f}",
        "  mean min(1, p/q)": f"{found['soft_label']:.3f}",
        "rounds": f"{counts['rounds']:,}",
        "  mean accepted length": f"{mean:.2f} of {manifest['gamma']}",
        "  accepted lengths": shares,
        "disk": f"{manifest['bytes'] / 1e6:.1f} MB",
    }
    return "\n".join(f"{name:24}{value}" for name, value in rows.items())


@dataclass(frozen=True)
class Estimate:
    """At most this long and this large: responses that end early make it less."""

    seconds: float
    bytes: float
    tokens: int


def estimate(pair: ModelPair, requests: Sequence[Request], recipe: Recipe, sample: int = 3) -> Estimate:
    """Measure the steps of one full batch, and the labelling and the size of a few prompts; scale to all of them."""
    batches = chunks(requests, recipe.batch_size)
    opening, step = _batch_seconds(pair, batches[len(batches) // 2], recipe)
    some = [requests[index * len(requests) // sample] for index in range(min(sample, len(requests)))]
    labelling, size = _label_cost(pair, some, recipe)
    tokens = len(requests) * recipe.max_new_tokens
    reading = len(batches) * (opening + recipe.max_new_tokens * step)
    return Estimate(reading + tokens * labelling, tokens * size, tokens)


def _batch_seconds(pair: ModelPair, chunk: Sequence[Request], recipe: Recipe) -> tuple[float, float]:
    """Seconds to run the prompts of a full batch, and per token after that."""
    marks = [perf_counter()]
    short = replace(recipe.reading(pair), max_new=min(4, recipe.max_new_tokens), eos_ids=())
    prompts = [request.tokens for request in chunk]
    for _ in read_answers(
        pair.target, pair.draft, prompts, draws(chunk, recipe), short, lambda _: marks.append(perf_counter())
    ):
        pass
    step = (marks[-1] - marks[1]) / max(1, len(marks) - 2)
    return marks[1] - marks[0] - step, step


def _label_cost(pair: ModelPair, some: Sequence[Request], recipe: Recipe) -> tuple[float, float]:
    """Seconds and bytes per response token for labels, measured on a few full-length answers."""
    seconds, tokens, records = 0.0, 0, []
    endless = replace(recipe.reading(pair), eos_ids=())
    for answer in read_answers(
        pair.target, pair.draft, [request.tokens for request in some], draws(some, recipe), endless
    ):
        start = perf_counter()
        records.append(label(pair, some[answer.index], answer, recipe))
        seconds, tokens = seconds + perf_counter() - start, tokens + len(answer.laws.response)
    with TemporaryDirectory() as folder:
        for kind in shards.SCHEMAS:
            shards.write_shard(Path(folder), kind, 0, [rows[kind] for rows in records])
        size = sum(entry["bytes"] for entry in shards.shard_list(Path(folder), 1))
    return seconds / tokens, size / tokens
