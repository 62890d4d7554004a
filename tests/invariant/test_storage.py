"""A harvest that cannot write says so in one line, and nothing that was good is lost."""

import errno
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_gen.storage.dataset import Harvest, verify
from decoding.models.loading import ModelPair
from runtime.cli import explain
from runtime.errors import UserError
from tests.helpers.data.datasets import make_dataset

PROMPTS = 12


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory of its own, 64 KiB small: a quarter of the dataset is enough to fill
    it."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"needs the right to mount: {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def resized(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True)


def said(error: BaseException) -> str:
    """What the command line makes of it."""
    assert isinstance(error, Exception)
    line = explain(error)
    assert line and "\n" not in line
    return line


def assert_finishes(pair: ModelPair, folder: Path, original: Path) -> None:
    """The same command makes what is missing."""
    made = make_dataset(pair, folder, PROMPTS)
    assert made["content"] == Harvest.open(original).manifest.content


def test_a_disk_that_is_full_keeps_what_is_finished(
    pair: ModelPair, original: Path, disk: Path
) -> None:
    folder = disk / "data"
    with pytest.raises(
        UserError, match=r"^out: .* cannot be written .*No space left on device.* Free some space"
    ):
        make_dataset(pair, folder, PROMPTS)
    markers = sorted(path.name for path in folder.glob("chunk-*.json"))
    assert 0 < len(markers) < PROMPTS // 3 and not list(folder.glob(".*.tmp"))
    with pytest.raises(UserError, match="is only half harvested"):
        Harvest.open(folder)
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("*-0*")}
    resized(disk, "size=4m")
    assert_finishes(pair, folder, original)
    checksummed = {path for path in kept if f"chunk-{path.stem.split('-')[1]}.json" in markers}
    assert all(path.stat().st_mtime_ns == kept[path] for path in checksummed)


def test_a_folder_that_is_read_only_can_be_read_and_checked(
    pair: ModelPair, original: Path, disk: Path
) -> None:
    resized(disk, "size=4m")
    folder = Path(shutil.copytree(original, disk / "data"))
    (folder / "rounds-00001.parquet").unlink()
    before = {path.name: path.read_bytes() for path in folder.glob("*.*")}
    resized(disk, "ro")
    assert verify(folder) == [f"{folder / 'rounds-00001.parquet'} is missing"]
    assert len(Harvest.open(folder).records("mixed", "all")["group"])
    with pytest.raises(OSError) as error:
        make_dataset(pair, folder, PROMPTS)
    assert (
        said(error.value)
        == f"[Errno 30] Read-only file system: '{folder / '.lock'}'. Make it writable, or choose"
        " another folder"
    )
    assert {path.name: path.read_bytes() for path in folder.glob("*.*")} == before
    resized(disk, "rw")
    assert_finishes(pair, folder, original)


def test_a_limit_on_file_sizes(pair: ModelPair, original: Path, tmp_path: Path) -> None:
    """The kernel refuses every byte beyond the limit, as it does on a full disk: needs no
    rights."""
    folder = Path(shutil.copytree(original, tmp_path / "data"))
    (folder / "rounds-00002.parquet").unlink()
    before = {path.name: path.read_bytes() for path in folder.glob("*-0000[013].*")}
    limit, action = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
        with pytest.raises(
            UserError, match="^out: .*parquet cannot be written .*File too large.* Raise the limit"
        ):
            make_dataset(pair, folder, PROMPTS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, action)
    assert {path.name: path.read_bytes() for path in folder.glob("*-0000[013].*")} == before
    assert not list(folder.glob(".*.tmp"))
    assert_finishes(pair, folder, original)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("name", ["rounds-00001.parquet", "chunk-00001.json", "manifest.json"])
def test_any_file_may_fail(
    pair: ModelPair,
    original: Path,
    tmp_path: Path,
    name: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path(shutil.copytree(original, tmp_path / "data"))
    (folder / "responses-00001.parquet").unlink()
    write = Path.write_bytes

    def failing(path: Path, content: bytes) -> int:
        if path.name.startswith(f".{name}.") and path.suffix == ".tmp":
            write(path, bytes(content)[:10])
            raise OSError(code, os.strerror(code), str(path))
        return write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", failing)
        with pytest.raises(
            UserError, match=rf"^out: \S*{name} cannot be written .{os.strerror(code)}.\. \w+"
        ):
            make_dataset(pair, folder, PROMPTS)
    assert not list(folder.glob(".*.tmp"))
    assert_finishes(pair, folder, original)
    assert verify(folder) == []
