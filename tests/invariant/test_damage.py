"""Every damage to every kind of file is found and named, and a harvest that cannot write says so;
only bad chunks are made again, with the same records. The content hash stands for the records, and
for nothing else."""

import errno
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_gen.harvest import Progress
from data_gen.storage import shards
from data_gen.storage.chunks import content_hash
from data_gen.storage.dataset import Harvest, verify
from data_gen.storage.shards import SCHEMAS, record_digests
from decoding.models.loading import ModelPair
from runtime.cli import explain
from runtime.errors import UserError
from runtime.files import write_atomically
from tests.helpers.data.datasets import RECIPE, answered_dataset, make_dataset
from tests.helpers.programs.processes import die, forked

CHUNKS = 3
SHARDS = [f"{kind}-00001.parquet" for kind in SCHEMAS]
FILES = [*SHARDS, "chunk-00001.json", "plan.json", "manifest.json"]
EACH_SHARD = pytest.mark.parametrize("name", SHARDS)
OF_A_CHUNK = pytest.mark.parametrize("name", FILES[:4])


def flipped(content: bytes, place: int) -> bytes:
    place %= len(content)
    return content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "first byte": lambda content: flipped(content, 0),
    "middle byte": lambda content: flipped(content, len(content) // 2),
    "last byte": lambda content: flipped(content, -1),
    "truncated": lambda content: content[: len(content) // 2],
    "one byte short": lambda content: content[:-1],
    "one byte more": lambda content: content + b"\n",
    "empty": lambda content: b"",
    "a block of zeros": lambda content: content[:64] + bytes(64) + content[128:],
    "zeros only": lambda content: bytes(len(content)),
}


@pytest.fixture(scope="module")
def foreign(pair: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Same names, another seed."""
    folder = tmp_path_factory.mktemp("foreign")
    make_dataset(pair, folder, recipe=replace(RECIPE, seed=4))
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "data"))


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """What changes when a file is written again."""
    stats = {path.name: path.stat() for path in folder.glob("*-0*")}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


def content_of(folder: Path) -> str | None:
    return Harvest.open(folder).manifest.content


def assert_found_and_repaired(
    pair: ModelPair, folder: Path, original: Path, bad: list[str]
) -> None:
    """verify names the bad files and no others; a rerun makes their chunks again, and nothing
    else."""
    lines = verify(folder)
    assert [line.split(" ")[0] for line in lines] == [str(folder / name) for name in bad]
    assert all("\n" not in line for line in lines)
    before, made = files(folder), list[bool]()
    progress = Progress(finished=lambda prompts, tokens: made.append(tokens > 0))
    manifest = make_dataset(pair, folder, progress=progress)
    redone = {name.partition("-")[2][:5] for name in bad if "-" in name}
    assert sum(made) == RECIPE.batch_size * len(redone)
    after = files(folder)
    kept = {name for name in after if after[name] == before.get(name)}
    assert kept == {name for name in after if name.partition("-")[2][:5] not in redone}
    assert verify(folder) == [] and manifest["content"] == content_of(folder) == content_of(
        original
    )
    numbers = [len(Harvest.open(each).rounds("all")["group"]) for each in (folder, original)]
    assert numbers[0] == numbers[1]


def assert_readers_name(folder: Path, name: str) -> None:
    """What training meets: one line with the file and what to do. Plan and markers are not needed
    to read."""
    with pytest.raises(UserError) as error:
        for kind in ("mixed", "rounds"):
            Harvest.open(folder).records(kind, "all")
        list(Harvest.open(folder).prompts("all"))
    line = str(error.value)
    assert "\n" not in line
    assert (name in line and "scripts/gen_data.py" in line) or "harvest again" in line


def refused_and_left(pair: ModelPair, folder: Path, says: str) -> None:
    before = files(folder)
    with pytest.raises(UserError, match=says):
        make_dataset(pair, folder)
    assert files(folder) == before


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.few(16)
def test_changed_bytes(
    pair: ModelPair, folder: Path, original: Path, name: str, change: str
) -> None:
    path = folder / name
    content = path.read_bytes()
    path.write_bytes(CHANGES[change](content))
    assert path.read_bytes() != content
    if name in (*SHARDS, "manifest.json"):
        assert_readers_name(folder, name)
    assert_found_and_repaired(pair, folder, original, [name])


@pytest.mark.parametrize("name", FILES)
def test_deleted(pair: ModelPair, folder: Path, original: Path, name: str) -> None:
    (folder / name).unlink()
    if name in SHARDS:
        assert_readers_name(folder, name)
    assert_found_and_repaired(pair, folder, original, [name])


@EACH_SHARD
def test_a_change_that_keeps_time_and_size(
    pair: ModelPair, folder: Path, original: Path, name: str
) -> None:
    path = folder / name
    stat = path.stat()
    path.write_bytes(flipped(path.read_bytes(), 200))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert_found_and_repaired(pair, folder, original, [name])


@OF_A_CHUNK
def test_swapped_with_another_chunk(
    pair: ModelPair, folder: Path, original: Path, name: str
) -> None:
    one, other = folder / name, folder / name.replace("1", "0")
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    if name in SHARDS:
        assert_readers_name(folder, other.name)
    assert_found_and_repaired(pair, folder, original, [other.name, name])


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        *((SHARDS[0], SHARDS[1]), (SHARDS[2], "plan.json"), ("chunk-00001.json", "plan.json")),
        *(("plan.json", "manifest.json"), ("manifest.json", "chunk-00001.json")),
    ],
)
def test_another_file_of_the_folder_in_its_place(
    pair: ModelPair, folder: Path, original: Path, name: str, takes: str
) -> None:
    (folder / name).write_bytes((folder / takes).read_bytes())
    assert_found_and_repaired(pair, folder, original, [name])


@pytest.mark.parametrize("name", [*FILES[:4], "*-00001.*", "manifest.json"])
def test_taken_from_another_dataset(
    pair: ModelPair, folder: Path, original: Path, foreign: Path, name: str
) -> None:
    """Also a whole chunk, which its marker tells."""
    for path in foreign.glob(name):
        shutil.copy(path, folder / path.name)
    if name in (*SHARDS, "manifest.json"):
        assert_readers_name(folder, name if name in SHARDS else "mixed-00000.parquet")
    bad = "chunk-00001.json" if "*" in name else name
    assert_found_and_repaired(pair, folder, original, [bad])


def test_manifest_from_before_a_chunk_was_made_again(
    pair: ModelPair, folder: Path, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are the same, bytes are not: as after an update of the parquet writer."""
    old, writer = (folder / "manifest.json").read_bytes(), pq.ParquetWriter
    with monkeypatch.context() as patch:
        patch.setattr(
            pq, "ParquetWriter", lambda sink, schema, **_: writer(sink, schema, compression="gzip")
        )
        (folder / SHARDS[0]).unlink()
        content = make_dataset(pair, folder)["content"]
    assert content == content_of(original) and verify(folder) == []
    (folder / "manifest.json").write_bytes(old)
    assert_readers_name(folder, SHARDS[1])
    assert_found_and_repaired(pair, folder, original, ["manifest.json"])


def test_plan_of_another_dataset(pair: ModelPair, folder: Path, foreign: Path) -> None:
    """Its settings are named; nothing is overwritten."""
    shutil.copy(foreign / "plan.json", folder / "plan.json")
    markers = [str(folder / f"chunk-{index:05d}.json") for index in range(CHUNKS)]
    assert [line.split(" ")[0] for line in verify(folder)] == markers
    refused_and_left(pair, folder, "was made with seed=4, here 3")


def test_shards_that_belong_to_no_chunk(folder: Path) -> None:
    shutil.copy(folder / SHARDS[0], folder / "rounds-00007.parquet")
    assert verify(folder) == [f"{folder / 'rounds-00007.parquet'} belongs to no chunk. Delete it"]


def test_nothing_but_shards_is_left(pair: ModelPair, folder: Path) -> None:
    """Nobody knows what they are: nothing is said to be superfluous, nothing is overwritten."""
    for path in (folder / "plan.json", folder / "manifest.json", *folder.glob("chunk-*")):
        path.write_text("{")
    assert len(verify(folder)) == 2 + CHUNKS
    refused_and_left(pair, folder, r"plan\.json is damaged .* Choose another out=")


def test_a_harvest_of_an_older_version(pair: ModelPair, folder: Path) -> None:
    for path in (folder / "plan.json", folder / "manifest.json"):
        path.write_text('{"schema_version": 2}')
    for path in folder.glob("chunk-*"):
        path.unlink()
    says = "has schema version 2, this version reads 5"
    assert [line.split(" ", 1)[1] for line in verify(folder)] == [f"{says}. Make it again"] * 2
    refused_and_left(pair, folder, says)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match="is no harvested dataset"):
            verify(folder)


def test_several_at_once(pair: ModelPair, folder: Path, original: Path) -> None:
    (folder / "rounds-00000.parquet").unlink()
    (folder / "mixed-00002.parquet").write_bytes(b"PAR1")
    (folder / "plan.json").write_text("{")
    bad = ["plan.json", "rounds-00000.parquet", "mixed-00002.parquet"]
    assert_found_and_repaired(pair, folder, original, bad)


@pytest.mark.parametrize("more", [(), ("chunk-00002.json",)])
def test_what_the_settings_were_is_known_from_the_seals(
    pair: ModelPair, folder: Path, original: Path, more: tuple[str, ...]
) -> None:
    lost = ("plan.json", "manifest.json", *more)
    for name in lost:
        (folder / name).unlink()
    named = {line.split(" ")[0] for line in verify(folder)}
    assert named >= {str(folder / name) for name in lost[:2]}
    says = r"plan\.json is missing\. The shards beside it may have other settings"
    with pytest.raises(UserError, match=says):
        make_dataset(pair, folder, recipe=replace(RECIPE, gamma=2))
    before = {name: stat for name, stat in files(folder).items() if "00002" not in name}
    assert make_dataset(pair, folder)["content"] == content_of(original)
    assert files(folder).items() >= before.items()


def test_left_over_temporary_files_do_no_harm(
    pair: ModelPair, folder: Path, original: Path
) -> None:
    def die_half_way(path: Path) -> None:
        path.write_bytes(b"half")
        die()

    for name in FILES:
        killed = forked(lambda name=name: write_atomically(folder / name, die_half_way))
        assert killed.wait() == -signal.SIGKILL
    assert len(list(folder.glob(".*.tmp"))) == len(FILES)
    assert_found_and_repaired(pair, folder, original, [])
    (folder / SHARDS[0]).unlink()
    make_dataset(pair, folder)
    assert not list(folder.glob(f".{SHARDS[0]}.*.tmp"))


@pytest.mark.parametrize("name", ["plan.json", "manifest.json"])
@pytest.mark.parametrize("content", ['{"name": "my web app"}', "to Rome in May", "[]"])
def test_files_of_something_else_stay(
    pair: ModelPair, tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / name).write_text(content)
    says = rf"^out: \S+{name} holds something else, which would be lost\. Choose another out=\S+$"
    with pytest.raises(UserError, match=says):
        make_dataset(pair, tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.glob("*.json")] == [(name, content)]


def test_own_files_without_shards_are_replaced(pair: ModelPair, folder: Path) -> None:
    for path in folder.glob("*-0*"):
        path.unlink()
    make_dataset(pair, folder, recipe=replace(RECIPE, seed=9))
    assert verify(folder) == [] and Harvest.open(folder).manifest.written["seed"] == 9


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda lines: lines[1:], "has lost the answers to 1 prompts, p0 is one"),
        (lambda lines: [], "has lost the answers to 4 prompts, p0 is one"),
        (lambda lines: [*lines, lines[2]], "answers p2 2 times"),
        (
            lambda lines: [*lines[:2], lines[2].replace(b"[", b"[1, "), lines[3]],
            "line 3 is damaged",
        ),
        (lambda lines: [*lines[:3], lines[3][:-1]], "line 4 is damaged"),
        (lambda lines: None, "cannot be read (No such file or directory)"),
    ],
)
def test_lines_of_the_answers(
    pair: ModelPair, tmp_path: Path, change: Callable[[list[bytes]], list[bytes] | None], says: str
) -> None:
    answered_dataset(pair, tmp_path, 4, RECIPE)
    path = tmp_path / "data" / "answers.jsonl"
    assert verify(tmp_path / "data") == []
    lines = change(path.read_bytes().splitlines(keepends=True))
    path.unlink() if lines is None else path.write_bytes(b"".join(lines))
    (found,) = verify(tmp_path / "data")
    assert found.startswith(f"{path} {says}")


