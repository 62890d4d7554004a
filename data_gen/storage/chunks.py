"""What lies in the folder of a harvest, and which chunks of it are done.

- `plan.json`: the settings every shard is made with.
- three shards per chunk of prompts (`data_gen.storage.shards`) and, written after them, its marker
  `chunk-0000i.json`: the plan, the hash of each shard, a digest of every record. A chunk is done
  when it has a marker that fits.
- `manifest.json`, written last: it makes the folder a dataset.

Every file appears under its name only when it is complete and on disk, and every JSON file carries
its own checksum, so a harvest can be killed at any moment, and damage is found
(`data_gen.storage.verify`). Only bad chunks are made again."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from data_gen.storage import schema
from data_gen.storage.shards import SCHEMAS, fault, shard_name, write_shard
from runtime.checksums import digest, read_checksummed, write_checksummed
from runtime.compatibility import differences, leaves
from runtime.errors import UserError

PLAN, MANIFEST = "plan.json", "manifest.json"
_FILE = re.compile(rf"(?:{'|'.join(SCHEMAS)})-[0-9]{{5,}}\.parquet|chunk-[0-9]{{5,}}\.json")
_AGAIN = "Choose another out=... or delete the folder"


def marker_name(index: int) -> str:
    return f"chunk-{index:05d}.json"


def plan_id(plan: Mapping[str, Any]) -> str:
    """What a marker says about the settings its shards were made with."""
    return digest(plan)[:16]


def chunk_count(plan: Mapping[str, Any]) -> int:
    """Also of a manifest, which holds the plan."""
    return -(-plan["prompts"]["count"] // plan["batch_size"])


# Writing ------------------------------------------------------------------------------------------


def claim(folder: Path, plan: dict[str, Any], *, others: bool) -> None:
    """Make `folder` the home of `plan`'s dataset, or check that it already is. One process at a
    time.

    others: whether other processes work in the folder, which then has a plan before it has shards.
    A plan that was lost or damaged is written again if the markers are those of `plan`. Raises
    UserError naming the settings that differ from those the shards in the folder were made with, or
    where a file that is no harvest's would be lost."""
    path = folder / PLAN
    if not others and not any(folder.glob("*.parquet")):  # nothing made yet, or deleted
        _refuse_foreign(folder)
        (folder / MANIFEST).unlink(missing_ok=True)
        write_checksummed(path, plan)
        return
    try:
        made_with = read_checksummed(
            path, "out", f"The shards beside it may have other settings. {_AGAIN}"
        )
    except UserError:
        if {str(marker.get("plan")) for marker in _readable_markers(folder)} != {plan_id(plan)}:
            raise
        write_checksummed(path, plan)
        return
    _refuse_changes(folder, made_with, plan)


def refuse_others(folder: Path, known: dict[str, Any]) -> None:
    """Raise UserError where the shards in `folder` were made with other settings than the `known`
    ones of a plan, whose responses are "generated" or "given". A plan that cannot be read is left
    to `claim`."""
    try:
        plan = read_checksummed(folder / PLAN, "out", "")
    except UserError:
        return
    if any(folder.glob("*.parquet")):
        kind = "generated" if plan.get("responses") == "generated" else "given"
        before = leaves({**plan, "responses": kind})
        _refuse_changes(folder, {key: before.get(key) for key in leaves(known)}, leaves(known))


