"""Every damage to every kind of file is found and named; only bad chunks are made again, with the
same records."""

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from data_gen.harvest import Progress
from data_gen.storage.dataset import Harvest, verify
from data_gen.storage.shards import SCHEMAS
from decoding.models.loading import ModelPair
from runtime.errors import UserError
from runtime.files import write_atomically
from tests.helpers.data.datasets import RECIPE, answered_dataset, make_dataset
from tests.helpers.programs.processes import die, forked

CHUNKS = 3
SHARDS = [f"{kind}-00001.parquet" for kind in SCHEMAS]
FILES = [*SHARDS, "chunk-00001.json", "plan.json", "manifest.json"]


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
    shutil.copytree(original, tmp_path / "data")
    return tmp_path / "data"


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """What changes when a file is written again."""
    return {
        path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("*-0*")
    }


def chunk_of(name: str) -> int | None:
    return int(name.split("-")[1].split(".")[0]) if "-" in name else None


def assert_found_and_repaired(
    pair: ModelPair, folder: Path, original: Path, bad: list[str]
) -> None:
    """verify names the bad files and no others; a rerun makes their chunks again, and nothing
    else."""
    lines = verify(folder)
    assert [line.split(" ")[0] for line in lines] == [str(folder / name) for name in bad]
    assert all("\n" not in line for line in lines)
    before, made = files(folder), []
    manifest = make_dataset(
        pair, folder, progress=Progress(finished=lambda prompts, tokens: made.append(tokens > 0))
    )
    redone = {chunk_of(name) for name in bad} - {None}
    assert sum(made) == RECIPE.batch_size * len(redone)
    after = files(folder)
    assert {name for name in after if after[name] == before.get(name)} == {
        name for name in after if chunk_of(name) not in redone
    }
    assert verify(folder) == []
    ours, expected = Harvest.open(folder), Harvest.open(original)
    assert manifest["content"] == ours.manifest.content == expected.manifest.content
    assert len(ours.rounds("all")["group"]) == len(expected.rounds("all")["group"])


def assert_readers_name(folder: Path, name: str) -> None:
    """What training meets: one line with the file and what to do. Plan and markers are not needed
    to read."""
    with pytest.raises(UserError) as error:
        for kind in ("mixed", "rounds"):
            Harvest.open(folder).records(kind, "all")
        list(Harvest.open(folder).prompts("all"))
    assert (
        name in str(error.value)
        and "scripts/gen_data.py" in str(error.value)
        or "harvest again" in str(error.value)
    )
    assert "\n" not in str(error.value)


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


@pytest.mark.parametrize("name", SHARDS)
def test_a_change_that_keeps_time_and_size(
    pair: ModelPair, folder: Path, original: Path, name: str
) -> None:
    path = folder / name
    stat = path.stat()
    path.write_bytes(flipped(path.read_bytes(), 200))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert_found_and_repaired(pair, folder, original, [name])


@pytest.mark.parametrize("name", [*SHARDS, "chunk-00001.json"])
def test_swapped_with_another_chunk(
    pair: ModelPair, folder: Path, original: Path, name: str
) -> None:
    ours, other = folder / name, folder / name.replace("1", "0")
    content = ours.read_bytes()
    ours.write_bytes(other.read_bytes())
    other.write_bytes(content)
    if name in SHARDS:
        assert_readers_name(folder, other.name)
    assert_found_and_repaired(pair, folder, original, [other.name, name])


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        (SHARDS[0], SHARDS[1]),
        (SHARDS[2], "plan.json"),
        ("chunk-00001.json", "plan.json"),
        ("plan.json", "manifest.json"),
        ("manifest.json", "chunk-00001.json"),
    ],
)
def test_another_file_of_the_folder_in_its_place(
    pair: ModelPair, folder: Path, original: Path, name: str, takes: str
) -> None:
    (folder / name).write_bytes((folder / takes).read_bytes())
    assert_found_and_repaired(pair, folder, original, [name])


@pytest.mark.parametrize("name", [*SHARDS, "chunk-00001.json"])
def test_taken_from_another_dataset(
    pair: ModelPair, folder: Path, original: Path, foreign: Path, name: str
) -> None:
    shutil.copy(foreign / name, folder / name)
    if name in SHARDS:
        assert_readers_name(folder, name)
    assert_found_and_repaired(pair, folder, original, [name])


def test_a_whole_chunk_of_another_dataset(
    pair: ModelPair, folder: Path, original: Path, foreign: Path
) -> None:
    for path in foreign.glob("*-00001.*"):
        shutil.copy(path, folder / path.name)
    assert_found_and_repaired(pair, folder, original, ["chunk-00001.json"])


def test_manifest_of_another_dataset(
    pair: ModelPair, folder: Path, original: Path, foreign: Path
) -> None:
    shutil.copy(foreign / "manifest.json", folder / "manifest.json")
    assert_readers_name(folder, "mixed-00000.parquet")
    assert_found_and_repaired(pair, folder, original, ["manifest.json"])


