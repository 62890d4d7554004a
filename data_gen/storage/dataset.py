"""Reading a finished harvest: its manifest, its records by split, its responses; whether it is
whole."""

import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from tqdm import tqdm

from data_gen.storage import chunks
from data_gen.storage.chunks import MANIFEST, PLAN
from data_gen.storage.shards import DRAWN, FEATURES, INTEGERS, PROMPT, SCHEMAS, SIBLINGS, read_shard
from predictors.features.draft_statistics import HISTORY
from runtime.errors import TooFewRows, UserError
from runtime.json_files import digest, read_json

WRITTEN = (
    "command",
    "versions",
    "responses_from",
    "shards",
    "bytes",
)  # how and as what its records were written


def read_manifest(folder: str | Path, key: str = "data") -> dict[str, Any]:
    """The manifest of a finished harvest. Raises UserError when there is none, saying which command
    makes it.

    key: config key named in errors.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    remedy = f"Run: python scripts/gen_data.py out={folder}"
    if not path.exists():
        state = "is only half harvested" if (folder / PLAN).exists() else "is no harvested dataset"
        raise UserError(f"{key}: {folder} {state}. {remedy}")
    return read_json(
        path, chunks.Manifest, key, f"{remedy} (and its settings): it writes the file again"
    )


def identity(manifest: dict[str, Any]) -> str:
    """Digest of what a harvest holds and of the settings it was made with; not of the command, the
    versions of packages or the bytes of its files, which change when the same records are written
    again."""
    aside = WRITTEN if "content" in manifest else ()
    return digest({name: value for name, value in manifest.items() if name not in aside})


def read_records(
    folder: str | Path, kind: str, split: str, columns: Collection[str] | None = None
) -> dict[str, Tensor]:
    """All samples of one kind ("mixed" or "rounds") and split ("train", "calibration", "test"
    or "all").

    Returns one tensor per column of ``SCHEMAS[kind]`` (or per name in `columns`) with the sample
    first: integers int64, floats float32, [N], or [N, gamma] in `rounds` where every token of a
    round has a value, [N, gamma, k] of its siblings; `history` [N, 3]; hidden states bfloat16 [N,
    L * H] or [N, gamma, L * H]; and `group` int64 [N], the number of the prompt a sample came from
    (to check or make splits by prompt). Hidden states are left out where the harvest stored none.
    Raises UserError naming the shard when one is missing or damaged, or when the split is
    empty."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    stored = [
        name for name in SCHEMAS[kind].names if name not in FEATURES or manifest["features_stored"]
    ]
    names = [name for name in stored if name not in PROMPT and (columns is None or name in columns)]
    counted = "anchor" if kind == "rounds" else "position"  # one value per sample
    entries = [entry for entry in manifest["shards"] if entry["kind"] == kind]
    tables = [read_shard(folder, entry, ["split", counted, *names]) for entry in entries]
    parts = [part for table in tables if len(part := _of_split(table, split))]
    counts = np.concatenate(
        [np.zeros(0, int), *(pc.list_value_length(part[counted]).to_numpy() for part in parts)]
    )
    if counts.sum() == 0:
        raise TooFewRows(
            f"data: {folder} has no {kind} records in split {split}. Harvest more prompts"
        )
    table = pa.concat_tables(parts)
    try:
        values = {
            name: _shaped(table[name], name, kind, counts, manifest["gamma"]) for name in names
        }
    except ValueError as error:
        raise UserError(
            f"data: {folder} is damaged ({error}). Harvest again with another out=..."
        ) from error
    return {**values, "group": torch.from_numpy(np.repeat(np.arange(len(counts)), counts))}


RESPONSE = (*PROMPT, "prompt_tokens", "response_tokens")


def read_responses(folder: str | Path, split: str) -> list[dict[str, Any]]:
    """`prompt_id`, `dataset`, `split`, `prompt_tokens` and `response_tokens` of the prompts of a
    split, in the order of the groups of `read_records`."""
    folder = Path(folder)
    entries = [entry for entry in read_manifest(folder)["shards"] if entry["kind"] == "responses"]
    tables = [read_shard(folder, entry, RESPONSE) for entry in entries]
    return [row for table in tables for row in _of_split(table, split).to_pylist()]


