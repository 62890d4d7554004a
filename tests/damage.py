"""Damage to files: single bytes, and values in JSON."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ODD = [None, True, -1, 0, 1, 2, 10**6, 10**30, -0.5, 1e308, float("nan"), float("inf"), "", "x", "1", "\x00", "None"]
ODD += [[], [[]], [1, 2, 3, 4], ["x"], [None], {}, {"x": 1}, "hrad", "specdecpp", "base", "a.b", [[1.0], [0.5, 0.5]]]


def damaged(content: bytes, chance: random.Random) -> bytes:
    """`content` with one to four bytes changed, put in or left out, or its end cut off."""
    found = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at, byte = chance.randrange(len(found) + 1), chance.randrange(256)
        match chance.randrange(6):
            case 0 | 1:
                found[at : at + 1] = bytes([byte])
            case 2:
                found[at : at + 1] = bytes([(found[at] if at < len(found) else 0) ^ (1 << chance.randrange(8))])
            case 3:
                found[at:at] = bytes([byte])
            case 4:
                del found[at : at + chance.choice([1, 1, 2, 8, 64])]
            case _:
                if chance.random() < 0.2:
                    del found[at:]
    return bytes(found)


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
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)


def odd_header(content: bytes, chance: random.Random) -> bytes:
    """A safetensors file with an `oddly_valued` header of the right length."""
    size = int.from_bytes(content[:8], "little")
    header = oddly_valued(content[8 : 8 + size].decode(), chance).encode()
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


def damage_one_file(folder: Path, chance: random.Random) -> None:
    """Damage a file of a checkpoint, at the level of bytes or, where it can still be read, of values."""
    path = chance.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    content = path.read_bytes()
    by_value = {
        ".json": lambda: oddly_valued(content.decode(), chance).encode(),
        ".safetensors": lambda: odd_header(content, chance),
    }
    try:
        path.write_bytes(by_value[path.suffix]() if chance.random() < 0.5 else damaged(content, chance))
    except ValueError:
        path.write_bytes(damaged(content, chance))
