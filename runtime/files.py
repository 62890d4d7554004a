"""Files and folders that are written completely or not at all, and errors that name the remedy
when they cannot be written."""

import errno
import fcntl
import glob
import hashlib
import json
import math
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import quote

from safetensors import SafetensorError, safe_open

from runtime.errors import UserError

ROOT = Path(__file__).resolve().parents[1]  # of the checkout, or the folder it is installed in
_FULL = "Free some space, or choose another folder, and run the same command again"
_OTHERWISE = "Choose another place, or mend this one, and run the same command again"
_LOCKED = "Make it writable, or choose another folder"
_REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "Raise the limit on file sizes, or choose another folder",
    errno.EIO: "Check the disk and run the same command again",
    errno.EROFS: _LOCKED,
    errno.EACCES: _LOCKED,
    errno.EPERM: _LOCKED,
}
LONGEST_PART = 150  # bytes of a name that is made from others
_HOST = hashlib.sha256(platform.node().encode()).hexdigest()[:6]


def file_name(*parts: object) -> str:
    """Return a name for a file or folder made of names with any characters: "org/mine" becomes
    "org%2Fmine", and `parts` are joined by "+". No two lists of parts have the same name; one
    longer than `LONGEST_PART` bytes is cut and gets a hash."""
    name = "+".join(quote(str(part), safe="=,.[]-_~@:") for part in parts)
    name = f"%2E{name[1:]}" if name.startswith(".") else name  # no hidden file, and not ".."
    if len(name) <= LONGEST_PART:
        return name
    return f"{name[:LONGEST_PART]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def installed(path: str) -> str:
    """Return the path of a file that comes with the toolkit: `path` itself if the working directory
    has it, otherwise the installed file."""
    return path if Path(path).exists() else str(ROOT / path)


def write_json(path: Path, value: Any, key: str = "out") -> None:
    """Write `value` as readable JSON, atomically. NaN, which JSON does not have, becomes null."""
    content = (json.dumps(without_nan(value), indent=2) + "\n").encode()
    write_atomically(path, lambda temporary: temporary.write_bytes(content), key)


def write_atomically(path: Path, write: Callable[[Path], object], key: str = "out") -> None:
    """Let `write` fill a temporary file, force it to disk, then give it its name. Nothing is left
    when it fails.

    Every process has its own temporary file, so with several writers the last one's file remains,
    complete. Leftovers of a killed process are removed by the next write on the same machine.
    key: config key named in errors."""
    temporary = temporary_of(path)
    with _said(path, key):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_left_over(path)
        try:
            write(temporary)
            _sync(temporary)
            temporary.replace(path)
            _sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def temporary_of(path: Path, pid: int | None = None) -> Path:
    """Return the name of the temporary file of a process of this machine, by default of this
    one."""
    return path.with_name(f".{path.name}.{_HOST}-{pid or os.getpid()}.tmp")


def remove_left_over(path: Path) -> None:
    """Remove temporary files of processes of this machine that have ended."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.{_HOST}-*.tmp"):
        pid = left.name.removesuffix(".tmp").rpartition("-")[2]
        if pid.isdecimal() and not alive(int(pid)):
            left.unlink(missing_ok=True)


def alive(pid: int) -> bool:
    """Return whether a process with this id runs on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return True


