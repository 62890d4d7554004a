"""Lines of JSON. Prompts and responses from elsewhere are checked before use; every line written
here has a checksum."""

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from runtime.errors import UserError
from runtime.json_files import BOM, GZIP, fitting, other_format

T = TypeVar("T")

SURROGATE = re.compile("[\ud800-\udfff]")  # half of a character
DAMAGED = "its checksum does not fit"


def read_objects(file: Path, key: str, form: str) -> list[tuple[str, int, dict[str, Any]]]:
    """Return the objects in a file that a person or another program wrote, each with the file and
    the line in words and the number of the line, from 1 on: one object on each line that is not
    blank, or all in one JSON array. A byte order mark and gzip are taken off.

    Raises UserError naming the line that is no object, or what the file is instead.
    key: config key named in errors; form: what to write on a line"""
    try:
        content = file.read_bytes()
        if content.startswith(GZIP):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{key}: {file} cannot be read ({reason}). Write it again") from error
    content = content.removeprefix(BOM)
    if other := other_format(content) or _other_text(content):
        raise UserError(f"{key}: {file} {other}. {form}")
    array = _json(content) if content.lstrip().startswith(b"[") else None
    if array == [] or (array and isinstance(array[0], dict)):
        rows = [(f"{file} element {number}", number, row) for number, row in enumerate(array, 1)]
        for where, _, row in rows:
            if not isinstance(row, dict):
                raise UserError(f"{key}: {where} is not a JSON object. {form}")
        return rows
    return [
        (f"{file} line {number}", number, parse_object(line, f"{key}: {file} line {number}", form))
        for number, line in enumerate(content.splitlines(), 1)
        if line.strip()
    ]


def _other_text(content: bytes) -> str:
    """Return what a text is if it is not JSON a line (then every line would be at fault), else
    ""."""
    lines = content.strip().splitlines() or [b"{}"]
    try:
        lines[0].decode()
    except UnicodeDecodeError:
        return ""
    if _json(lines[0]) is not None:
        return ""
    if re.match(rb"\s*\[\s*\{", content) and _json(content) is None:
        return "is a JSON array that is damaged or was cut off"
    if lines[0][:1] in (b"{", b"["):
        opened = len(lines) > 1 and lines[0].strip() in (b"{", b"[")
        if isinstance(whole := _json(content), list) or not (opened or whole):
            return ""
        return "has objects of several lines, expected one a line, as jq -c writes them"
    for name, mark, option in (("TSV", b"\t", ", sep='\\t'"), ("CSV", b",", "")):
        if len(lines) > 1 and mark in lines[0] and mark in lines[1]:
            to_json = f"read_csv(file{option}).to_json(out, orient='records', lines=True)"
            return f"is {name}, expected a JSON object a line, as pandas.{to_json} writes"
    return "is plain text, expected a JSON object a line"


def _json(content: bytes) -> Any:
    """Return the JSON value, None if it is not valid."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def parse_object(line: bytes, where: str, form: str) -> dict[str, Any]:
    """Return the JSON object on one line. Raises UserError if it holds none. where: config key and
    line; form: what to write there instead."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # also what is not UTF-8
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        utf8 = "Save the file as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        remedy = utf8 or "Mend or remove that line"
        raise UserError(f"{where} is not JSON ({reason}). {remedy}") from error
    if not isinstance(row, dict):
        raise UserError(f"{where} is not a JSON object. {form}")
    return row


def is_text(value: object) -> TypeGuard[str]:
    """Return whether `value` is text that UTF-8 can encode: JSON may hold lone surrogates."""
    return isinstance(value, str) and not SURROGATE.search(value)


def sealed(row: Mapping[str, Any]) -> bytes:
    """Return a line, without its newline, that holds `row` and a checksum."""
    return with_checksum(json.dumps(row).encode()[:-1])


def read_sealed(line: bytes, validate: Callable[[bytes], T]) -> T:
    """Return a `sealed` line as validated by `validate`, a model's validation. Raises ValueError
    saying in a few words what is wrong."""
    text = unsealed(line)
    if text is None:
        raise ValueError(DAMAGED)
    return fitting(lambda: validate(text))


def unsealed(line: bytes) -> bytes | None:
    """Return a `sealed` line without its checksum; None if a byte of it has changed."""
    start = line.rpartition(b', "checksum"')[0]
    return start + b"}" if line == with_checksum(start) else None


def with_checksum(line: bytes) -> bytes:
    """Return a line with its checksum. line: a JSON object without its closing brace."""
    return line + f', "checksum": "{hashlib.sha256(line).hexdigest()[:16]}"}}'.encode()
