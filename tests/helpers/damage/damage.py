"""Damage to files: bytes, stretches of them, and values in JSON; one after another, for as long as
is asked, and no case longer than it may take."""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

ODD: list[Any] = [
    *(None, True, -1, 0, 1, 2, 10**6, 10**30, -0.5, 1e308, float("nan"), float("inf")),
    *("", "x", "1", "\x00", "None", "hrad", "specdecpp", "base", "a.b"),
    *([], [[]], [1, 2, 3, 4], ["x"], [None], {}, {"x": 1}, [[1.0], [0.5, 0.5]]),
]


def damaged(content: bytes, chance: random.Random) -> bytes:
    """`content` with one to four bytes changed, put in or left out, or its end cut off; or with a
    stretch of it moved, doubled or overwritten."""
    if chance.random() < 0.25:
        return with_a_stretch_elsewhere(content, chance)
    found = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at, byte = chance.randrange(len(found) + 1), chance.randrange(256)
        match chance.randrange(6):
            case 0 | 1:
                found[at : at + 1] = bytes([byte])
            case 2:
                before = found[at] if at < len(found) else 0
                found[at : at + 1] = bytes([before ^ (1 << chance.randrange(8))])
            case 3:
                found[at:at] = bytes([byte])
            case 4:
                del found[at : at + chance.choice([1, 1, 2, 8, 64])]
            case _:
                if chance.random() < 0.2:
                    del found[at:]
    return bytes(found)


def with_a_stretch_elsewhere(content: bytes, chance: random.Random) -> bytes:
    """Two neighbouring stretches swapped, one of them doubled, in the place of the other, or
    zeros."""
    first, middle, last = sorted(chance.randrange(len(content) + 1) for _ in range(3))
    before, one = content[:first], content[first:middle]
    two, after = content[middle:last], content[last:]
    match chance.randrange(4):
        case 0:
            return before + two + one + after
        case 1:
            return before + one + one + two + after
        case 2:
            return before + one + one[: len(two)].ljust(len(two), b"\0") + after
        case _:
            return before + bytes(len(one)) + two + after


def oddly_valued(text: str, chance: random.Random) -> str:
    """The JSON `text` with one of its values replaced, left out or named differently."""
    value = json.loads(text)
    places = list(_places(value))
    if not places:
        return json.dumps(chance.choice(ODD))
    holder, key = chance.choice(places)
    match chance.randrange(8):
        case 0 if isinstance(holder, dict):
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[chance.choice(["x", "", "dim"])] = holder.pop(key)
        case _:
            holder[key] = chance.choice(ODD)
    return json.dumps(value)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    parts = dict(enumerate(value)) if isinstance(value, list) else value
    for key, inner in parts.items() if isinstance(parts, dict) else ():
        yield value, key
        yield from _places(inner)


def odd_header(content: bytes, chance: random.Random) -> bytes:
    """A safetensors file with an `oddly_valued` header of the right length."""
    size = int.from_bytes(content[:8], "little")
    header = oddly_valued(content[8 : 8 + size].decode(), chance).encode()
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


def odd_line(content: bytes, chance: random.Random) -> bytes:
    """Of lines of JSON one that is `oddly_valued`, doubled, left out, or in another's place."""
    lines = content.splitlines(keepends=True)
    at, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    match chance.randrange(4):
        case 0:
            lines.insert(other, lines[at])
        case 1:
            del lines[at]
        case 2:
            lines[at], lines[other] = lines[other], lines[at]
        case _:
            lines[at] = oddly_valued(lines[at].decode(), chance).encode() + b"\n"
    return b"".join(lines)


def damage_one_file(folder: Path, chance: random.Random) -> None:
    """Damage a file, at the level of bytes or, where it can still be read, of values."""
    path = chance.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    content = path.read_bytes()
    by_value = {
        ".json": lambda: oddly_valued(content.decode(), chance).encode(),
        ".jsonl": lambda: odd_line(content, chance),
        ".safetensors": lambda: odd_header(content, chance),
    }
    try:
        by_bytes = path.suffix not in by_value or chance.random() < 0.5
        path.write_bytes(damaged(content, chance) if by_bytes else by_value[path.suffix]())
    except ValueError:
        path.write_bytes(damaged(content, chance))


def misplace_a_file(folder: Path, chance: random.Random) -> None:
    """Delete or empty a file, or swap two."""
    one, other = chance.sample(sorted(path for path in folder.iterdir() if path.is_file()), 2)
    match chance.randrange(3):
        case 0:
            one.unlink()
        case 1:
            one.write_bytes(b"")
        case _:
            first, second = one.read_bytes(), other.read_bytes()
            one.write_bytes(second)
            other.write_bytes(first)


LONGEST = 60.0  # seconds of one case: more is taken for a hang


def for_as_long_as_asked(
    what: str, reads: Callable[[int], bool], capsys: pytest.CaptureFixture[str]
) -> None:
    """Try damage -1, -2, ... until FUZZ_SECONDS are over. reads: whether something came out after
    that damage; some of it has to, and not all. An error says which damage led to it."""
    ends, seed, read = time.monotonic() + float(os.environ.get("FUZZ_SECONDS", "10")), 0, 0
    while time.monotonic() < ends:
        seed -= 1
        try:
            with no_hang():
                read += reads(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    with capsys.disabled():
        print(f"\n{-seed} damaged {what}, {read} of them read")
    assert 0 < read < -seed


@contextmanager
def no_hang() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, LONGEST)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _stop(number: int, frame: FrameType | None) -> None:
    raise AssertionError(f"still at work after {LONGEST:.0f} s")
