"""The folder of a harvest: whose it is, and which of its chunks are still to be made."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from data_gen.storage import chunks
from data_gen.storage.chunks import Marker
from data_gen.storage.shards import SCHEMA_VERSION, batches
from runtime.compatibility import differences, leaves
from runtime.errors import UserError
from runtime.json_files import OpenForm, read_json, write_checksummed

_AGAIN = "Choose another out=... or delete the folder"


class Own(OpenForm):
    """A plan or manifest of any version."""

    checksum: str


class Settings(Own):
    """A plan of this version, to be compared with another plan."""

    version = ("schema_version", SCHEMA_VERSION)


def claim(
    folder: Path, plan: dict[str, Any], told: Callable[[dict[str, list[int]]], str] | None = None
) -> None:
    """Make `folder` that of `plan`'s dataset, or check that it already is.

    told: says where the prompts first differ from these in the folder, given as ids by name.

    A plan that was lost or damaged is written again if the markers are those of `plan`. Raises
    UserError naming the settings that differ from those of the shards in the folder, and if a file
    that is not a harvest's would be lost."""
    path = folder / chunks.PLAN
    if not any(folder.glob("*.parquet")):  # nothing made yet, or deleted
        _refuse_foreign(folder)
        (folder / chunks.MANIFEST).unlink(missing_ok=True)
        write_checksummed(path, plan)
        return
    try:
        made_with = read_json(
            path, Settings, "out", f"The shards beside it may have other settings. {_AGAIN}"
        )
    except UserError:
        plans = set[str]()
        for marked in folder.glob("chunk-*.json"):
            with suppress(UserError):  # damaged
                plans.add(read_json(marked, Marker, "out", "").plan)
        if plans != {chunks.plan_id(plan)}:
            raise
        write_checksummed(path, plan)
        return
    where = ""
    if told and made_with.written.get("prompts") != plan.get("prompts"):
        where = told(_prompts_of(folder))
    _refuse_changes(folder, made_with.written, plan, where)


def begun_on(folder: Path) -> str | None:
    """Return the date with which the prompts of the harvest in `folder` were rendered; None if
    there is no harvest or its chat template does not read the clock."""
    try:
        dates = read_json(folder / chunks.PLAN, Settings, "out", "").written.get(chunks.DATES)
    except UserError:
        return None
    return str(dates[0]) if dates else None


def refuse_others(folder: Path, known: dict[str, Any]) -> None:
    """Raise UserError if the shards in `folder` were made with other settings than the `known` ones
    of a plan, whose responses are "generated" or "external". A plan that cannot be read is left to
    `claim`."""
    try:
        plan = read_json(folder / chunks.PLAN, Settings, "out", "").written
    except UserError:
        return
    if any(folder.glob("*.parquet")):
        kind = "generated" if plan.get("responses") == "generated" else "external"
        before = leaves({**plan, "responses": kind})
        _refuse_changes(folder, {key: before.get(key) for key in leaves(known)}, leaves(known))


def _prompts_of(folder: Path) -> dict[str, list[int]]:
    """Return the ids of the prompts in a folder's whole shards, by name."""
    found, columns = dict[str, list[int]](), ["prompt_id", "prompt_tokens"]
    for path in sorted(folder.glob("chunk-*.json")):
        with suppress(UserError):  # damaged
            for shard in read_json(path, Marker, "out", "").shards:
                for table in batches(folder, shard, columns) if shard.kind == "responses" else ():
                    found |= dict(zip(*table.to_pydict().values(), strict=True))
    return found


def _refuse_changes(
    folder: Path, before: Mapping[str, Any], now: Mapping[str, Any], where: str = ""
) -> None:
    if changed := differences(before, now):
        raise UserError(f"out: {folder} was made with {changed}{where}. {_AGAIN}")


def _refuse_foreign(folder: Path) -> None:
    for name in (chunks.PLAN, chunks.MANIFEST):
        try:
            if (folder / name).exists():
                read_json(folder / name, Own, "out", "")
        except UserError as error:
            raise UserError(
                f"out: {folder / name} holds something else, which would be lost. Choose another"
                " out=<folder>"
            ) from error


def unmade(
    folder: Path,
    plan: dict[str, Any],
    earlier: Callable[[Marker], object],
    told: Callable[[dict[str, list[int]]], str] | None = None,
) -> list[int]:
    """Claim `folder` for the dataset of `plan` and return the chunks that are still to be made: a
    chunk is there if every byte is right and its prompts were not left out.

    earlier: called with the marker of each chunk that is there; told: as `claim`'s. Raises
    UserError when the folder holds a dataset made with other settings."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(
            f"out: {folder} is no folder and cannot become one. Choose another out=..."
        ) from error
    claim(folder, plan, told)
    identity, missing = chunks.plan_id(plan), list[int]()
    for index in range(chunks.chunk_count(plan)):
        marker = chunks.marker_of(folder, index, identity)
        if marker and marker.prompts and not chunks.faults(folder, index, identity):
            earlier(marker)
            continue
        (folder / chunks.marker_name(index)).unlink(missing_ok=True)
        missing.append(index)
    return missing
