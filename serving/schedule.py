"""Draft lengths by how many requests are decoded together: what serving engines are told."""

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
    """ranges: the first begins at one request, each at the end of the one before. Of more requests
    than the last range has nothing is said. costs: that it was chosen by, where they are known.
    Raises UserError for other ranges."""

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
        """Batch size -> length; sizes in between draft as the next larger one does."""
        sizes = sorted(lengths)
        ranges = [Range(below + 1, size, lengths[size]) for below, size in pairwise([0, *sizes])]
        return cls(tuple(joined(ranges)), costs)

    @property
    def longest(self) -> int:
        return max(one.length for one in self.ranges)


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Neighbours of one length as one."""
    found: list[Range] = []
    for one in ranges:
        if found and found[-1].length == one.length:
            one = Range(found.pop().low, one.high, one.length)
        found.append(one)
    return found


class ScheduleFile(Form):
    """The file of a program, with its command and a checksum; one of a person needs `ranges`
    alone."""

    ranges: list[tuple[Length, Length, Size]]
    costs: BatchTable | None = None
    command: str | None = None
    details: dict[str, Any] | None = None
    checksum: MeasuredChecksum = None


def read_schedule(path: str | Path, key: str = "schedule") -> Schedule:
    """Raises UserError naming `key` where the file is missing, damaged or holds no schedule."""
    remedy = 'Write e.g. {"ranges": [[1,4,5],[5,8,2]]}'
    found = read_json(Path(path), ScheduleFile, key, remedy, KIND)
    return Schedule(tuple(Range(*each) for each in found.ranges), found.costs)


def write_schedule(
    path: Path, schedule: Schedule, command: str, details: Mapping[str, Any] | None = None
) -> None:
    """details: whatever else is known of it (speeds, costs), as JSON holds it."""
    facts = {
        "ranges": [list(one) for one in schedule.ranges],
        "costs": schedule.costs and asdict(schedule.costs),
        "command": command,
        "details": details,
    }
    write_checksummed(path, facts, KIND)
