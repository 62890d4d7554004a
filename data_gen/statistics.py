"""What a harvest contains: counts, acceptance, accepted lengths; and how long one will take."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from data_gen.harvest import answers_of, split_into_chunks
from data_gen.joined import joined
from data_gen.records import Row, label
from data_gen.requests import Request, spread
from data_gen.responses import surprisal
from data_gen.responses.generate import Answer
from data_gen.room import Room, room_of
from data_gen.settings import HarvestSettings
from data_gen.storage import shards
from data_gen.storage.chunks import Counts, Manifest, Statistics
from decoding.models.loading import ModelPair


def statistics(out: Path, chunk_count: int, gamma: int) -> Statistics:
    """Return counts and label statistics of a finished harvest, in one pass over its shards."""
    tokens, lengths, sums = 0, np.zeros(gamma + 1, int), np.zeros(3)
    for index in range(chunk_count):
        tokens += len(
            _values(_columns(out, "responses", index, "response_tokens")["response_tokens"])
        )
        candidates = _columns(out, "mixed", index, "overlap", "accept_prob")
        overlap, accept = (
            _values(candidates[name]).astype(float) for name in ("overlap", "accept_prob")
        )
        sums += (len(overlap), overlap.sum(), accept.sum())
        rounds = _columns(out, "rounds", index, "accepted")
        lengths += np.bincount(_values(rounds["accepted"]), minlength=gamma + 1)
    return Statistics(
        response_tokens=tokens,
        records=Counts(mixed=int(sums[0]), rounds=int(lengths.sum())),
        overlap=float(sums[1] / max(sums[0], 1)),
        accept_prob=float(sums[2] / max(sums[0], 1)),
        accepted_lengths=lengths.tolist(),
    )


def _columns(out: Path, kind: str, index: int, *names: str) -> Any:
    return pq.read_table(out / shards.shard_name(kind, index), columns=list(names))


def _values(column: Any) -> np.ndarray:
    return column.combine_chunks().flatten().to_numpy(zero_copy_only=False)


def summary(manifest: Manifest) -> str:
    """Return the statistics of a manifest as a table."""
    measured = manifest.statistics
    assert measured is not None, "a harvest is measured when it is finished"
    lengths = np.array(measured.accepted_lengths)
    mean = (lengths * np.arange(len(lengths))).sum() / lengths.sum()
    shares = "  ".join(
        f"{n}: {share:.1%}" for n, share in enumerate(lengths / lengths.sum()) if share
    )
    splits = ", ".join(f"{split} {count}" for split, count in manifest.splits.items())
    repeated, greedy = manifest.repeated_texts, manifest.warp.temperature == 0
    doubles = f"; {repeated:,} repeat the text of another, in its split" if repeated else ""
    given = f" of {manifest.given_tokens:,} given" if manifest.given_tokens else ""
    rows = {
        "prompts": f"{manifest.prompts.count:,} ({splits}){doubles}",
        "response tokens": f"{measured.response_tokens:,}{given}",
        "mixed records": f"{measured.records.mixed:,}",
        "  mean sum(min(p, q))": f"{measured.overlap:.3f}",
        "  mean min(1, p/q)": f"{measured.accept_prob:.3f}",
        **(surprisal.lines(manifest.surprisal, greedy) if manifest.surprisal else {}),
        "rounds": f"{measured.records.rounds:,}",
        "  mean accepted length": f"{mean:.2f} of {manifest.gamma}",
        "  accepted lengths": shares,
        "disk": f"{manifest.bytes / 1e6:.1f} MB",
        "content": manifest.content,
    }
    return "\n".join(f"{name:24}{value}" for name, value in rows.items())


@dataclass(frozen=True)
class Estimate:
    """What a harvest will take. bytes: on disk."""

    seconds: float
    bytes: float
    tokens: float
    room: Room


def estimate(
    pair: ModelPair, requests: Sequence[Request], settings: HarvestSettings, labelled: int = 8
) -> Estimate:
    """Answer one full batch of prompts, spread over all of them, label some of its answers, and
    scale both up.

    Prefill grows with the padded prompts of all batches, the rest with the number of prompts: how
    long answers are is what varies most, and is measured on the whole batch."""
    batches, room = (
        split_into_chunks(requests, settings.batch_size),
        room_of(pair, requests, settings),
    )
    some = spread([request for batch in batches for request in batch], len(batches[0]))
    opening, answering, label_rate, size, tokens = _measure(pair, some, settings, labelled, room)
    scale = len(requests) / len(some)
    prefill = opening * sum(map(_padded, batches)) / _padded(some)
    total = tokens * scale
    return Estimate(
        prefill + scale * answering + total * label_rate,
        len(batches) * _shard_bytes([]) + total * size,
        total,
        room,
    )


def _measure(
    pair: ModelPair, some: Sequence[Request], settings: HarvestSettings, labelled: int, room: Room
) -> tuple[float, float, float, float, int]:
    """Seconds to run the prompts and to answer them; seconds and bytes per token to label answers
    and to write the labels; tokens of the answers."""
    chosen = {request.prompt_id for request in spread(some, labelled)}
    lengths: list[int] = []
    records: list[dict[str, Row]] = []
    marks, labelling, labelled_tokens = [perf_counter()], 0.0, 0
    advance = lambda _: marks.append(perf_counter()) if len(marks) < 3 else None  # noqa: E731

    def to_label() -> Iterator[Answer]:
        for answer in answers_of(pair, some, settings, advance):
            lengths.append(len(answer.distributions.response))
            if some[answer.index].prompt_id in chosen:
                yield answer

    for group in joined(pair, to_label(), settings, room):
        start = perf_counter()
        records += label(pair, [some[one.index] for one in group], group, settings, room)
        labelling += perf_counter() - start
        labelled_tokens += sum(len(one.distributions.response) for one in group)
    reading = perf_counter() - marks[0] - labelling
    opening = max(0.0, 2 * marks[1] - marks[0] - marks[-1])  # to the first token, less one step
    start = perf_counter()
    size = _shard_bytes(records) - _shard_bytes([])
    labelling += perf_counter() - start
    return (
        opening,
        reading - opening,
        labelling / labelled_tokens,
        size / labelled_tokens,
        sum(lengths),
    )


def _padded(batch: Sequence[Request]) -> int:
    return len(batch) * max(len(request.tokens) for request in batch)


def _shard_bytes(records: list[dict[str, Row]]) -> int:
    """Return the bytes on disk of one chunk."""
    with TemporaryDirectory() as folder:
        made = [
            shards.write_shard(Path(folder), kind, 0, [rows[kind] for rows in records])
            for kind in shards.SCHEMAS
        ]
        return sum(shard.bytes for shard in made)
