"""The files in the folder of a harvest, and the state of its chunks.

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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    ConfigDict,
    Field,
    NegativeInt,
    NonNegativeFloat,
    NonNegativeInt,
    ValidationInfo,
    field_validator,
)

from data_gen.storage.shards import (
    SCHEMA_VERSION,
    SCHEMAS,
    SPLITS,
    MarkedShard,
    Shard,
    encoded_shard,
    fault,
    shard_name,
)
from runtime.errors import UserError
from runtime.files import write_atomically
from runtime.json_files import Form, Length, OpenForm, Size, digest, read_json, write_checksummed

PLAN, MANIFEST = "plan.json", "manifest.json"
DATES = "dates"  # in a plan: the date that the chat template was given, if it asked for one
_FILE = re.compile(rf"(?:{'|'.join(SCHEMAS)})-[0-9]{{5,}}\.parquet|chunk-[0-9]{{5,}}\.json")


def marker_name(index: int) -> str:
    """Return the file name of the completion marker of chunk `index`."""
    return f"chunk-{index:05d}.json"


def plan_id(plan: Mapping[str, Any]) -> str:
    """Return 16 hex digits that stand for the settings in a marker."""
    return digest(plan)[:16]


def chunk_count(plan: Mapping[str, Any]) -> int:
    """Return the number of chunks of a plan, or of a manifest, which holds the plan."""
    prompts = plan["prompts"]
    return -(-prompts.get("conversations", prompts["count"]) // plan["batch_size"])


# Writing ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chunk:
    """A chunk that was made: the contents of its shards by name, and what its marker says."""

    shards: dict[str, Any]
    marker: dict[str, Any]

    def save(self, folder: Path) -> None:
        """Write the shards, then the marker. A manifest that vouches for an older file goes
        first."""
        marker = folder / marker_name(self.marker["chunk"])
        (folder / MANIFEST).unlink(missing_ok=True)
        marker.unlink(missing_ok=True)
        for name, content in self.shards.items():
            write_atomically(folder / name, methodcaller("write_bytes", content))
        write_checksummed(marker, self.marker)


def chunk_of(plan: str, index: int, rows: Mapping[str, list[dict[str, Any]]]) -> Chunk:
    """Return chunk `index` of a plan. plan: its `plan_id`; rows: by kind, one per prompt. Raises
    UserError when a number is NaN or infinite."""
    shards = [encoded_shard(kind, index, rows[kind]) for kind in SCHEMAS]
    responses = rows["responses"]
    marker = {
        "plan": plan,
        "chunk": index,
        "prompts": len(responses),
        "tokens": sum(len(row["response_tokens"]) for row in responses),
        "shards": [shard.model_dump() for shard, _ in shards],
        "given": [row["given"] for row in responses if "given" in row],
    }
    return Chunk({shard.name: content for shard, content in shards}, marker)


def empty_chunk(plan: str, index: int) -> Chunk:
    """Return a chunk whose prompts are left out."""
    return chunk_of(plan, index, {kind: [] for kind in SCHEMAS})


# Done or not --------------------------------------------------------------------------------------


def marker_of(folder: Path, index: int, plan: str) -> "Marker | None":
    """Return the marker of a chunk whose files exist in full length; None if the chunk is still to
    be made. Hashes are not computed."""
    try:
        marker = read_marker(folder, index, plan)
        sizes = [(folder / shard.name).stat().st_size for shard in marker.shards]
    except (UserError, OSError):
        return None
    return marker if sizes == [shard.bytes for shard in marker.shards] else None


def read_marker(folder: Path, index: int, plan: str | None) -> "Marker":
    """Read the marker of a chunk. Raises UserError if it is missing, damaged, or belongs to another
    dataset. plan: None for any."""
    path = folder / marker_name(index)
    marker = read_json(path, Marker, "data", "")
    if marker.chunk != index:
        raise UserError(f"data: {path} is damaged (no valid chunk). ")
    if plan not in (None, marker.plan):
        raise UserError(f"data: {path} belongs to another dataset. ")
    return marker


def faults(folder: Path, index: int, plan: str | None) -> list[tuple[str, str]]:
    """Return the names of the bad files of a chunk, and what is wrong with each. Reads every
    byte."""
    try:
        marker = read_marker(folder, index, plan)
    except UserError as error:
        name = marker_name(index)
        return [(name, str(error).split(f"{name} ", 1)[1].rstrip(". "))]
    return [
        (shard.name, problem)
        for shard in marker.shards
        if (problem := fault(folder / shard.name, shard))
    ]


def inventory(folder: Path, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest's entries about the files of a finished harvest: `shards` by kind, `bytes`,
    and `content`, a hash of all records in sorted order, which does not depend on chunks, processes
    or parquet."""
    shards = [shard for marker in markers_of(folder, plan) for shard in marker.shards]
    ordered = [shard for kind in SCHEMAS for shard in shards if shard.kind == kind]
    return {
        "shards": [shard.model_dump(exclude={"records"}) for shard in ordered],
        "bytes": sum(shard.bytes for shard in shards),
        "content": content_hash(record for shard in shards for record in shard.records),
    }


