"""Several processes make the records that one makes, and lose no more than an open chunk to a kill
-9."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from data_gen.harvest import Progress, label_chunk, plan, split_into_chunks
from data_gen.storage import chunks, shards
from data_gen.storage.dataset import Harvest, verify
from data_gen.storage.shards import SCHEMA_VERSION
from data_gen.storage.sharing import ALONE, Locks, Worker, open_chunks
from decoding.models.loading import ModelPair
from runtime.errors import UserError
from runtime.json_files import write_checksummed
from tests.helpers.data.datasets import RECIPE, make_dataset, some_requests
from tests.helpers.programs.processes import Child, die, end, forked, wait_for

PROMPTS, CHUNKS = 18, 6


NO_PROGRESS = Progress()


def team(
    pair: ModelPair,
    folder: Path,
    size: int,
    progress: Callable[[int], Progress] = lambda rank: NO_PROGRESS,
) -> list[Child]:
    """Processes that harvest into one folder together, as a launcher starts them."""

    def work(rank: int) -> Callable[[], object]:
        place = Worker(rank, size, size)
        return lambda: make_dataset(pair, folder, PROMPTS, progress=progress(rank), worker=place)

    return [forked(work(rank)) for rank in range(size)]


def codes(children: list[Child]) -> list[int]:
    return [child.wait() for child in children]


def open_alone(folder: Path, settings: dict[str, Any]) -> Iterator[int]:
    """The chunks that this process alone would make."""
    return open_chunks(folder, settings, ALONE, lambda marker: None, lambda marker: None)


def assert_same(folder: Path, original: Path) -> None:
    assert verify(folder) == []
    assert Harvest.open(folder).manifest.content == Harvest.open(original).manifest.content
    found, expected = (
        {path.name: path.read_bytes() for path in each.glob("*-0*")} for each in (folder, original)
    )
    assert found == expected


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])


@pytest.mark.parametrize("size", [2, 3])
def test_processes_share_the_work_and_one_bar_counts_what_all_of_them_do(
    pair: ModelPair, original: Path, tmp_path: Path, size: int
) -> None:
    """The first process is told of every prompt, whoever answered it, as `finished`."""
    notes = tmp_path / "notes"
    notes.mkdir()

    def progress(rank: int) -> Progress:
        def finished(prompts: int, tokens: int) -> None:
            with (notes / str(rank)).open("a") as file:
                file.write(f"{prompts}\n")

        return Progress(lambda tokens: time.sleep(0.003), finished)  # answering takes a while

    assert codes(team(pair, tmp_path / "data", size, progress)) == [0] * size
    told = [[*map(int, (notes / str(rank)).read_text().split())] for rank in range(size)]
    own = [each.count(1) for each in told]  # own answers come one by one, others' by the chunk
    assert sum(own) == PROMPTS and min(own) > 0, "each prompt once, and nobody idle"
    assert sum(told[0]) == PROMPTS
    assert_same(tmp_path / "data", original)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_process_that_dies_holds_up_nobody(
    pair: ModelPair, original: Path, tmp_path: Path, lost: int
) -> None:
    """The others finish what they and it have begun. Only the manifest wants the first process, or
    a rerun."""

    def progress(rank: int) -> Progress:
        return Progress(finished=lambda prompts, tokens: die() if rank == lost else None)

    ended = codes(team(pair, tmp_path / "data", 2, progress))
    assert ended[lost] == -signal.SIGKILL and ended[1 - lost] == 0
    assert len(list((tmp_path / "data").glob("chunk-*.json"))) == CHUNKS
    if lost == 0:
        make_dataset(pair, tmp_path / "data", PROMPTS)
    assert_same(tmp_path / "data", original)


def test_a_process_that_fails_loses_its_chunk_only(
    pair: ModelPair, original: Path, tmp_path: Path
) -> None:
    def failing(prompts: int, tokens: int) -> None:
        raise UserError("pair: broken. Mend it")

    def progress(rank: int) -> Progress:
        return Progress(finished=failing) if rank else NO_PROGRESS

    assert codes(team(pair, tmp_path / "data", 2, progress)) == [0, 1]
    assert_same(tmp_path / "data", original)


def test_a_damaged_chunk_is_found_by_the_first_process_and_made_by_any(
    pair: ModelPair, original: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    make_dataset(pair, folder, PROMPTS)
    for path in folder.glob("rounds-*"):
        flip(path)
    assert codes(team(pair, folder, 2)) == [0, 0]
    assert_same(folder, original)


def test_a_damaged_chunk_that_another_process_looks_at_is_found(
    pair: ModelPair, tmp_path: Path
) -> None:
    make_dataset(pair, tmp_path, 3)
    (shard,) = tmp_path.glob("rounds-*")
    flip(shard)

    def check() -> None:
        settings = chunks.read_json(tmp_path / chunks.PLAN, chunks.Plan, "out", "").written
        assert list(open_alone(tmp_path, settings)) == [0]

    with Locks(tmp_path) as locks, locks.chunk(0) as taken:
        assert taken
        child = forked(check)
        time.sleep(0.3)
    assert child.wait() == 0


def test_a_locked_chunk_is_left_to_its_owner(tmp_path: Path) -> None:
    settings = {"prompts": {"count": 2}, "batch_size": 1}
    rows: dict[str, list] = {kind: [] for kind in shards.SCHEMAS}

    def other() -> None:
        for index in open_alone(tmp_path, settings):
            chunks.save_chunk(tmp_path, chunks.plan_id(settings), index, rows)

    with Locks(tmp_path) as locks, locks.chunk(0) as taken:
        assert taken
        child = forked(other)
        wait_for(tmp_path, "chunk-00001.json")
        time.sleep(0.3)
        assert not (tmp_path / "chunk-00000.json").exists()
        assert os.waitpid(child.pid, os.WNOHANG) == (0, 0)
    assert child.wait() == 0
    assert (tmp_path / "chunk-00000.json").exists()


def test_other_settings_are_refused_before_the_first_shard_is_there(tmp_path: Path) -> None:
    """While a process has claimed the folder and made nothing; when it is dead the folder is free
    again."""

    def settings(seed: int) -> dict[str, Any]:
        splits = {"train": 2, "calibration": 0, "test": 0}
        prompts = {"count": 2, "sha256": "0" * 64}
        plan = {"schema_version": SCHEMA_VERSION, "prompts": prompts, "splits": splits}
        return {**plan, "batch_size": 1, "seed": seed}

    def chunks_of(seed: int) -> Iterator[int]:
        return open_alone(tmp_path, settings(seed))

    def wait() -> None:
        held = chunks_of(1)
        assert next(held) == 0
        (tmp_path / "begun").touch()
        time.sleep(60)

    child = forked(wait)
    wait_for(tmp_path, "begun")
    with pytest.raises(UserError, match=r"was made with seed=1, here 2\. Choose another out="):
        next(chunks_of(2))
    assert chunks.read_json(tmp_path / chunks.PLAN, chunks.Plan, "out", "").written == settings(1)
    assert next(chunks_of(1)) == 1, "the same settings are welcome"
    end(child)
    assert next(chunks_of(2)) == 0


def test_a_launcher_says_where_a_process_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Worker.of_launcher() == ALONE
    for name, value in {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    assert Worker.of_launcher() == Worker(5, 8, 4)


@pytest.mark.parametrize(("cores", "size", "threads"), [(8, 4, 2), (2, 2, 1), (2, 3, 1)])
def test_processes_of_a_machine_divide_its_cores(
    cores: int, size: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    ALONE.share_cores()
    Worker(0, 2 * size, size).share_cores()
    assert chosen == [threads]


@pytest.mark.slow
def test_killed_at_every_step_on_disk(
    pair: ModelPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each write, sync, rename and removal of a harvest of two chunks."""
    requests = some_requests(6)
    settings = plan(pair, requests, RECIPE)
    batches = split_into_chunks(requests, RECIPE.batch_size)
    rows = [label_chunk(pair, chunk, RECIPE, NO_PROGRESS) for chunk in batches]

    def save(folder: Path) -> None:
        for index in open_alone(folder, settings):
            chunks.save_chunk(folder, chunks.plan_id(settings), index, rows[index])
        manifest = {**settings, **chunks.inventory(folder, settings)}
        write_checksummed(folder / chunks.MANIFEST, manifest)

    def count_steps(patch: pytest.MonkeyPatch, last: int | None = None) -> Iterator[int]:
        """What is done to the disk; die before the last of so many steps."""
        done = iter(range(1, 10**6))

        def counted(real: Callable) -> Callable:
            def step(*args: object, **options: object) -> object:
                if next(done) == last:
                    die()
                return real(*args, **options)

            return step

        of_paths = [(Path, name) for name in ("write_bytes", "replace", "unlink")]
        for owner, name in [*of_paths, (os, "fsync")]:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        return done

    def killed(last: int) -> None:
        count_steps(monkeypatch, last)
        save(tmp_path / str(last))

    with monkeypatch.context() as patch:
        done = count_steps(patch)
        save(tmp_path / "whole")
        steps = next(done) - 1
    assert steps > 40
    whole = Harvest.open(tmp_path / "whole").manifest.written
    for last in range(1, steps + 1):
        folder = tmp_path / str(last)
        assert forked(lambda last=last: killed(last)).wait() == -signal.SIGKILL
        save(folder)
        assert verify(folder) == [] and Harvest.open(folder).manifest.written == whole


@pytest.mark.parametrize("moments", [3, 20])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.slow
def test_killed_at_random_moments(
    pair: ModelPair, original: Path, tmp_path: Path, size: int, moments: int
) -> None:
    """Every process of a run at once; the rerun, by as many, finishes."""
    start, good = time.monotonic(), [0] * size
    assert codes(team(pair, tmp_path / "whole", size)) == good
    whole, random, unfinished = time.monotonic() - start, Random(size), 0
    for moment in range(moments):
        folder = tmp_path / str(moment)
        children = team(pair, folder, size)
        time.sleep(random.uniform(0, 0.8 * whole))  # the first run is the slowest
        for child in children:
            child.kill()
        unfinished += -signal.SIGKILL in codes(children)
        assert codes(team(pair, folder, size)) == good
        assert_same(folder, original)
    assert unfinished, "some of them were killed"
