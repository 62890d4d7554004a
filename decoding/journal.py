"""What a long comparison has decoded so far, on disk: an interrupted run goes on where it was."""

import json
from pathlib import Path

from decoding.trace import Trace
from predictors.errors import UserError


class Journal:
    """One line per turn: a request of one repeat, decoded by every method. Turns are the unit, so that the methods that
    are compared on a request always ran next to each other, in one process.

    A line that was not finished is dropped. The path must name everything the traces depend on.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.turns: dict[str, dict[str, Trace]] = {}
        whole = 0
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
            if line.endswith(b"\n"):
                key, turn = self._read(line)
                self.turns[key] = turn
                whole += len(line)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._file.truncate(whole)

    def _read(self, line: bytes) -> tuple[str, dict[str, Trace]]:
        try:
            turn = json.loads(line)
            return turn["key"], {name: Trace.from_dict(trace) for name, trace in turn["traces"].items()}
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"out: {self.path} is damaged ({error}). Delete it to start over") from error

    def add(self, key: str, traces: dict[str, Trace]) -> None:
        self.turns[key] = traces
        line = json.dumps({"key": key, "traces": {name: trace.to_dict() for name, trace in traces.items()}})
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Leaves no file behind when nothing was decoded."""
        self._file.close()
        if not self.turns:
            self.path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Everything it holds is saved elsewhere."""
        self.close()
        self.path.unlink(missing_ok=True)