# What cannot be written ---------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory of its own, 64 KiB small: a third of the dataset is enough to fill
    it."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    done = subprocess.run(mount, capture_output=True)
    if done.returncode:
        pytest.skip(f"needs the right to mount: {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def resized(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True)


def bytes_of(folder: Path, pattern: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob(pattern)}


@contextmanager
def longest_file(size: int) -> Iterator[None]:
    """The kernel refuses every byte beyond the limit, as it does on a full disk: needs no
    rights."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    action = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, action)


def test_a_disk_that_is_full_keeps_what_is_finished(pair: ModelPair, disk: Path) -> None:
    folder, prompts = disk / "data", 12
    says = r"^out: .* cannot be written .*No space left on device.* Free some space"
    with pytest.raises(UserError, match=says):
        make_dataset(pair, folder, prompts)
    markers = sorted(path.name for path in folder.glob("chunk-*.json"))
    assert 0 < len(markers) < prompts // 3 and not list(folder.glob(".*.tmp"))
    with pytest.raises(UserError, match="is only half harvested"):
        Harvest.open(folder)
    kept = files(folder)
    resized(disk, "size=4m")
    make_dataset(pair, folder, prompts)
    finished = {name for name in kept if f"chunk-{name.partition('-')[2][:5]}.json" in markers}
    assert verify(folder) == [] and all(files(folder)[name] == kept[name] for name in finished)


def test_a_folder_that_is_read_only_can_be_read_and_checked(
    pair: ModelPair, original: Path, disk: Path
) -> None:
    resized(disk, "size=4m")
    folder = Path(shutil.copytree(original, disk / "data"))
    (folder / SHARDS[2]).unlink()
    before = bytes_of(folder, "*.*")
    resized(disk, "ro")
    assert verify(folder) == [f"{folder / SHARDS[2]} is missing"]
    assert len(Harvest.open(folder).records("mixed", "all")["group"])
    with pytest.raises(OSError) as error:
        make_dataset(pair, folder)
    assert (
        explain(error.value)
        == f"[Errno 30] Read-only file system: '{folder / '.lock'}'. Make it writable, or choose"
        " another folder"
    )
    assert bytes_of(folder, "*.*") == before
    resized(disk, "rw")
    assert make_dataset(pair, folder)["content"] == content_of(original)


def test_a_limit_on_file_sizes(pair: ModelPair, folder: Path, original: Path) -> None:
    (folder / "rounds-00002.parquet").unlink()
    before = bytes_of(folder, "*-0000[01].*")
    says = "^out: .*parquet cannot be written .*File too large.* Raise the limit"
    with longest_file(4096), pytest.raises(UserError, match=says):
        make_dataset(pair, folder)
    assert bytes_of(folder, "*-0000[01].*") == before and not list(folder.glob(".*.tmp"))
    assert make_dataset(pair, folder)["content"] == content_of(original)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("name", [SHARDS[2], "chunk-00001.json", "manifest.json"])
def test_any_file_may_fail(
    pair: ModelPair,
    folder: Path,
    original: Path,
    name: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (folder / SHARDS[0]).unlink()
    write = Path.write_bytes

    def failing(path: Path, content: bytes) -> int:
        if path.name.startswith(f".{name}.") and path.suffix == ".tmp":
            write(path, bytes(content)[:10])
            raise OSError(code, os.strerror(code), str(path))
        return write(path, content)

    says = rf"^out: \S*{name} cannot be written .{os.strerror(code)}.\. \w+"
    with monkeypatch.context() as patch, pytest.raises(UserError, match=says):
        patch.setattr(Path, "write_bytes", failing)
        make_dataset(pair, folder)
    assert not list(folder.glob(".*.tmp"))
    assert make_dataset(pair, folder)["content"] == content_of(original) and verify(folder) == []


# The content hash ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "matters"),
    [
        *(({"batch_size": size}, False) for size in (1, 2, 9)),
        *(({"seed": 4}, True), ({"gamma": 2}, True), ({"mixing": 0.5}, True)),
        ({"features_stored": False}, True),
    ],
    ids=str,
)
def test_records_matter_and_chunks_do_not(
    pair: ModelPair, original: Path, tmp_path: Path, change: dict, matters: bool
) -> None:
    made = make_dataset(pair, tmp_path, recipe=replace(RECIPE, **change))
    assert (made["content"] != content_of(original)) == matters
    assert len(made["shards"]) == 3 * -(-9 // change.get("batch_size", RECIPE.batch_size))


def test_tables_do_not_matter(
    pair: ModelPair, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "ROWS_AT_ONCE", 2)
    made = make_dataset(pair, tmp_path)
    assert made["content"] == content_of(original) and verify(tmp_path) == []
    file = pq.ParquetFile(tmp_path / "rounds-00000.parquet")
    assert [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)] == [2, 1]


def test_the_encoding_does_not_matter(original: Path, tmp_path: Path) -> None:
    """It can be computed from the files alone, whatever wrote them."""
    digests, again = list[str](), tmp_path / "again"
    options = {"compression": "gzip", "row_group_size": 2, "data_page_version": "2.0"}
    for kind in SCHEMAS:
        pq.write_table(pq.read_table(sorted(original.glob(f"{kind}-*"))), again, **options)
        digests += record_digests(pq.read_table(again), kind)
    assert content_hash(digests) == content_of(original)


def test_every_column_counts(original: Path) -> None:
    for kind, schema in SCHEMAS.items():
        table = pq.read_table(original / f"{kind}-00000.parquet")
        digests = record_digests(table, kind)
        assert len(set(digests)) == len(digests) == RECIPE.batch_size
        for place, name in enumerate(schema.names):
            other = table[name].to_pylist()
            other[1] = "other" if isinstance(other[1], str) else [*other[1][:-1], other[1][-1] + 1]
            column = pa.array(other, schema.field(place).type)
            changed = record_digests(table.set_column(place, schema.field(place), column), kind)
            same = [a == b for a, b in zip(digests, changed, strict=True)]
            assert same == [True, False, True], name
