"""What lies in the folder of a harvest, and which chunks of it are done.

- `plan.json`: the settings every shard is made with.
- three shards per chunk of prompts (`data_gen.storage.shards`) and, written after them, the
  completion marker `chunk-0000i.json`: the plan, the hash of each shard, a digest of every record.
  A chunk is done when it has a marker that fits its shards and the plan.
- `manifest.json`, written last: it makes the folder a dataset.

Every file appears under its name only when it is complete and on disk, and every JSON file carries
its own checksum. So a harvest can be killed at any moment, damage is found
(`data_gen.storage.dataset.verify`), and only bad chunks are made again."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from data_gen.storage.shards import SCHEMAS, SPLITS, fault, shard_name, write_shard
from decoding.sampling import Warp
from predictors.base import UNREADABLE
from predictors.layers import RecordedLayers
from runtime.checksums import (
    Form,
    are_texts,
    digest,
    is_length,
    is_size,
    is_text,
    misfits,
    read_checksummed,
    refuse_misfits,
    write_checksummed,
)
from runtime.errors import UserError

PLAN, MANIFEST = "plan.json", "manifest.json"
_FILE = re.compile(rf"(?:{'|'.join(SCHEMAS)})-[0-9]{{5,}}\.parquet|chunk-[0-9]{{5,}}\.json")


def marker_name(index: int) -> str:
    """File name of the completion marker of chunk `index`."""
    return f"chunk-{index:05d}.json"


def plan_id(plan: Mapping[str, Any]) -> str:
    """16 hex digits that stand for the settings in a marker."""
    return digest(plan)[:16]


def chunk_count(plan: Mapping[str, Any]) -> int:
    """How many chunks a plan has. A manifest holds the plan, so it will do too."""
    return -(-plan["prompts"]["count"] // plan["batch_size"])


# Writing ------------------------------------------------------------------------------------------


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
    """Say that the chunk is to be made again."""
    (folder / marker_name(index)).unlink(missing_ok=True)


# Done or not --------------------------------------------------------------------------------------


def marker_of(folder: Path, index: int, plan: str) -> dict[str, Any] | None:
    """The marker of a chunk whose files are there, in full length; None where the chunk is still to
    be made. Hashes are not computed."""
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
    """Numbers of the chunks that have a marker, a fitting one or not."""
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
    refuse_misfits(marker, marker_form(index), f"data: {path}", "")
    if plan not in (None, marker["plan"]):
        raise UserError(f"data: {path} belongs to another dataset. ")
    return marker


def readable_markers(folder: Path) -> Iterator[dict[str, Any]]:
    """The markers in the folder that are not damaged, of whatever plan."""
    for path in folder.glob("chunk-*.json"):
        try:
            yield read_checksummed(path, "out", "")
        except UserError:
            continue


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


# What the JSON files hold -------------------------------------------------------------------------


def are_entries(value: Any) -> bool:
    """Of shards, as a manifest lists them."""
    return isinstance(value, list) and all(map(_is_entry, value))


def _is_entry(entry: Any) -> bool:
    return not any(misfits(entry, _ENTRY)) and bool(
        re.fullmatch(rf"{entry['kind']}-[0-9]{{5,}}\.parquet", entry["name"])
    )


def marker_form(index: int) -> Form:
    """Of the completion marker of chunk `index`."""
    names = [shard_name(kind, index) for kind in SCHEMAS]

    def its_entries(value: Any) -> bool:
        return (
            are_entries(value)
            and names == [entry["name"] for entry in value]
            and all(are_texts(entry.get("records")) for entry in value)
        )

    return {"plan": is_text, "prompts": is_size, "tokens": is_size, "shards": its_entries}


_ENTRY = {
    "name": is_text,
    "kind": lambda value: is_text(value) and value in SCHEMAS,
    "rows": is_size,
    "bytes": is_size,
    "sha256": is_text,
}


def _spells_out(kind: Any) -> Callable[[Any], bool]:
    """Whether a dict gives all settings of the dataclass `kind`, and right ones."""

    def right(value: Any) -> bool:
        try:
            return bool(kind.from_dict(value).to_dict().keys() == value.keys())
        except UNREADABLE:
            return False

    return right


_WARP = _spells_out(Warp)
PLAN_FORM: Form = {
    "prompts": {"count": is_length},
    "batch_size": is_length,
    "splits": dict.fromkeys(SPLITS, is_size),
}
MANIFEST_FORM: Form = {
    **PLAN_FORM,
    "pair": dict.fromkeys(("name", "target", "draft", "tokenizer"), is_text),
    "warp": _WARP,
    "draft_warp": _WARP,
    "gamma": is_length,
    "max_new_tokens": is_length,
    "anchors": {"stride": is_length},
    "inputs": _spells_out(RecordedLayers),
    "features_stored": lambda value: isinstance(value, bool),
    "responses_from": lambda value: value is None or isinstance(value, dict),
    "shards": are_entries,
}


def refuse_unfit(found: dict[str, Any], form: Form, where: str, remedy: str) -> None:
    """As `runtime.checksums.refuse_misfits`, also where the splits do not add up to the prompts."""
    refuse_misfits(found, form, where, remedy)
    if sum(found["splits"].values()) != found["prompts"]["count"]:
        raise UserError(f"{where} is damaged (no valid splits). {remedy}")
