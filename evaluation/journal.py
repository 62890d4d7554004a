"""What a long comparison has decoded so far, on disk: an interrupted run goes on where it was."""

import fcntl
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from runtime.errors import UserError
from runtime.files import file_hash
from runtime.json_files import Form, digest
from runtime.json_lines import read_sealed, sealed


class Recorded(Protocol):
    """A dataclass that JSON can hold."""

    def to_dict(self) -> dict[str, Any]: ...


T = TypeVar("T", bound=Recorded)
Held = TypeVar("Held")


class Turn(Form, Generic[Held]):
    """A line of a journal."""

    key: str
    found: dict[str, Held]


class Journal(Generic[T]):
    """One line per turn: what every method did with the same thing, such as a request of one
    repeat. Turns are the unit, so that the methods that are compared on it always ran next to each
    other, in one process.

    A last line that was not finished is dropped: a run was killed as it wrote. The path must name
    everything the traces depend on (`journal_path`). A journal without turns leaves no file behind.

    turns: key -> method -> what `holds` is of; resumed: how many of them an earlier run has done
    Raises UserError when the file is damaged, or when another process writes to it.
    """

    def __init__(self, path: Path, holds: type[T]) -> None:
        self.path = path
        self._form = Turn[holds]  # type: ignore[valid-type]
        self.turns: dict[str, dict[str, T]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.truncate(self._read())
        except BlockingIOError as error:
            self._file.close()
            raise UserError(
                f"out: another run with these settings writes {path}. Wait, or set out=..."
            ) from error
        except UserError:
            self._file.close()
            raise
        self.resumed = len(self.turns)

    def add(self, key: str, found: dict[str, T]) -> None:
        self.turns[key] = found
        turn = {"key": key, "found": {name: one.to_dict() for name, one in found.items()}}
        self._file.write(sealed(turn) + b"\n")
        self._file.flush()

    def remove(self) -> None:
        """Everything it holds is saved elsewhere."""
        self.turns.clear()

    def __enter__(self) -> "Journal[T]":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self.turns:
            self.path.unlink(missing_ok=True)
        self._file.close()

    def _read(self) -> int:
        """Take in every whole line; returns their length in bytes."""
        whole = 0
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            if line.endswith(b"\n"):
                self._take(line[:-1], number)
                whole += len(line)
        return whole

    def _take(self, line: bytes, number: int) -> None:
        try:
            turn = read_sealed(line, self._form.model_validate_json)
        except ValueError as error:
            raise UserError(
                f"out: {self.path} is damaged in line {number} ({error}). Remove that line to"
                " decode its turn again, or delete the file to start over"
            ) from error
        self.turns[turn.key] = turn.found


def journal_path(out: Path, facts: Any) -> Path:
    """Beside `out`, named after `facts` (what JSON holds): an interrupted run of exactly these."""
    out = out.resolve()
    return out.with_name(f".{out.name}-{digest(facts)[:12]}.resume")


def file_hashes(settings: Any) -> list[str]:
    """Of every file that `settings` names, those in folders it names (checkpoints) included."""
    if isinstance(settings, str):
        named = [Path(settings), *Path(settings).glob("*")] if settings else []
        return [file_hash(path) for path in sorted(named) if path.is_file()]
    inner = (
        settings.values()
        if isinstance(settings, Mapping)
        else settings
        if isinstance(settings, list)
        else []
    )
    return [found for one in inner for found in file_hashes(one)]
