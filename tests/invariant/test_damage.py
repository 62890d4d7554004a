"""Every damage to every kind of file is found and named, and a harvest that cannot write says so;
only bad chunks are made again, with the same records. Whatever happens to the bytes of a dataset,
reading it gives what was written or ends in one line. The content hash stands for the records, and
for nothing else."""

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from data_gen.harvest import Progress
from data_gen.prompts import Prompt
from data_gen.responses.log import NAME, open_log
from data_gen.storage import shards
from data_gen.storage.chunks import MANIFEST, PLAN, content_hash
from data_gen.storage.claim import unmade
from data_gen.storage.dataset import Harvest, verify
from data_gen.storage.shards import SCHEMAS, record_digests
from decoding.models.loading import ModelPair
from evaluation.replay.read import read_table
from runtime.cli import explain
from runtime.errors import UserError
from tests.helpers.damage.damage import (
    damage_one_file,
    for_as_long_as_asked,
    misplace_a_file,
    no_hang,
)
from tests.helpers.data.datasets import RECIPE, answered_dataset, make_dataset, rewrite_checksum

CHUNKS = 3
SHARDS = [f"{kind}-00001.parquet" for kind in SCHEMAS]
FILES = [*SHARDS, "chunk-00001.json", "plan.json", "manifest.json"]
Contents = dict[str, bytes]
Damage = dict[str, bytes | None]
"""What lies in the folder instead of its files; None: nothing."""


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


def bytes_of(folder: Path, pattern: str) -> Contents:
    return {path.name: path.read_bytes() for path in folder.glob(pattern)}


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
    assert verify(folder) == []
    assert manifest["content"] == content_of(folder) == content_of(original)
    numbers = [len(Harvest.open(each).rounds("all")["group"]) for each in (folder, original)]
    assert numbers[0] == numbers[1]


def assert_readers_refuse(folder: Path, bad: list[str]) -> None:
    """What training meets: one line with the file and what to do."""
    with pytest.raises(UserError) as error:
        for kind in ("mixed", "rounds"):
            Harvest.open(folder).records(kind, "all")
        list(Harvest.open(folder).prompts("all"))
    line = str(error.value)
    assert "\n" not in line and ("scripts/gen_data.py" in line or "harvest again" in line)
    assert any(name in line for name in bad) or "is only half harvested" in line


def refused_and_left(pair: ModelPair, folder: Path, says: str) -> None:
    before = files(folder)
    with pytest.raises(UserError, match=says):
        make_dataset(pair, folder)
    assert files(folder) == before


def flipped(content: bytes) -> bytes:
    place = len(content) // 2
    return content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]


