"""Draft lengths by the number of requests decoded together, for serving engines."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from decoding.batch_cost import BatchTable
from runtime.errors import UserError
from runtime.json_files import Form, Length, MeasuredChecksum, Size, read_json, write_checksummed

KIND = "schedule"  # in checksums: the file may be renamed


class Range(NamedTuple):
    """Draft length for `low` to `high` requests at once, both included: `length` draft tokens, 0
    for none."""

    low: int
    high: int
    length: int


@dataclass(frozen=True)
class Schedule:
    """Draft lengths by ranges. ranges: the first begins at one request, each where the one before
    ends; beyond the last, no length is given. costs: those it was chosen by, if known. Raises
    UserError for other ranges."""

    ranges: tuple[Range, ...]
    costs: BatchTable | None = None

    def __post_init__(self) -> None:
        lows = [1, *(one.high + 1 for one in self.ranges)]
        if not self.ranges or any(
            low != one.low or one.high < low or one.length < 0
            for low, one in zip(lows, self.ranges, strict=False)
        ):
            raise UserError(
                "schedule: expected ranges [low, high, length] that begin at 1 and follow each"
                f" other, got {[list(one) for one in self.ranges]}. Write e.g. [[1,4,5],[5,8,2]]"
            )

    @classmethod
    def at(cls, lengths: Mapping[int, int], costs: BatchTable | None = None) -> "Schedule":
        """Return the schedule of a mapping from batch size to length; sizes in between draft as the
        next larger one does."""
        sizes = sorted(lengths)
        ranges = [Range(below + 1, size, lengths[size]) for below, size in pairwise([0, *sizes])]
        return cls(tuple(joined(ranges)), costs)

    @property
    def longest(self) -> int:
        return max(one.length for one in self.ranges)


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Join neighbouring ranges of the same length."""
    merged: list[Range] = []
    for one in ranges:
        if merged and merged[-1].length == one.length:
            one = Range(merged.pop().low, one.high, one.length)
        merged.append(one)
    return merged


class ScheduleFile(Form):
    """The file of a schedule: from a program with its command and a checksum; one written by hand
    needs `ranges` alone."""

    ranges: list[tuple[Length, Length, Size]]
    costs: BatchTable | None = None
    command: str | None = None
    details: dict[str, Any] | None = None
    checksum: MeasuredChecksum = None


def read_schedule(path: str | Path, key: str = "schedule") -> Schedule:
    """Read a schedule. Raises UserError naming `key` if the file is missing, damaged or holds
    none."""
    remedy = 'Write e.g. {"ranges": [[1,4,5],[5,8,2]]}'
    file = read_json(Path(path), ScheduleFile, key, remedy, KIND)
    return Schedule(tuple(Range(*each) for each in file.ranges), file.costs)


def write_schedule(
    path: Path, schedule: Schedule, command: str, details: Mapping[str, Any] | None = None
) -> None:
    """Write a schedule. details: further facts about it (speeds, costs), as JSON."""
    facts = {
        "ranges": [list(one) for one in schedule.ranges],
        "costs": schedule.costs and asdict(schedule.costs),
        "command": command,
        "details": details,
    }
    write_checksummed(path, facts, KIND)