def _refuse_changes(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    if changed := differences(before, now):
        raise UserError(f"out: {folder} was made with {changed}. {_AGAIN}")


def _refuse_foreign(folder: Path) -> None:
    for name in (PLAN, MANIFEST):
        try:
            if (folder / name).exists():
                read_checksummed(folder / name, "out", "")
        except UserError as error:
            raise UserError(
                f"out: {folder / name} holds something else, which would be lost. Choose another"
                " out=<folder>"
            ) from error


def _readable_markers(folder: Path) -> Iterator[dict[str, Any]]:
    for path in folder.glob("chunk-*.json"):
        try:
            yield read_checksummed(path, "out", "")
        except UserError:
            continue


def save_chunk(
    folder: Path, plan: str, index: int, rows: Mapping[str, list[dict[str, Any]]]
) -> None:
    """Write the shards of a chunk, then its marker. plan: its `plan_id`; rows: by kind, one per
    prompt.

    A manifest that vouches for an older file goes first.
    """
    (folder / MANIFEST).unlink(missing_ok=True)
    (folder / marker_name(index)).unlink(missing_ok=True)
    shards = [write_shard(folder, kind, index, rows[kind]) for kind in SCHEMAS]
    tokens = sum(len(row["response_tokens"]) for row in rows["responses"])
    marker = {
        "plan": plan,
        "chunk": index,
        "prompts": len(rows["responses"]),
        "tokens": tokens,
        "shards": shards,
    }
    write_checksummed(folder / marker_name(index), marker)


def remove_marker(folder: Path, index: int) -> None:
    """The chunk is to be made again."""
    (folder / marker_name(index)).unlink(missing_ok=True)


# Checking -----------------------------------------------------------------------------------------


def marker_of(folder: Path, index: int, plan: str) -> dict[str, Any] | None:
    """The marker of a chunk whose files are there, in full length; None where the chunk is to be
    made. Hashes are not looked at."""
    try:
        marker = read_marker(folder, index, plan)
    except UserError:
        return None
    sizes = {entry["name"]: entry["bytes"] for entry in marker["shards"]}
    try:
        whole = all((folder / name).stat().st_size == size for name, size in sizes.items())
    except OSError:
        return None
    return marker if whole else None


def marked_chunks(folder: Path) -> list[int]:
    """Those that have a marker of whatever kind."""
    return [
        int(path.stem.removeprefix("chunk-"))
        for path in folder.glob("chunk-*.json")
        if _FILE.fullmatch(path.name)
    ]


def read_marker(folder: Path, index: int, plan: str | None) -> dict[str, Any]:
    """Raises UserError where it is missing, damaged, or belongs to another dataset. plan: None for
    any."""
    path = folder / marker_name(index)
    marker = read_checksummed(path, "data", "")
    schema.refuse_misfits(marker, schema.marker(index), f"data: {path}", "")
    if plan not in (None, marker["plan"]):
        raise UserError(f"data: {path} belongs to another dataset. ")
    return marker


def faults(folder: Path, index: int, plan: str | None) -> list[tuple[str, str]]:
    """Names of the bad files of a chunk, and what is wrong with each. Reads every byte."""
    try:
        marker = read_marker(folder, index, plan)
    except UserError as error:
        name = marker_name(index)
        return [(name, str(error).split(f"{name} ", 1)[1].rstrip(". "))]
    found = [(entry["name"], fault(folder / entry["name"], entry)) for entry in marker["shards"]]
    return [(name, problem) for name, problem in found if problem]


def inventory(folder: Path, plan: Mapping[str, Any]) -> dict[str, Any]:
    """What a manifest says about the files of a finished harvest: `shards` by kind, `bytes`, and
    `content`, a hash of all records in sorted order, which does not depend on chunks, processes or
    parquet."""
    markers = (read_marker(folder, index, plan_id(plan)) for index in range(chunk_count(plan)))
    entries = [entry for marker in markers for entry in marker["shards"]]
    records = [record for entry in entries for record in entry.pop("records")]
    return {
        "shards": [entry for kind in SCHEMAS for entry in entries if entry["kind"] == kind],
        "bytes": sum(entry["bytes"] for entry in entries),
        "content": content_hash(records),
    }


def content_hash(records: Iterable[str]) -> str:
    return hashlib.sha256("".join(sorted(records)).encode()).hexdigest()


def strangers(folder: Path, count: int) -> list[str]:
    """Shards and markers in the folder that belong to no chunk of the plan."""
    own = {shard_name(kind, index) for kind in SCHEMAS for index in range(count)} | {
        *map(marker_name, range(count))
    }
    return sorted(
        path.name
        for path in folder.iterdir()
        if _FILE.fullmatch(path.name) and path.name not in own
    )