TAKEN = [
    *((SHARDS[0], SHARDS[1]), (SHARDS[2], "plan.json"), ("chunk-00001.json", "plan.json")),
    *(("plan.json", "manifest.json"), ("manifest.json", "chunk-00001.json")),
]
FIRST = {name: name.replace("1", "0") for name in FILES[:4]}  # the same of another chunk
# Of what our files and foreign ones hold: to one chunk and to the settings
DAMAGES: dict[str, Callable[[Contents, Contents], Damage]] = {
    **{f"{n} changed": lambda ours, _, n=n: {n: flipped(ours[n])} for n in FILES},
    **{f"{n} deleted": lambda *_, n=n: {n: None} for n in FILES},
    **{f"{n} swapped": lambda x, _, n=n, m=m: {m: x[n], n: x[m]} for n, m in FIRST.items()},
    **{f"{n} foreign": lambda _, foreign, n=n: {n: foreign[n]} for n in (*FILES[:4], FILES[5])},
    **{f"{n} is {m}": lambda ours, _, n=n, m=m: {n: ours[m]} for n, m in TAKEN},
    "whole foreign chunk": lambda _, foreign: {name: foreign[name] for name in FILES[:4]},
    "several": lambda *_: {"plan.json": b"{", "rounds-00000.parquet": None, SHARDS[1]: b"PAR1"},
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_repaired(
    pair: ModelPair, folder: Path, original: Path, foreign: Path, name: str
) -> None:
    """Also where time and size stay. Plan and markers are not needed to read."""
    damage = DAMAGES[name](bytes_of(folder, "*.*"), bytes_of(foreign, "*.*"))
    for path, content in ((folder / file, content) for file, content in damage.items()):
        stat = path.stat()
        path.unlink() if content is None else path.write_bytes(content)
        if content is not None:
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    bad = [FILES[3]] if name == "whole foreign chunk" else list(damage)
    if {*bad} - {"plan.json", "chunk-00001.json", "chunk-00000.json"}:
        fits_another = ["mixed-00000.parquet"] * (name == "manifest.json foreign")
        assert_readers_refuse(folder, bad + fits_another)
    assert_found_and_repaired(pair, folder, original, bad)


def test_manifest_from_before_a_chunk_was_made_again(
    pair: ModelPair, folder: Path, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are the same, bytes are not: as after an update of the parquet writer."""
    old, writer = (folder / "manifest.json").read_bytes(), pq.ParquetWriter
    gzipped = lambda sink, schema, **_: writer(sink, schema, compression="gzip")  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(pq, "ParquetWriter", gzipped)
        (folder / SHARDS[0]).unlink()
        content = make_dataset(pair, folder)["content"]
    assert content == content_of(original) and verify(folder) == []
    (folder / "manifest.json").write_bytes(old)
    assert_readers_refuse(folder, SHARDS[1:2])
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
        (lambda lines: lines[1:], "has lost the answers to 1 prompt, p0 is one"),
        (lambda lines: [], "has lost the answers to 4 prompts, p0 is one"),
        (lambda lines: [*lines, lines[2]], "answers p2 2 times"),
        (lambda x: [*x[:2], x[2].replace(b"[", b"[1, "), x[3]], "line 3 is damaged"),
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


@contextmanager
def mounted(place: Path) -> Iterator[Callable[[str], None]]:
    """A file system in memory of its own, and how its options are changed."""

    def mount(options: str) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True)

    place.mkdir()
    try:
        mount("size=4m")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs the right to mount: {error}")
    yield lambda options: mount(f"remount,{options}")
    subprocess.run(["umount", str(place)], check=True)


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


def test_a_folder_that_is_read_only_can_be_read_and_checked(
    pair: ModelPair, original: Path, tmp_path: Path
) -> None:
    with mounted(tmp_path / "disk") as remount:
        folder = Path(shutil.copytree(original, tmp_path / "disk" / "data"))
        (folder / SHARDS[2]).unlink()
        before = bytes_of(folder, "*.*")
        remount("ro")
        assert verify(folder) == [f"{folder / SHARDS[2]} is missing"]
        assert len(Harvest.open(folder).records("mixed", "all")["group"])
        with pytest.raises(OSError) as error:
            make_dataset(pair, folder)
        name = folder / "chunk-00001.json"
        says = f"[Errno 30] Read-only file system: '{name}'. Make it writable, or"
        assert explain(error.value) == f"{says} choose another folder"
        assert bytes_of(folder, "*.*") == before
        remount("rw")
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
    pair: ModelPair, folder: Path, name: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, write = content_of(folder), Path.write_bytes
    (folder / SHARDS[0]).unlink()

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
    assert make_dataset(pair, folder)["content"] == content and verify(folder) == []


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


# Any damage ---------------------------------------------------------------------------------------

SMALL = replace(RECIPE, stride=1, max_new_tokens=6, batch_size=2)
READERS: dict[str, Callable[[Path], Any]] = {
    "manifest": lambda folder: Harvest.open(folder).manifest.written,
    "rounds": lambda folder: Harvest.open(folder).records("rounds", "all"),
    "mixed": lambda folder: Harvest.open(folder).records("mixed", "train"),
    "responses": lambda folder: list(Harvest.open(folder).prompts("all")),
    "prompts": lambda folder: [*Harvest.open(folder).by_prompt("rounds", "all", ["anchor"])],
    "table": lambda folder: vars(read_table(Harvest.open(folder), "all")),
}


class Whole(NamedTuple):
    """An undamaged dataset. read: what `READERS` give."""

    folder: Path
    prompts: list[Prompt]
    plan: dict[str, Any]
    read: dict[str, str]

    __repr__ = object.__repr__  # short in what a failing example prints


@pytest.fixture(scope="module")
def whole(pair: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    prompts, plan = answered_dataset(pair, folder, 4, SMALL)
    data = folder / "data"
    read = {name: shown(reader(data)) for name, reader in READERS.items()}
    return Whole(data, prompts, plan, {**read, "answers": shown(answers(data, prompts))})


def answers(folder: Path, prompts: list[Prompt]) -> dict[str, Any]:
    """What the log holds, without those of which nothing is left, which are asked for again."""
    with open_log(folder, {}) as log:
        log.missing(prompts)
        return {name: answer.content for name, answer in sorted(log.responses.items())}


def shown(value: Any) -> str:
    """All of it, comparable."""
    if isinstance(value, dict):
        return "".join(f"{key}: {shown(inner)}\n" for key, inner in value.items())
    if isinstance(value, list):
        return "".join(shown(inner) for inner in value)
    return repr(value.tolist() if isinstance(value, Tensor | np.ndarray) else value)


def reads(place: Path, whole: Whole, seed: int) -> bool:
    """Whether all of the dataset can be read after damage number `seed`. Raises what is no
    UserError of one line. In half of the cases the checksums are made to fit, so that it gets as
    far as the parsers."""
    chance = random.Random(seed)
    folder = place / str(seed)
    shutil.copytree(whole.folder, folder)
    try:
        for _ in range(chance.choice([1, 1, 2])):
            (damage_one_file if chance.random() < 0.9 else misplace_a_file)(folder, chance)
        if chance.random() < 0.5:
            rewrite_checksum(folder)
            return all_read(folder, whole).keys() == whole.read.keys()
        there = [(path.name, lines_of(path)) for path in whole.folder.iterdir()]
        changed = {name for name, before in there if lines_of(folder / name) != before}
        found = all_read(folder, whole)
        for name, text in found.items():
            if name == "answers":
                assert set(text.splitlines()) <= set(whole.read[name].splitlines())
            else:
                assert text == whole.read[name], f"{name} is read, and wrong"
        refuse_unseen(folder, whole, changed)
        return found.keys() == whole.read.keys()
    finally:
        shutil.rmtree(folder)


def all_read(folder: Path, whole: Whole) -> dict[str, str]:
    """What could be read, by the name of the reader."""
    more = {"answers": lambda folder: answers(folder, whole.prompts), "verify": verify}
    readers = {**READERS, **more}
    found = {name: outcome(lambda: reader(folder)) for name, reader in readers.items()}
    bad = found.pop("verify") or []
    assert all("\n" not in line and line.startswith(str(folder)) for line in bad)
    return {name: shown(value) for name, value in found.items() if value is not None}


def outcome(read: Callable[[], Any]) -> Any:
    """None where it ends in one line that names a key."""
    try:
        return read()
    except UserError as error:
        key = str(error).split(": ")[0]
        assert "\n" not in str(error) and key in ("data", "out", "responses.url"), error
        return None


def refuse_unseen(folder: Path, whole: Whole, changed: set[str]) -> None:
    """Every change is found by `verify`, and a resumed run makes those chunks again and no
    others."""
    found = outcome(lambda: verify(folder))
    assert found is None or bool(found) == bool(changed), (found, changed)
    again = outcome(lambda: unmade(folder, whole.plan, lambda marker: None))
    chunks = {int(name.split("-")[1].split(".")[0]) for name in changed - {PLAN, MANIFEST, NAME}}
    assert (again is None and PLAN in changed) or set(again) == chunks


def lines_of(path: Path) -> list[bytes] | None:
    """Lines in any order: each answer stands for itself, elsewhere there is a checksum over all of
    them."""
    return sorted(path.read_bytes().split(b"\n")) if path.is_file() else None


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32))
def test_a_damaged_dataset_is_read_rightly_or_refused(
    tmp_path: Path, whole: Whole, seed: int
) -> None:
    with no_hang():
        assert reads(tmp_path, whole, seed) in (True, False), "and nothing is raised"


@pytest.mark.slow
def test_for_as_long_as_asked(
    tmp_path: Path, whole: Whole, capsys: pytest.CaptureFixture[str]
) -> None:
    """FUZZ_SECONDS=600 pytest -m slow tests/invariant/test_damage.py"""
    for_as_long_as_asked("datasets", lambda seed: reads(tmp_path, whole, seed), capsys)


def test_the_undamaged_one_is_whole(whole: Whole, tmp_path: Path) -> None:
    shutil.copytree(whole.folder, tmp_path / "data")
    assert all_read(tmp_path / "data", whole) == whole.read and verify(tmp_path / "data") == []
    rewrite_checksum(tmp_path / "data")
    for path in whole.folder.iterdir():
        assert lines_of(path) == lines_of(tmp_path / "data" / path.name)
