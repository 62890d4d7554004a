"""Lines of JSON: those from elsewhere, prompts and responses, are checked before anything is made
of them; those written here have a checksum each."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard, TypeVar

from runtime.errors import UserError
from runtime.json_files import fitting

T = TypeVar("T")

SURROGATE = re.compile("[\ud800-\udfff]")  # half of a character
DAMAGED = "its checksum does not fit"


def parse_object(line: bytes, where: str, form: str) -> dict[str, Any]:
    """The JSON object on one line. Raises UserError. where: config key and line; form: what to
    write there instead."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # also what is not UTF-8
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(f"{where} is not JSON ({reason}). Mend or remove that line") from error
    if not isinstance(row, dict):
        raise UserError(f"{where} is not a JSON object. {form}")
    return row


def is_text(value: object) -> TypeGuard[str]:
    """Also whether it can be encoded: JSON may hold halves of characters."""
    return isinstance(value, str) and not SURROGATE.search(value)


def sealed(row: Mapping[str, Any]) -> bytes:
    """A line, without its end, that holds `row` and a checksum."""
    return with_checksum(json.dumps(row).encode()[:-1])


def read_sealed(line: bytes, validate: Callable[[bytes], T]) -> T:
    """What `validate`, of a model, makes of a `sealed` line. Raises ValueError saying in a few
    words what is wrong."""
    text = unsealed(line)
    if text is None:
        raise ValueError(DAMAGED)
    return fitting(lambda: validate(text))


def unsealed(line: bytes) -> bytes | None:
    """`sealed`, undone: the line without its checksum, None where a byte of it has changed."""
    start = line.rpartition(b', "checksum"')[0]
    return start + b"}" if line == with_checksum(start) else None


def with_checksum(line: bytes) -> bytes:
    """line: a JSON object without its closing brace."""
    return line + f', "checksum": "{hashlib.sha256(line).hexdigest()[:16]}"}}'.encode()
