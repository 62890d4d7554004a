"""The harvested dataset on disk: parquet shards, a plan, a manifest.

A folder holds, for chunk i of the prompts, `responses-0000i.parquet`, `specdecpp-0000i.parquet` and
`rounds-0000i.parquet` (one row per prompt, readable by the `datasets` package), `plan.json` (the settings every shard
was made with) and, once all chunks are there, `manifest.json`. Files appear under their final name only when complete
and on disk, so a run can be killed at any moment and resumed.

`responses` holds token ids. `specdecpp` has one sample per response position whose candidate was kept by token mixing
(2405.19715, section 3.2). `rounds` has one sample per anchor t = 0, stride, 2 stride, ... below the length T of the
response, its last positions included: the round that starts when t tokens are committed, gamma draft tokens long, drawn
on past any stop point and any end token.

- `drafted`: tokens up to and including the first drafted end token, at most gamma. Beyond it values mean nothing.
- `accepted`: of those, by token-wise verification with coins of the harvest (exact for a greedy target).
- `accept_prob`: min(1, p / q) of each token given that those before it were accepted; 0 where that is out of the
  question: after a token that the coins reject, once all tokens so far have a probability below 0.001 of being accepted
  (the target is not run there), and behind an end token. Greedy: 1 while the rollout is what the target says, then 0.
- `known`: tokens whose verdict is known: gamma, except near the end of a greedy response that was cut at
  max_new_tokens. What the target would have said next was never computed there: it is T - t, and `accept_prob` is 0
  beyond. A decode of T tokens drafts at most T - t - 1 tokens from t, so replaying it needs nothing else; training
  leaves rounds out whose length is not known.
- `draft_q`: of the drawn token under the law it was drawn from; `draft_max_q`, `draft_entropy` (nats): of the draft at
  temperature 1 without filters at the same place, as stop rules read it.
- `features`: of the target at the last verified position before the round.
- `rollout_features`: of the draft at each drawn token.

Per-sample values are lists, flattened row by row where a sample has several (`features`: n * D bfloat16 numbers kept
as int16 bits; draft columns and `accept_prob`: n * gamma; `rollout_features`: n * gamma * D). With `features=recompute`
feature lists are empty and the manifest says `"features_stored": false`.
"""

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from predictors.base import write_atomically, write_json
from predictors.errors import UserError

SCHEMA_VERSION = 2
SPLITS = ("train", "calibration", "test")
_INT, _FLOAT, _BITS = pa.list_(pa.int32()), pa.list_(pa.float32()), pa.list_(pa.int16())
_PROMPT = {"prompt_id": pa.string(), "dataset": pa.string(), "split": pa.string()}
SCHEMAS = {
    "responses": pa.schema({**_PROMPT, "prompt_tokens": _INT, "response_tokens": _INT}),
    "specdecpp": pa.schema(
        {
            **_PROMPT,
            "position": _INT,
            "token_ids": _INT,
            "soft_label": _FLOAT,
            "overlap": _FLOAT,
            "q_token": _FLOAT,
            "draft_max_q": _FLOAT,
            "draft_entropy": _FLOAT,
            "features": _BITS,
        }
    ),
    "rounds": pa.schema(
        {
            **_PROMPT,
            "anchor": _INT,
            "known": _INT,
            "drafted": _INT,
            "accepted": _INT,
            "draft_tokens": _INT,
            "draft_q": _FLOAT,
            "draft_max_q": _FLOAT,
            "draft_entropy": _FLOAT,
            "accept_prob": _FLOAT,
            "features": _BITS,
            "rollout_features": _BITS,
        }
    ),
}
FEATURES = ("features", "rollout_features")
NEEDED = ("pair", "warp", "draft_warp", "gamma", "features", "features_stored", "shards")  # of a manifest


def shard_name(kind: str, index: int) -> str:
    """File name of chunk `index` of one kind of record ("responses", "specdecpp" or "rounds")."""
    return f"{kind}-{index:05d}.parquet"


# Writing -------------------------------------------------------------------------------------------------------------


def write_shard(folder: Path, kind: str, index: int, rows: list[dict[str, Any]]) -> None:
    """Write one shard: `rows` has one dict per prompt with the columns of ``SCHEMAS[kind]``.

    Raises UserError when a number is NaN or infinite: such a shard is never written.
    """
    table = pa.Table.from_pylist([{key: _plain(value) for key, value in row.items()} for row in rows], SCHEMAS[kind])
    path = folder / shard_name(kind, index)
    if problem := _not_finite(table):
        raise UserError(f"pair: {problem} while making {path.name}. Check the models, or set pair.dtype=float32")
    # Values are close to random bits: dictionaries would only cost time. Checksums find later damage.
    options = {"compression": "zstd", "use_dictionary": False, "write_page_checksum": True}
    write_atomically(path, lambda temporary: pq.write_table(table, temporary, **options))