def test_manifest_from_before_a_chunk_was_made_again(
    pair: ModelPair, folder: Path, original: Path
) -> None:
    """Records are the same, bytes are not: as after an update of the parquet writer."""
    old = (folder / "manifest.json").read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        rewrite(patch)
        (folder / SHARDS[0]).unlink()
        content = make_dataset(pair, folder)["content"]
    assert content == Harvest.open(original).manifest.content and verify(folder) == []
    (folder / "manifest.json").write_bytes(old)
    assert_readers_name(folder, SHARDS[1])
    assert_found_and_repaired(pair, folder, original, ["manifest.json"])


def rewrite(patch: pytest.MonkeyPatch) -> None:
    from data_gen.storage import shards

    writer = shards.pq.ParquetWriter
    patch.setattr(
        shards.pq,
        "ParquetWriter",
        lambda sink, schema, **options: writer(sink, schema, compression="gzip"),
    )


def test_plan_of_another_dataset(pair: ModelPair, folder: Path, foreign: Path) -> None:
    """Its settings are named; nothing is overwritten."""
    before = files(folder)
    shutil.copy(foreign / "plan.json", folder / "plan.json")
    assert [line.split(" ")[0] for line in verify(folder)] == [
        *(str(folder / f"chunk-{index:05d}.json") for index in range(CHUNKS))
    ]
    with pytest.raises(UserError, match="was made with seed=4, here 3"):
        make_dataset(pair, folder)
    assert files(folder) == before


def test_shards_that_belong_to_no_chunk(pair: ModelPair, folder: Path) -> None:
    shutil.copy(folder / SHARDS[0], folder / "rounds-00007.parquet")
    assert verify(folder) == [f"{folder / 'rounds-00007.parquet'} belongs to no chunk. Delete it"]


def test_nothing_but_shards_is_left(pair: ModelPair, folder: Path) -> None:
    """Nobody knows what they are: nothing is said to be superfluous, nothing is overwritten."""
    for path in (folder / "plan.json", folder / "manifest.json", *folder.glob("chunk-*")):
        path.write_text("{")
    before = files(folder)
    assert len(verify(folder)) == 2 + CHUNKS
    with pytest.raises(UserError, match=r"plan\.json is damaged .* Choose another out="):
        make_dataset(pair, folder)
    assert files(folder) == before


def test_a_harvest_of_an_older_version(pair: ModelPair, folder: Path) -> None:
    for path in (folder / "plan.json", folder / "manifest.json"):
        path.write_text('{"schema_version": 2}')
    for path in folder.glob("chunk-*"):
        path.unlink()
    assert [line.split(" ", 1)[1] for line in verify(folder)] == [
        "has schema version 2, this version reads 5. Make it again"
    ] * 2
    with pytest.raises(UserError, match="has schema version 2, this version reads 5"):
        make_dataset(pair, folder)


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


@pytest.mark.parametrize(
    "lost", [("plan.json", "manifest.json"), ("plan.json", "manifest.json", "chunk-00002.json")]
)
def test_what_the_settings_were_is_known_from_the_seals(
    pair: ModelPair, folder: Path, original: Path, lost: tuple[str, ...]
) -> None:
    for name in lost:
        (folder / name).unlink()
    assert {line.split(" ")[0] for line in verify(folder)} >= {
        str(folder / name) for name in lost[:2]
    }
    with pytest.raises(
        UserError, match=r"plan\.json is missing\. The shards beside it may have other settings"
    ):
        make_dataset(pair, folder, recipe=replace(RECIPE, gamma=2))
    before = files(folder)
    assert make_dataset(pair, folder)["content"] == Harvest.open(original).manifest.content
    assert files(folder).items() >= before.items() - {
        item for item in before.items() if "00002" in item[0]
    }


def test_left_over_temporary_files_do_no_harm(
    pair: ModelPair, folder: Path, original: Path
) -> None:
    for name in FILES:
        assert (
            forked(lambda name=name: write_atomically(folder / name, die_half_way)).wait()
            == -signal.SIGKILL
        )
    assert len(list(folder.glob(".*.tmp"))) == len(FILES)
    assert_found_and_repaired(pair, folder, original, [])
    (folder / SHARDS[0]).unlink()
    make_dataset(pair, folder)
    assert not list(folder.glob(f".{SHARDS[0]}.*.tmp"))


def die_half_way(path: Path) -> None:
    path.write_bytes(b"half")
    die()


@pytest.mark.parametrize("name", ["plan.json", "manifest.json"])
@pytest.mark.parametrize("content", ['{"name": "my web app"}', "to Rome in May", "[]"])
def test_files_of_something_else_stay(
    pair: ModelPair, tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(
        UserError,
        match=(
            rf"^out: \S+{name} holds something else, which would be lost\. Choose another"
            r" out=<folder>$"
        ),
    ):
        make_dataset(pair, tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.glob("*.json")] == [(name, content)]


def test_own_files_without_shards_are_replaced(
    pair: ModelPair, folder: Path, original: Path
) -> None:
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
