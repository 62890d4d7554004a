"""One shard of a harvested dataset: a parquet file of known hash.

Chunk i of the prompts is three shards, `responses-0000i.parquet`, `mixed-0000i.parquet` and
`rounds-0000i.parquet`, one row per prompt, readable by the `datasets` package.
`data_gen.storage.chunks` describes the other files of the folder, docs/file-formats.md the columns.
Columns are named by their content, not by their readers.

Per-sample values are lists, flattened row by row where a sample has several. Hidden states and
embeddings are bfloat16 numbers kept as int16 bits."""

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from pydantic import model_validator
from torch import Tensor

from predictors.base import UNREADABLE
from predictors.features.draft_statistics import Q_STATS
from runtime.errors import UserError
from runtime.files import file_hash
from runtime.json_files import Form, Size

SCHEMA_VERSION = 5
ROWS_AT_ONCE = 8  # prompts of one table: writing holds its data in memory six times
SPLITS = ("train", "calibration", "test")
MORE, TOP = 2, 3  # candidates drawn besides the first; most probable tokens
INTEGERS, FLOATS, BITS = pa.list_(pa.int32()), pa.list_(pa.float32()), pa.list_(pa.int16())
PROMPT = {"prompt_id": pa.string(), "dataset": pa.string(), "split": pa.string()}
DRAWN = {
    "token": INTEGERS,
    **dict.fromkeys(("q", *Q_STATS, "accept_prob"), FLOATS),
    "draft_hidden": BITS,
}
SIBLINGS = {
    **dict.fromkeys(("rrsw_token", "rrsw_accept", "hub_accept"), MORE),
    **dict.fromkeys(("top_token", "top_accept"), TOP),
}
"""Columns of the siblings of every drawn token of a round, and how many numbers they have of
each."""
ROUND = {
    **dict.fromkeys(("anchor", "known", "drafted", "accepted", "committed"), INTEGERS),
    "history": FLOATS,
    "target_hidden": BITS,
    "draft_first": BITS,
    **{name: INTEGERS if name.endswith("token") else FLOATS for name in SIBLINGS},
}
SCHEMAS = {
    "responses": pa.schema(
        {
            **PROMPT,
            **dict.fromkeys(("prompt_tokens", "response_tokens", "embedded"), INTEGERS),
            "embedding": BITS,
        }
    ),
    "mixed": pa.schema({**PROMPT, "position": INTEGERS, "overlap": FLOATS, **DRAWN}),
    "rounds": pa.schema({**PROMPT, **ROUND, **DRAWN}),
}
FEATURES = ("draft_hidden", "draft_first", "target_hidden", "embedding")
"""Columns of hidden states and embeddings."""


def shard_name(kind: str, index: int) -> str:
    """Return the file name of chunk `index` of one kind of record ("responses", "mixed" or
    "rounds")."""
    return f"{kind}-{index:05d}.parquet"


class Shard(Form):
    """A file of records, as a manifest lists it."""

    name: str
    kind: str
    rows: Size
    bytes: Size
    sha256: str

    @model_validator(mode="after")
    def _named_by_its_kind(self) -> "Shard":
        name = rf"{re.escape(self.kind)}-[0-9]{{5,}}\.parquet"
        if self.kind not in SCHEMAS or not re.fullmatch(name, self.name):
            raise ValueError("no name of a shard")
        return self


class MarkedShard(Shard):
    """A file of records, as the marker of its chunk lists it. records: a digest of each."""

    records: list[str]


# Writing ------------------------------------------------------------------------------------------


def encoded_shard(
    kind: str, index: int, rows: Sequence[Mapping[str, Any]]
) -> tuple[MarkedShard, pa.Buffer]:
    """Return a shard, and the content of its file. rows: one mapping per prompt with the columns of
    ``SCHEMAS[kind]``.

    Raises UserError when a number is NaN or infinite: such a shard is never written.
    """
    name, sink, digests = shard_name(kind, index), pa.BufferOutputStream(), list[str]()
    plain = [
        {name: v.flatten().cpu().numpy() if isinstance(v, Tensor) else v for name, v in row.items()}
        for row in rows
    ]
    # Values are close to random bits: dictionaries would only cost time.
    options = {"compression": "zstd", "use_dictionary": False}
    with pq.ParquetWriter(sink, SCHEMAS[kind], **options) as writer:
        for start in range(0, len(rows), ROWS_AT_ONCE):
            table = pa.Table.from_pylist(plain[start : start + ROWS_AT_ONCE], SCHEMAS[kind])
            if problem := _not_finite(table):
                raise UserError(
                    f"pair: {problem} while making {name}. Check the models, or set"
                    " pair.dtype=float32"
                )
            writer.write_table(table)
            digests += record_digests(table, kind)
    content = sink.getvalue()
    shard = MarkedShard(
        name=name,
        kind=kind,
        rows=len(rows),
        bytes=content.size,
        sha256=hashlib.sha256(content).hexdigest(),
        records=digests,
    )
    return shard, content