def pack_features(features: Tensor) -> np.ndarray:
    """[..., D] floats -> [... * D] int16, the bits of the values rounded to bfloat16."""
    return features.to(torch.bfloat16).contiguous().view(torch.int16).flatten().cpu().numpy()


def _plain(value: Any) -> Any:
    return value.flatten().cpu().numpy() if isinstance(value, Tensor) else value


def claim(folder: Path, plan: dict[str, Any]) -> None:
    """Make `folder` the home of `plan`'s dataset, or check that it already is.

    Raises UserError naming the settings that differ from those the shards in the folder were made with.
    """
    path = folder / "plan.json"
    if not any(folder.glob("*.parquet")):  # nothing made yet, or deleted
        (folder / "manifest.json").unlink(missing_ok=True)
        write_json(path, plan)
        return
    if not path.exists():
        raise UserError(f"out: {folder} holds shards but no plan.json. Delete the folder or choose another out=")
    before, now = dict(_flat(_read_json(path))), dict(_flat(json.loads(json.dumps(plan))))
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    if changed:
        old, new = (", ".join(f"{key}={values.get(key)}" for key in changed) for values in (before, now))
        raise UserError(f"out: {folder} was made with {old}, this run has {new}. Choose another out=... or delete it")


def _flat(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, dict):
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def finished(folder: Path, index: int) -> bool:
    """Whether every shard of chunk `index` is present and undamaged (otherwise the chunk is to be made again)."""
    try:
        counts = {read_shard(folder / shard_name(kind, index), kind).num_rows for kind in SCHEMAS}
    except UserError:
        return False
    return len(counts) == 1


def shard_list(folder: Path, chunks: int) -> list[dict[str, Any]]:
    """What the manifest says about each shard: name, kind, rows, bytes."""
    found = []
    for kind in SCHEMAS:
        for index in range(chunks):
            path = folder / shard_name(kind, index)
            rows = pq.read_metadata(path).num_rows
            found.append({"name": path.name, "kind": kind, "rows": rows, "bytes": path.stat().st_size})
    return found


# Reading -------------------------------------------------------------------------------------------------------------


def read_manifest(folder: str | Path, key: str = "data") -> dict[str, Any]:
    """The manifest of a finished harvest. Raises UserError when there is none, saying which command makes it.

    key: config key named in errors.
    """
    folder = Path(folder)
    path = folder / "manifest.json"
    if not path.exists():
        state = "is only half harvested" if (folder / "plan.json").exists() else "is no harvested dataset"
        raise UserError(f"{key}: {folder} {state}. Run: python scripts/gen_data.py out={folder}")
    manifest = _read_json(path, key)
    if manifest.get("schema_version") != SCHEMA_VERSION:
        version = manifest.get("schema_version")
        raise UserError(
            f"{key}: {folder} has schema version {version}, this code reads {SCHEMA_VERSION}. Harvest it again"
        )
    if lacking := [name for name in NEEDED if name not in manifest]:
        raise UserError(f"{key}: {path} lacks {', '.join(lacking)}. Run: python scripts/gen_data.py out={folder}")
    return manifest


