"""Sharing one dataset among several processes, on one machine or on several with a shared folder:
ownership of the folder, and distribution of the chunks.

Processes exchange no messages: a chunk is taken by locking one byte of a file in the folder, and
the lock of a process that dies is released. So a process that dies loses only its current chunk,
which the others or the next run make (`accelerate launch` then stops the others, too). Any launcher
that sets the usual variables works (`accelerate launch`, `torchrun`, `mpirun`)."""

import errno
import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from data_gen.storage import chunks
from data_gen.storage.chunks import Marker
from data_gen.storage.shards import SCHEMA_VERSION
from runtime.compatibility import differences, leaves
from runtime.errors import UserError
from runtime.json_files import OpenForm, read_json, write_checksummed
from runtime.processes import launched

LOCK = ".lock"  # the first file of a harvest in its folder
POLL = 0.2  # seconds between checks of chunks that others are making
_AGAIN = "Choose another out=... or delete the folder"
_TAKEN = (errno.EACCES, errno.EAGAIN)
_PLAN, _PRESENCE, _FIRST_CHUNK = 0, 2**40, 1  # bytes to lock


@dataclass(frozen=True)
class Worker:
    """This process, one of `size` (`runtime.processes`), of which `local_size` are on this machine.
    Process 0 checks the files of earlier runs and writes the manifest."""

    rank: int = 0
    size: int = 1
    local_size: int = 1

    @staticmethod
    def of_launcher() -> "Worker":
        return Worker(*launched())

    def share_cores(self) -> None:
        """Divide the cores of a machine among its processes: launchers give each one thread, or
        all."""
        if self.local_size > 1:
            torch.set_num_threads(max(1, _cores() // self.local_size))

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Print which of several processes an error ended, and that only its open chunk is
        lost."""
        try:
            yield
        except BaseException:
            if self.size > 1:
                which = f"process {self.rank + 1} of {self.size}"
                print(
                    f"{which} stops. Finished chunks are kept: run the same command again",
                    file=sys.stderr,
                )
            raise


ALONE = Worker()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Locks:
    """Locks on the dataset in `folder`, freed when the process ends: exclusive ones on its plan and
    on each chunk, and one that all processes at work in the folder share."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise UserError(
                f"out: {folder} is no folder and cannot become one. Choose another out=..."
            ) from error
        self._folder = folder
        self._file = (folder / LOCK).open("a+b")

    @contextmanager
    def plan(self) -> Iterator[None]:
        """Hold the lock on the plan; wait until it is free."""
        self._lock(_PLAN, fcntl.LOCK_EX)
        try:
            yield
        finally:
            self._free(_PLAN)

    def enter(self) -> bool:
        """Register as a process at work until the end; return whether there are others. Call it
        while `plan` is held."""
        alone = self._lock(_PRESENCE, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._lock(_PRESENCE, fcntl.LOCK_SH)
        return not alone

    @contextmanager
    def chunk(self, index: int, *, wait: bool = False) -> Iterator[bool]:
        """Yield whether the chunk could be locked, which is always so after a `wait`; it is
        released when the block ends."""
        mode = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
        taken = self._lock(_FIRST_CHUNK + index, mode)
        try:
            yield taken
        finally:
            if taken:
                self._free(_FIRST_CHUNK + index)

    def _lock(self, byte: int, mode: int) -> bool:
        try:
            fcntl.lockf(self._file, mode, 1, byte)
            return True
        except OSError as error:
            if error.errno in _TAKEN:
                return False
            raise UserError(
                f"out: {self._folder} takes no locks ({error.strerror}). Choose another out=..."
            ) from error

    def _free(self, byte: int) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, byte)

    def __enter__(self) -> "Locks":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()


class Own(OpenForm):
    """A plan or manifest of any version."""

    checksum: str


class Settings(Own):
    """A plan of this version, to be compared with another plan."""

    version = ("schema_version", SCHEMA_VERSION)


def claim(folder: Path, plan: dict[str, Any], *, others: bool) -> None:
    """Make `folder` that of `plan`'s dataset, or check that it already is. One process at a time.

    others: whether other processes work in the folder, which then has a plan before it has shards.
    A plan that was lost or damaged is written again if the markers are those of `plan`. Raises
    UserError naming the settings that differ from those of the shards in the folder, and if a file
    that is not a harvest's would be lost."""
    path = folder / chunks.PLAN
    if not others and not any(folder.glob("*.parquet")):  # nothing made yet, or deleted
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
    _refuse_changes(folder, made_with.written, plan)


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


def _refuse_changes(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    if changed := differences(before, now):
        raise UserError(f"out: {folder} was made with {changed}. {_AGAIN}")


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


def open_chunks(
    folder: Path,
    plan: dict[str, Any],
    worker: Worker,
    earlier: Callable[[Marker], object],
    elsewhere: Callable[[Marker], object],
) -> Iterator[int]:
    """Yield the chunks that this process has to make and to mark as done, each locked meanwhile,
    until all chunks are marked.

    earlier, elsewhere: called with each chunk that an earlier run, or another process of this one,
    has made. Raises UserError when the folder holds a dataset made with other settings, or cannot
    be locked."""
    identity, waiting = chunks.plan_id(plan), set(range(chunks.chunk_count(plan)))
    with Locks(folder) as locks:
        with locks.plan():
            claim(folder, plan, others=locks.enter())
        if worker.rank == 0:
            for index in sorted(waiting):
                if marker := _checked(folder, index, identity, locks):
                    waiting.remove(index)
                    earlier(marker)
        while waiting:
            before = len(waiting)
            for index in sorted(waiting):
                with locks.chunk(index) as taken:
                    marker = chunks.marker_of(folder, index, identity)
                    if marker is None and not taken:
                        continue
                    if marker is None:
                        yield index
                    else:
                        elsewhere(marker)
                    waiting.remove(index)
            if len(waiting) == before:
                time.sleep(POLL)


def _checked(folder: Path, index: int, plan: str, locks: Locks) -> Marker | None:
    """Return the marker of a chunk if every byte of the chunk is right, else remove it, so that
    some process makes the chunk again. A process that has locked a marked chunk is checking it, and
    releases it at once."""
    marker = chunks.marker_of(folder, index, plan)
    if marker is None or not chunks.faults(folder, index, plan):
        return marker
    with locks.chunk(index, wait=True):
        if chunks.faults(folder, index, plan):
            (folder / chunks.marker_name(index)).unlink(missing_ok=True)
    return None