def record_digests(table: pa.Table, kind: str) -> list[str]:
    """Return one digest per row, of its values: the parquet encoding and the rows beside it do not
    matter."""
    digests = [hashlib.sha256(kind.encode()) for _ in range(len(table))]
    for name in table.schema.names:
        rows = (row for chunk in table[name].chunks for row in chunk)
        for digest, row in zip(digests, rows, strict=True):
            if name in PROMPT:
                content = row.as_py().encode()
            else:
                content = row.values.to_numpy(zero_copy_only=False).tobytes()
            digest.update(f"/{name}/{len(content)}/".encode())
            digest.update(content)
    return [digest.hexdigest()[:32] for digest in digests]


def pack_features(features: Tensor) -> np.ndarray:
    """Return floats [..., D] as int16 [... * D], the bits of the values rounded to bfloat16."""
    return features.to(torch.bfloat16).contiguous().view(torch.int16).flatten().cpu().numpy()


def _not_finite(table: pa.Table) -> str | None:
    for name, column in zip(table.column_names, table.columns, strict=True):
        for chunk in column.chunks if pa.types.is_list(column.type) else ():
            values = chunk.flatten().to_numpy(zero_copy_only=False)
            if name in FEATURES:  # bfloat16: exponent all ones = infinite or NaN
                finite = (values & 0x7F80) != 0x7F80
            else:
                finite = np.isfinite(values)
            if not finite.all():
                return f"NaN or infinite values in column {name}"
    return None


# Reading ------------------------------------------------------------------------------------------


def batches(folder: Path, shard: Shard, columns: Collection[str]) -> Iterator[pa.Table]:
    """Return some columns of a shard, in tables of a few prompts, read from the mapped file. Raises
    UserError naming the shard when it is not the file that was written: no damaged byte reaches the
    parquet reader."""
    path = folder / shard.name
    if problem := fault(path, shard, _hash_once):
        raise UserError(
            f"data: shard {path} {problem}. Run the harvest again with out={folder}: it remakes bad"
            " shards"
        )
    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            if file.metadata.num_rows != shard.rows:
                raise ValueError(f"{file.metadata.num_rows} rows instead of {shard.rows}")
            names = list(dict.fromkeys(columns))
            for name in names:
                if name not in file.schema_arrow.names:
                    raise ValueError(f"column {name} is missing")
                stored = file.schema_arrow.field(name).type
                if stored != (right := SCHEMAS[shard.kind].field(name).type):
                    raise ValueError(f"column {name} is of type {stored} instead of {right}")
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=names):
                yield _without_holes(pa.Table.from_batches([batch]).select(names))
    except UNREADABLE as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise UserError(
            f"data: shard {path} cannot be read ({reason}). Delete it and run the harvest again"
            f" with out={folder}"
        ) from error


def _without_holes(table: pa.Table) -> pa.Table:
    """Return `table`. Raises ValueError if values are missing."""
    table.validate(full=True)
    for name, column in zip(table.column_names, table.columns, strict=True):
        inner = pc.list_flatten(column) if pa.types.is_list(column.type) else column
        if column.null_count or inner.null_count:
            raise ValueError(f"column {name} has holes")
    return table


def fault(path: Path, shard: Shard, hashing: Callable[[Path], str] = file_hash) -> str | None:
    """Return what is wrong with the file of a shard, None if nothing is."""
    try:
        size = path.stat().st_size
        if size != shard.bytes:
            return f"is damaged: {size} bytes instead of {shard.bytes}"
        if hashing(path) == shard.sha256:
            return None
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return "is damaged, or another than the one that was written: its hash differs"


def _hash_once(path: Path) -> str:
    """Return `file_hash`, computed once per process as long as the file is not replaced."""
    stat = path.stat()
    return _hash_of(path.absolute(), stat.st_ino, stat.st_size, stat.st_mtime_ns)


@cache
def _hash_of(path: Path, *identity: int) -> str:
    return file_hash(path)