@contextmanager
def _said(path: Path, key: str = "out") -> Iterator[None]:
    """Turn errors of the storage into a UserError that says in one line why `path` cannot be
    written, and what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        what = remedy(error) or _OTHERWISE
        raise UserError(f"{key}: {path} cannot be written ({_reason(error)}). {what}") from error


def remedy(error: BaseException) -> str:
    """Return what the user can do about an error of the storage; "" if that is unknown."""
    if isinstance(error, OSError) and error.errno in _REMEDIES:
        return _REMEDIES[error.errno]
    return next((text for code, text in _REMEDIES.items() if os.strerror(code) in str(error)), "")


def _reason(error: BaseException) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def without_nan(value: Any) -> Any:
    """Return `value` with None (JSON's null) in place of NaN."""
    if isinstance(value, Mapping):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checked_folder(key: str, value: str | Path, kind: str = "folder") -> Path:
    """Return `value` as a path. Raises UserError naming `key` if it cannot name a folder (or other
    `kind` of path) and files beside it that are named after it."""
    if not Path(os.path.realpath(value)).name or (kind == "file" and Path(value).is_dir()):
        raise UserError(f"{key}: {value} is no {kind} of its own. Choose another {key}=<{kind}>")
    return Path(value)


def refuse_foreign_file(path: Path, program: str, key: str = "out") -> None:
    """Raise UserError unless the file `path` is new or was written by `program` ("tune"), which its
    recorded command tells. Makes its folder."""
    mark = rf"python (\S*/)?{program}\.py\b|draftpredict {program}\b"
    choose = f"Choose another {key}=<file>"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        foreign = path.is_symlink() or path.exists() and not path.is_file()
        foreign = foreign or path.is_file() and not re.match(mark, _command(path))
    except OSError as error:
        raise UserError(f"{key}: {path} cannot be made ({error.strerror}). {choose}") from error
    if foreign:
        raise UserError(f"{key}: {path} holds something else, which would be lost. {choose}")


def _command(path: Path) -> str:
    """Return the command recorded in a file: by `command` of JSON or of a safetensors header, or by
    the comment that ends a page; "" if there is none."""
    content = path.read_bytes()
    try:
        with suppress(SafetensorError), safe_open(path, "np") as tensors:
            return str(json.loads((tensors.metadata() or {})["command"]))
        return str(json.loads(content)["command"])
    except (ValueError, RecursionError):
        comment = re.search(rb"^<!-- (.*) -->\s*\Z", content, re.MULTILINE)
        return comment[1].decode(errors="replace") if comment else ""
    except (KeyError, TypeError):
        return ""


def table_beside(out: Path) -> Path:
    """Return the file of the table that is written with the JSON file `out`: its name with .parquet
    in place of .json. Raises UserError for a table that stands there without `out`."""
    if out.suffix == ".parquet":
        raise UserError(
            f"out: expected the name of a JSON file, got {out}, which a table has beside it. Choose"
            " another out=<file>"
        )
    table = out.with_name(f"{out.name.removesuffix('.json')}.parquet")
    written = table.is_file() and not table.is_symlink() and out.exists()
    if os.path.lexists(table) and not written:
        raise UserError(
            f"out: {table}, the table beside {out}, holds something else, which would be lost."
            " Choose another out=<file>"
        )
    return table


def refuse_foreign(folder: Path, *marks: str, key: str = "out") -> None:
    """Raise UserError unless a program may write `folder`, and later replace it: it is new or
    empty, or has a file that marks the program's own results and no other result within. Never the
    current folder, the home folder, or one above these.

    marks: patterns of file names, one of which has to be there; key: config key named in errors"""
    whole, choose = Path(os.path.realpath(folder)), f"Choose another {key}=<folder>"
    kept = [Path.cwd(), Path(os.path.expanduser("~")).resolve()]
    if any(whole in (one, *one.parents) for one in kept):
        raise UserError(
            f"{key}: {folder} is the current folder, the home folder or one above them, which hold"
            f" more than a result. {choose}"
        )
    parent = next(above for above in whole.parents if above.exists())
    try:  # root may write everywhere, and still make nothing in /proc
        tempfile.TemporaryFile(dir=parent).close()  # has no name that a killed process leaves
    except OSError as error:
        raise UserError(
            f"{key}: {folder} cannot be made, {parent} is no folder to write in. {choose}"
        ) from error
    _put_back(whole)
    if whole.exists() and (other := _foreign(whole, marks)):
        raise UserError(
            f"{key}: {folder} holds something else, which would be lost: {other}. {choose}"
        )
    if whole.exists() and not os.access(whole, os.W_OK):
        raise UserError(
            f"{key}: {folder} is read-only. Make it writable or choose another {key}=<folder>"
        )


def _foreign(folder: Path, marks: Iterable[str]) -> str | None:
    """Return the first thing in an existing `folder` that a program which leaves `marks` has not
    written; None if there is none."""
    if not folder.is_dir():
        return "a file"
    content = sorted(one for one in folder.iterdir() if not fnmatch(one.name, ".*.tmp"))
    if content and not any(one.is_file() for mark in marks for one in folder.glob(mark)):
        return content[0].name
    for inner in filter(Path.is_dir, content):
        for result in inner.rglob("*.json"):  # every result has one
            return str(result.relative_to(folder))
    return None


@contextmanager
def replaced_folder(folder: Path, marker: str, key: str = "out") -> Iterator[Path]:
    """Write into a new folder that takes `folder`'s place when the block ends without an error, and
    is on disk.

    marker: a file by which a folder written earlier is known (`refuse_foreign`); key: config key
    named in errors. Killed at the worst moment, between the two renames, it leaves the earlier
    folder as ``.<name>.old``, and the next call puts it back."""
    refuse_foreign(folder, marker, key=key)
    folder = folder.resolve()
    fresh, old = folder.with_name(f".{folder.name}.writing"), _old(folder)
    with _said(folder, key):
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
    try:
        yield fresh
        with _said(folder, key):
            for path in (*fresh.rglob("*"), fresh):
                _sync(path)
            shutil.rmtree(old, ignore_errors=True)
            if folder.exists():
                folder.rename(old)
            fresh.rename(folder)
            _sync(folder.parent)
    except BaseException:
        _put_back(folder)
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Raise UserError while another process is in this block for the same `folder`. Uses a lock
    file beside it, which is released when its process dies."""
    path = folder.resolve().with_name(f".{folder.resolve().name}.lock")
    with _said(folder):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = path.exists() and os.path.samestat(
                os.fstat(file.fileno()), path.stat()
            )  # not removed meanwhile
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise UserError(
                    f"out: {path} takes no locks ({error.strerror}). Choose another out=<folder>"
                ) from error
            mine = False
        if not mine:
            raise UserError(
                f"out: another process is making {folder}. Wait for it, or choose another"
                " out=<folder>"
            )
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _put_back(folder: Path) -> None:
    if _old(folder).is_dir() and not folder.exists():
        with suppress(FileNotFoundError):  # another process has done it
            _old(folder).rename(folder)
