"""JSON files that know their name and checksum, and what they must hold.

A changed byte, a file in another's place, or a value of another kind is found where the file is
read, not where the value is used."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from runtime.errors import UserError
from runtime.files import write_atomically

CHECKSUM = "checksum"

Form = Mapping[str, Any]
"""What a JSON object must hold: key -> a form, or a function that says whether a value is right.
Keys that the form does not name are left alone."""


def write_checksummed(path: Path, value: dict[str, Any]) -> None:
    """Write `value` (what JSON holds) as readable JSON, atomically, with a checksum as its last
    key."""
    content = _text(path.name, value).encode()
    write_atomically(path, lambda temporary: _write(temporary, content))


def read_checksummed(path: Path, key: str, remedy: str) -> dict[str, Any]:
    """What `write_checksummed` wrote. Raises UserError when the file is missing, or is not byte for
    byte what was written.

    key: config key named in errors; remedy: what the user is told to do.
    """
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text)
    except FileNotFoundError as error:
        raise UserError(f"{key}: {path} is missing. {remedy}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{key}: {path} is damaged ({error}). {remedy}") from error
    if not isinstance(found, dict):
        raise UserError(f"{key}: {path} is damaged (it holds a {type(found).__name__}). {remedy}")
    if CHECKSUM not in found and "schema_version" in found:
        raise UserError(
            f"{key}: {path} has the older schema version {found['schema_version']}. Harvest it"
            " again"
        )
    found.pop(CHECKSUM, None)
    if text != _text(path.name, found):
        raise UserError(f"{key}: {path} is damaged (its checksum does not fit). {remedy}")
    return found


def digest(value: Any) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _text(name: str, value: dict[str, Any]) -> str:
    return json.dumps({**value, CHECKSUM: digest([name, value])}, indent=2) + "\n"


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def refuse_misfits(found: Mapping[str, Any], form: Form, where: str, remedy: str) -> None:
    """Raise UserError naming the keys whose values are missing or of another kind. where: config
    key and file."""
    if names := list(misfits(found, form)):
        raise UserError(f"{where} is damaged (no valid {', '.join(names)}). {remedy}")


def misfits(found: Any, form: Form, prefix: str = "") -> Iterator[str]:
    """The keys (dotted) whose values are missing or of another kind."""
    for key, kind in form.items():
        value = found.get(key) if isinstance(found, dict) else None
        if isinstance(kind, Mapping):
            yield from misfits(value, kind, f"{prefix}{key}.")
        elif not kind(value):
            yield f"{prefix}{key}"


def is_size(value: Any) -> bool:
    """A whole number from 0 on, in 64 bits."""
    return type(value) is int and 0 <= value < 2**63


def is_length(value: Any) -> bool:
    """A whole number from 1 on, in 32 bits."""
    return type(value) is int and 1 <= value < 2**31


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_text, value))
