"""Reading back an offline run of Weights & Biases, from the file that `wandb sync` uploads."""

import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from wandb.proto.wandb_internal_pb2 import Record

# Bytes: a log of blocks; checksum, length and kind before each part of a record.
BLOCK, HEADER = 32768, 7


class Run(NamedTuple):
    """history: one dict per step; summary: the last values; artifacts: names of those that it has
    used and made."""

    folder: Path
    config: dict[str, Any]
    history: list[dict[str, Any]]
    summary: dict[str, Any]
    about: dict[str, Any]
    artifacts: dict[str, list[str]]
    exit_code: int

    def file(self, logged: dict[str, Any]) -> Path:
        """Of a picture or a table."""
        return self.folder / "files" / logged["path"]


def read_run(folder: Path) -> Run:
    """The only run in the folder that a logger was given."""
    (run,) = (folder / "wandb").glob("offline-run-*")
    read = Run(run, {}, [], {}, {}, {"used": [], "made": []}, 0)
    for record in whole(run):
        if record.HasField("run"):
            of_run = record.run
            told = {"job": of_run.job_type, "group": of_run.run_group, "tags": list(of_run.tags)}
            read.about.update(told)
        if record.HasField("artifact") and not record.artifact.name.startswith("run-"):  # tables
            kind = "used" if record.artifact.use_after_commit else "made"
            read.artifacts[kind].append(record.artifact.name)
        if record.HasField("exit"):
            read = read._replace(exit_code=record.exit.exit_code)
        read.config.update(values(record.run.config.update) | values(record.config.update))
        merge(read.summary, values(record.summary.update))
        if record.HasField("history"):
            read.history.append(values(record.history.item))
    return read


def whole(run: Path, patience: float = 60) -> list[Record]:
    """All records of its log; the process that writes them may begin after the run has begun, and
    end some time after it has ended."""
    until = time.monotonic() + patience
    while True:
        logs = (log.read_bytes() for log in run.glob("*.wandb"))
        found = [Record.FromString(data) for log in logs for data in records(log)]
        if any(record.HasField("exit") for record in found):
            return found
        assert time.monotonic() < until, f"{run} has no log that ends"
        time.sleep(0.1)


def records(data: bytes) -> Iterator[bytes]:
    at, parts = HEADER, b""  # the file has a header of the same length
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # the whole of a record, or its last part
            yield parts
            parts = b""


def values(items: Iterable[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in items:
        *outer, name = item.nested_key or [item.key]
        place = found
        for key in outer:
            place = place.setdefault(key, {})
        place[name] = json.loads(item.value_json)
    return found


def merge(into: dict[str, Any], new: dict[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value
