"""JSON files that people may edit or damage. A pydantic model says what a file must hold; changed
bytes, swapped files and values of a wrong type are detected when the file is read."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import from_json

from runtime.errors import UserError
from runtime.files import without_nan, write_atomically

T = TypeVar("T")
FormT = TypeVar("FormT", bound="Form")
CHECKSUM = "checksum"
BOM, GZIP = b"\xef\xbb\xbf", b"\x1f\x8b"
UNPACK = "Unpack it"
FORMATS = {  # how files of other formats begin
    GZIP: ("gzip", UNPACK),
    b"BZh": ("bzip2", UNPACK),
    b"\xfd7zXZ": ("xz", UNPACK),
    b"(\xb5/\xfd": ("Zstandard", UNPACK),
    b"PK\3\4": ("a zip archive", UNPACK),
    b"PAR1": ("Parquet", "Convert it"),
    b"ARROW1": ("Arrow", "Convert it"),
    b"\xff\xfe": ("UTF-16", "Save it as UTF-8"),
    b"\xfe\xff": ("UTF-16", "Save it as UTF-8"),
}
STRICT = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")
"""No text for a number or the reverse, no NaN, no infinity, no unknown keys."""
Size = Annotated[int, Field(ge=0, lt=2**63)]
"""A whole number from 0 on, in 64 bits."""
Length = Annotated[int, Field(ge=1, lt=2**31)]
"""A whole number from 1 on, in 32 bits."""


def _of_a_program(checksum: str | None, info: ValidationInfo) -> str | None:
    if info.data.get("command") is not None and checksum is None:
        raise ValueError("what a program wrote has a checksum")
    return checksum


MeasuredChecksum = Annotated[
    str | None, AfterValidator(_of_a_program), Field(validate_default=True)
]
"""Header of a file that a program writes, with its `command`, or a person, without either. After an
edit both keys have to go."""


class Form(BaseModel):
    """Model of an object in a file. With a field `checksum: str` it describes files written by
    `write_checksummed`.

    version: name and value of the key for the file's format version; None if it has none."""

    model_config = STRICT
    version: ClassVar[tuple[str, int] | None] = None
    _written: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def written(self) -> dict[str, Any]:
        """The object as the file holds it, including keys that the form does not name, without the
        checksum."""
        return self._written

    @classmethod
    def of(cls: type[FormT], value: Mapping[str, Any]) -> FormT:
        """Validate `value`, an object as JSON holds it. Raises ValueError saying in a few words
        what does not fit."""
        form = fitting(lambda: cls.model_validate_json(json.dumps(value)))
        form._written = {key: part for key, part in value.items() if key != CHECKSUM}
        return form


class OpenForm(Form):
    """A form that ignores keys that it does not name."""

    model_config = ConfigDict(extra="ignore")


def write_checksummed(
    path: Path, value: Mapping[str, Any], kind: str = "", key: str = "out"
) -> None:
    """Write `value` (what JSON holds; NaN becomes null) as readable JSON, atomically, with a
    checksum as its last key.

    The checksum covers the file's name too, or `kind` instead where people may rename the file.
    key: config key named in errors."""
    plain = json.loads(json.dumps(without_nan(value)))
    plain.pop(CHECKSUM, None)
    content = _text(kind or path.name, plain).encode()
    write_atomically(path, lambda temporary: temporary.write_bytes(content), key)


def read_json(path: Path, form: type[FormT], key: str, remedy: str, kind: str = "") -> FormT:
    """Return the object in a file. Raises UserError if the file is missing, damaged or of another
    version, or does not fit `form`.

    A checksum is verified if there is one; `form` says whether it is required. key: config key
    named in errors; remedy: what the user is told to do; kind: as in `write_checksummed`."""
    content = _content(path, key, remedy)  # read once: another process may remove the file
    object_, where = _object_in(content, path, key, remedy), f"{key}: {path}"
    name, reads = form.version or ("", 0)
    if object_.get(name, reads) != reads:
        version = f"{name.replace('_', ' ')} {str(object_[name])[:40]}"
        again = remedy or "Make it again"
        raise UserError(f"{where} has {version}, this version reads {reads}. {again}")
    needed = CHECKSUM in form.model_fields and form.model_fields[CHECKSUM].is_required()
    if needed and CHECKSUM not in object_:
        raise UserError(
            f"{where} is damaged or of an earlier version (it has no checksum). {remedy}"
        )
    bare = {name: value for name, value in object_.items() if name != CHECKSUM}
    if CHECKSUM in object_ and content != _text(kind or path.name, bare).encode():
        raise UserError(f"{where} is damaged (its checksum does not fit). {remedy}")
    try:
        return form.of(object_)
    except ValueError as error:
        raise UserError(f"{where} is damaged ({error}). {remedy}") from error


def read_object(path: Path, key: str, remedy: str) -> dict[str, Any]:
    """Return the object that a JSON file holds, of any form. Raises UserError if the file is
    missing or holds no object."""
    return _object_in(_content(path, key, remedy), path, key, remedy)


def _content(path: Path, key: str, remedy: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"{key}: {path} is missing. {remedy}") from error
    except OSError as error:
        raise UserError(f"{key}: {path} is damaged ({error}). {remedy}") from error


def other_format(content: bytes) -> str:
    """Return what a file is that cannot be UTF-8 text, and what to do; "" if it may be text."""
    for begins, (name, remedy) in FORMATS.items():
        if content.startswith(begins):
            return f"is {name}, expected JSON. {remedy}"
    return "is binary or UTF-16, expected JSON in UTF-8" if b"\0" in content[:4096] else ""


def _object_in(content: bytes, path: Path, key: str, remedy: str) -> dict[str, Any]:
    if other := other_format(content):
        raise UserError(f"{key}: {path} is damaged (it {other}). {remedy}")
    try:
        text = content.decode("utf-8-sig")
        from_json(text, allow_inf_nan=False)  # refuses what is nested deeply
        value = json.loads(text, object_pairs_hook=_once_each, parse_float=_finite)
    except ValueError as error:
        raise UserError(f"{key}: {path} is damaged ({error}). {remedy}") from error
    if not isinstance(value, dict):
        raise UserError(f"{key}: {path} is damaged (it holds a {type(value).__name__}). {remedy}")
    return value


def fitting(validate: Callable[[], T]) -> T:
    """Return what `validate`, a model's validation, returns. Raises ValueError saying in a few
    words what is wrong."""
    try:
        return validate()
    except ValidationError as error:
        places = {".".join(map(_shown, one["loc"])): one["msg"] for one in error.errors()}
        names = ", ".join(list(places)[:4])
        reason = f"no valid {names}" if names else places[""].removeprefix("Value error, ")
    except (UserError, LookupError, ArithmeticError) as error:  # of a constructor
        reason = str(error)
    raise ValueError(reason)


def digest(value: Any) -> str:
    """Return the SHA-256 of a JSON value, independent of the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _shown(part: int | str) -> str:
    """Return a key, which may hold any characters, as errors show it."""
    text = str(part)[:40]
    return text if text.isprintable() else ascii(text)


def _once_each(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    unique: dict[str, Any] = {}
    for key, value in pairs:
        if key in unique:
            raise ValueError(f"it has {key[:40]!r} twice")
        unique[key] = value
    return unique


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def _text(name: str, value: dict[str, Any]) -> str:
    return json.dumps({**value, CHECKSUM: digest([name, value])}, indent=2) + "\n"
