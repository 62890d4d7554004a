"""JSON files that know their name and checksum: a changed byte, or a file in another's place, is
noticed."""

import hashlib
import json
from pathlib import Path
from typing import Any

from runtime.errors import UserError
from runtime.files import write_atomically

CHECKSUM = "checksum"


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
