"""Whether a harvested dataset is whole: every byte of it is read, every bad file named."""

from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_gen.responses import log
from data_gen.storage import chunks, schema
from data_gen.storage.dataset import read_responses
from runtime.checksums import read_checksummed
from runtime.errors import UserError


def verify(folder: Path) -> list[str]:
    """One line per file that is missing, damaged, out of date or does not belong; none for a
    dataset that is whole.

    Raises UserError where `folder` holds no harvest at all.
    """
    found: dict[str, dict[str, Any]] = {}
    bad: list[str] = []
    for name, form in ((chunks.PLAN, schema.PLAN), (chunks.MANIFEST, schema.MANIFEST)):
        try:
            value = read_checksummed(folder / name, "out", "")
            schema.refuse_misfits(value, form, f"out: {folder / name}", "")
            found[name] = value
        except UserError as error:
            bad.append(str(error).removeprefix("out: ").rstrip(". "))
    if not any(
        path.exists()
        for path in (folder / chunks.PLAN, folder / chunks.MANIFEST, *folder.glob("chunk-*"))
    ):
        raise UserError(f"out: {folder} is no harvested dataset. Give the folder of one: out=...")
    plan = found.get(chunks.PLAN)
    count = _chunks(folder, plan or found.get(chunks.MANIFEST))
    identity = chunks.plan_id(plan) if plan else None
    for index in tqdm(range(count), desc="verify", unit=" chunks", leave=False, mininterval=1):
        bad += [
            f"{folder / name} {problem}" for name, problem in chunks.faults(folder, index, identity)
        ]
    if found:
        bad += [
            f"{folder / name} belongs to no chunk. Delete it"
            for name in chunks.strangers(folder, count)
        ]
    if plan and not bad and not _vouches(found[chunks.MANIFEST], plan, folder):
        bad.append(
            f"{folder / chunks.MANIFEST} is out of date: it does not describe the shards beside it"
        )
    if "url" in (
        found.get(chunks.MANIFEST, {}).get("responses_from") or {}
    ):  # they were asked from a server
        bad += log.faults(folder, [] if bad else _answered(folder, bad))
    return bad


def _chunks(folder: Path, plan: dict[str, Any] | None) -> int:
    """How many there should be; how far the markers go, where neither plan nor manifest can be
    read."""
    return chunks.chunk_count(plan) if plan else max(chunks.marked_chunks(folder), default=-1) + 1


def _answered(folder: Path, bad: list[str]) -> list[str]:
    """Ids of the prompts whose responses were harvested. A shard that cannot be read is added to
    `bad`."""
    try:
        return [row["prompt_id"] for row in read_responses(folder, "all")]
    except UserError as error:
        bad.append(str(error).removeprefix("data: ").removeprefix("shard ").rstrip(". "))
        return []


def _vouches(manifest: dict[str, Any], plan: dict[str, Any], folder: Path) -> bool:
    expected = {**plan, **chunks.inventory(folder, plan)}
    return all(manifest.get(key) == value for key, value in expected.items())