def read_prompts(
    folder: str | Path, kind: str, split: str, columns: Collection[str]
) -> Iterator[dict[str, Tensor]]:
    """Per prompt of a split, in the order of `read_records`, some columns of one kind: int64 or
    float32, as stored."""
    folder = Path(folder)
    dtypes = {
        name: torch.int64 if SCHEMAS[kind].field(name).type == INTEGERS else torch.float32
        for name in columns
    }
    for entry in read_manifest(folder)["shards"]:
        if entry["kind"] == kind:
            table = read_shard(folder, entry, ["split", *columns])
            for row in _of_split(table, split).select(list(columns)).to_pylist():
                yield {
                    name: torch.tensor(values, dtype=dtypes[name]) for name, values in row.items()
                }


def _of_split(table: pa.Table, split: str) -> pa.Table:
    return table if split == "all" else table.filter(pc.equal(table["split"], split))


def _shaped(
    column: pa.ChunkedArray, name: str, kind: str, counts: np.ndarray, gamma: int
) -> Tensor:
    """counts: [rows], samples of each row. Raises ValueError where a row has not as many values as
    its samples need."""
    each_token = kind == "rounds" and (name in DRAWN or name in SIBLINGS)
    values, shape = _values(column), [int(counts.sum()), *([gamma] if each_token else [])]
    if name == "history":
        shape.append(HISTORY)
    if name in SIBLINGS:
        shape.append(SIBLINGS[name])
    if name in FEATURES:
        values = values.view(torch.bfloat16)
        shape.append(len(values) // math.prod(shape))
    per_sample = math.prod(shape[1:])
    if per_sample == 0 or not np.array_equal(
        pc.list_value_length(column).to_numpy(), counts * per_sample
    ):
        raise ValueError(
            f"column {name} has not {per_sample or 'any'} values for each of the {kind} records"
        )
    return values.view(shape)


def _values(column: pa.ChunkedArray) -> Tensor:
    values = np.concatenate(
        [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks]
    )
    return torch.from_numpy(
        values if values.dtype in (np.int16, np.float32) else values.astype(np.int64)
    )


# Whole or damaged ---------------------------------------------------------------------------------


def verify(folder: Path) -> list[str]:
    """One line per file that is missing, damaged, out of date, of another version or does not
    belong; none for a dataset that is whole. Reads every byte.

    Raises UserError where `folder` holds no harvest at all."""
    if not any((folder / name).exists() for name in (PLAN, MANIFEST)) and not any(
        folder.glob("chunk-*")
    ):
        raise UserError(f"out: {folder} is no harvested dataset. Give the folder of one: out=...")
    (plan, manifest), bad = _settings_files(folder)
    known = plan or manifest
    count = (
        chunks.chunk_count(known) if known else max(chunks.marked_chunks(folder), default=-1) + 1
    )
    identity = chunks.plan_id(plan) if plan else None
    for index in tqdm(range(count), desc="verify", unit=" chunks", leave=False, mininterval=1):
        bad += [
            f"{folder / name} {problem}" for name, problem in chunks.faults(folder, index, identity)
        ]
    if known:
        bad += [
            f"{folder / name} belongs to no chunk. Delete it"
            for name in chunks.strangers(folder, count)
        ]
    if plan and manifest and not bad and not _describes(manifest, plan, folder):
        path = folder / MANIFEST
        bad.append(f"{path} is out of date: it does not describe the shards beside it")
    if manifest and "url" in (manifest.get("responses_from") or {}):  # asked of a server
        from data_gen.responses import log  # loads code that runs models, which no reader needs

        bad += log.faults(folder, [] if bad else _harvested(folder, bad))
    return bad


def _settings_files(folder: Path) -> tuple[list[dict[str, Any] | None], list[str]]:
    """Plan and manifest, None where one cannot be read, and what is wrong with them."""
    found: list[dict[str, Any] | None] = []
    bad = []
    for name, form in ((PLAN, chunks.Plan), (MANIFEST, chunks.Manifest)):
        try:
            found.append(read_json(folder / name, form, "out", ""))
        except UserError as error:
            found.append(None)
            bad.append(str(error).removeprefix("out: ").rstrip(". "))
    return found, bad


def _harvested(folder: Path, bad: list[str]) -> list[str]:
    """Ids of the prompts whose responses were harvested. A shard that cannot be read is added to
    `bad`."""
    try:
        return [row["prompt_id"] for row in read_responses(folder, "all")]
    except UserError as error:
        bad.append(str(error).removeprefix("data: ").removeprefix("shard ").rstrip(". "))
        return []


def _describes(manifest: dict[str, Any], plan: dict[str, Any], folder: Path) -> bool:
    """Whether the manifest says what plan and markers say."""
    expected = {**plan, **chunks.inventory(folder, plan)}
    return all(manifest.get(key) == value for key, value in expected.items())