def read_records(
    folder: str | Path, kind: str, split: str, columns: Collection[str] | None = None
) -> dict[str, Tensor]:
    """All samples of one kind ("specdecpp" or "rounds") and split ("train", "calibration", "test" or "all").

    Returns one tensor per column of ``SCHEMAS[kind]`` (or per name in `columns`) with the sample first: integers int64,
    floats float32, [N], or [N, gamma] in `rounds` where every token of a round has a value; `features` bfloat16 [N, D],
    `rollout_features` bfloat16 [N, gamma, D]; and `group` int64 [N], the number of the prompt a sample came from (to
    check or make splits by prompt). Features are left out where the harvest stored none.
    Raises UserError naming the shard when one is missing or damaged, or when the split is empty.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    stored = [name for name in SCHEMAS[kind].names if name not in FEATURES or manifest["features_stored"]]
    names = [name for name in stored if name not in _PROMPT and (columns is None or name in columns)]
    counted = "anchor" if kind == "rounds" else "position"  # one value per sample
    entries = [entry for entry in manifest["shards"] if entry["kind"] == kind]
    tables = [_listed_shard(folder, entry, ["split", counted, *names]) for entry in entries]
    table = pa.concat_tables([_of_split(table, split) for table in tables])
    counts = pc.list_value_length(table[counted]).to_numpy()
    samples = int(counts.sum())
    if samples == 0:
        raise UserError(f"data: {folder} has no {kind} records in split {split}. Harvest more prompts")
    values = {name: _shaped(_values(table[name]), name, kind, samples, manifest["gamma"]) for name in names}
    return {**values, "group": torch.from_numpy(np.repeat(np.arange(len(counts)), counts))}


def read_responses(folder: str | Path, split: str) -> list[dict[str, Any]]:
    """`prompt_id`, `dataset`, `split`, `prompt_tokens` and `response_tokens` of the prompts of a split, in the order of
    the groups of `read_records`."""
    folder = Path(folder)
    entries = [entry for entry in read_manifest(folder)["shards"] if entry["kind"] == "responses"]
    tables = [_listed_shard(folder, entry, SCHEMAS["responses"].names) for entry in entries]
    return [row for table in tables for row in _of_split(table, split).to_pylist()]


def read_prompts(folder: str | Path, kind: str, split: str, columns: Collection[str]) -> Iterator[dict[str, Tensor]]:
    """Per prompt of a split, in the order of `read_records`, some columns of one kind: int64 or float32, as stored."""
    folder = Path(folder)
    dtypes = {name: torch.int64 if SCHEMAS[kind].field(name).type == _INT else torch.float32 for name in columns}
    for entry in read_manifest(folder)["shards"]:
        if entry["kind"] == kind:
            table = _listed_shard(folder, entry, ["split", *columns])
            for row in _of_split(table, split).select(list(columns)).to_pylist():
                yield {name: torch.tensor(values, dtype=dtypes[name]) for name, values in row.items()}


def _of_split(table: pa.Table, split: str) -> pa.Table:
    return table if split == "all" else table.filter(pc.equal(table["split"], split))


def _shaped(values: Tensor, name: str, kind: str, samples: int, gamma: int) -> Tensor:
    if name == "rollout_features":
        return values.view(torch.bfloat16).view(samples, gamma, -1)
    if name == "features":
        return values.view(torch.bfloat16).view(samples, -1)
    each_token = kind == "rounds" and (name.startswith("draft_") or name == "accept_prob")
    return values.view(samples, gamma) if each_token else values


def read_shard(path: Path, kind: str, columns: Collection[str] | None = None) -> pa.Table:
    """One shard, or some of its columns, as an Arrow table. Raises UserError naming it when it is missing, truncated,
    or holds NaN."""
    remedy = f"Run the harvest again with out={path.parent}: it remakes this shard only"
    if not path.exists():
        raise UserError(f"data: shard {path} is missing. {remedy}")
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        whole = file.schema_arrow.equals(SCHEMAS[kind])
        table = file.read(columns=None if columns is None or not whole else list(dict.fromkeys(columns)))
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"data: shard {path} is damaged ({reason}). {remedy}") from error
    if not whole:
        raise UserError(f"data: shard {path} does not have the columns of {kind} records. {remedy}")
    if problem := _not_finite(table):
        raise UserError(f"data: shard {path} holds {problem}. {remedy}")
    return table


def _listed_shard(folder: Path, entry: dict[str, Any], columns: Collection[str]) -> pa.Table:
    table = read_shard(folder / entry["name"], entry["kind"], columns)
    if table.num_rows != entry["rows"]:
        raise UserError(
            f"data: shard {folder / entry['name']} has {table.num_rows} rows, the manifest says {entry['rows']}. "
            f"Run the harvest again with out={folder}"
        )
    return table


def _values(column: pa.ChunkedArray) -> Tensor:
    values = np.concatenate([chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks])
    return torch.from_numpy(values if values.dtype in (np.int16, np.float32) else values.astype(np.int64))


def _not_finite(table: pa.Table) -> str | None:
    for name in table.column_names:
        for chunk in table[name].chunks:
            if pa.types.is_list(chunk.type) and not _all_finite(name, chunk.flatten().to_numpy(zero_copy_only=False)):
                return f"NaN or infinite values in column {name}"
    return None


def _all_finite(name: str, values: np.ndarray) -> bool:
    if name in FEATURES:
        return bool(((values & 0x7F80) != 0x7F80).all())  # bfloat16: exponent all ones = infinite or NaN
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())


def _read_json(path: Path, key: str = "data") -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
        problem = f"it holds a {type(found).__name__}"
    except ValueError as error:
        problem = str(error)
    raise UserError(f"{key}: {path} is damaged ({problem}). Delete the folder {path.parent} and harvest again")