def markers_of(folder: Path, plan: Mapping[str, Any]) -> Iterator["Marker"]:
    """Yield the marker of every chunk of a finished harvest."""
    return (read_marker(folder, index, plan_id(plan)) for index in range(chunk_count(plan)))


def content_hash(records: Iterable[str]) -> str:
    return hashlib.sha256("".join(sorted(records)).encode()).hexdigest()


def files_of_chunks(folder: Path) -> list[str]:
    """Return the names of all shards and markers in the folder."""
    return sorted(path.name for path in folder.iterdir() if _FILE.fullmatch(path.name))


# What the JSON files hold -------------------------------------------------------------------------


class Marker(Form):
    """The completion marker of a chunk. given: `data_gen.statistics.given_row` of each given
    response."""

    plan: str
    chunk: Size
    prompts: Size
    tokens: Size
    shards: list[MarkedShard]
    given: list[list[float]] = []
    checksum: str

    @field_validator("shards")
    @classmethod
    def _its_own(cls, shards: list[MarkedShard], info: ValidationInfo) -> list[MarkedShard]:
        names = [shard_name(kind, info.data.get("chunk", 0)) for kind in SCHEMAS]
        if [shard.name for shard in shards] != names:
            raise ValueError("shards of another chunk")
        return shards


class Prompts(OpenForm):
    count: Length


class Plan(OpenForm):
    version = ("schema_version", SCHEMA_VERSION)
    schema_version: int
    prompts: Prompts
    batch_size: Length
    splits: dict[str, Size]
    checksum: str

    @field_validator("splits")
    @classmethod
    def _adds_up(cls, splits: dict[str, int], info: ValidationInfo) -> dict[str, int]:
        prompts = info.data.get("prompts")
        if set(splits) != set(SPLITS) or prompts and sum(splits.values()) != prompts.count:
            raise ValueError("not the prompts")
        return splits


class PairNames(OpenForm):
    """The identity of a pair: its name and fingerprints."""

    name: str
    target: str
    draft: str
    tokenizer: str


class WarpSettings(Form):
    """The fields of `decoding.sampling.Warp`; before, processors: of `Processed`, as it describes
    them."""

    model_config = ConfigDict(frozen=True)

    temperature: NonNegativeFloat
    top_k: NonNegativeInt
    top_p: Annotated[float, Field(gt=0, le=1)]
    before: tuple[int, ...] = ()
    processors: tuple[tuple[str, str], ...] = ()


class Anchors(OpenForm):
    stride: Length


class Layers(Form):
    """The fields of `predictors.features.layers.RecordedLayers`."""

    draft_layers: Annotated[list[NegativeInt], Field(min_length=1)]
    target_layers: Annotated[list[NegativeInt], Field(min_length=1)]


class Counts(Form):
    mixed: Size
    rounds: Size


class Statistics(Form):
    """Statistics of a harvest. overlap, accept_prob: means over mixed records; accepted_lengths:
    numbers of rounds by accepted tokens, from 0 to gamma."""

    response_tokens: Size
    records: Counts
    overlap: float
    accept_prob: float
    accepted_lengths: list[Size]


class Manifest(Plan):
    gamma: Length
    pair: PairNames
    warp: WarpSettings
    draft_warp: WarpSettings
    max_new_tokens: Length
    anchors: Anchors
    inputs: Layers
    features_stored: bool
    dtypes: dict[str, Any] | None = None
    responses: str | None = None
    responses_from: dict[str, Any] | None = None
    repeated_texts: Size = 0
    left_out: Size = 0
    too_long: dict[str, Size] = {}
    given_tokens: Size = 0
    surprisal: dict[str, Any] = {}
    statistics: Statistics | None = None
    shards: list[Shard]
    bytes: Size = 0
    content: str | None = None

    @field_validator("shards")
    @classmethod
    def _once_each(cls, shards: list[Shard]) -> list[Shard]:
        if len({shard.name for shard in shards}) < len(shards):
            raise ValueError("a shard twice")
        return shards
