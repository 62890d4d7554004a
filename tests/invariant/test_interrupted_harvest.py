"""A harvest that is killed at any moment, or begun with other settings: a rerun finishes what is
left, and nothing is lost but an open chunk."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from data_gen.harvest import NO_PROGRESS, label_chunk, plan, split_into_chunks
from data_gen.storage import chunks
from data_gen.storage.claim import unmade
from data_gen.storage.dataset import Harvest, verify
from data_gen.storage.shards import SCHEMA_VERSION
from decoding.models.loading import ModelPair
from runtime.errors import UserError
from runtime.json_files import write_checksummed
from tests.helpers.data.datasets import RECIPE, make_dataset, some_requests
from tests.helpers.programs.processes import Child, die, forked

PROMPTS = 18


def assert_same(folder: Path, original: Path) -> None:
    assert verify(folder) == []
    assert Harvest.open(folder).manifest.content == Harvest.open(original).manifest.content
    found, expected = (
        {path.name: path.read_bytes() for path in each.glob("*-0*")} for each in (folder, original)
    )
    assert found == expected


def missing(folder: Path, plan: dict) -> list[int]:
    return unmade(folder, plan, lambda marker: None)


def test_other_settings_are_refused_as_soon_as_there_is_a_shard(tmp_path: Path) -> None:
    splits = {"train": 2, "calibration": 0, "test": 0}
    prompts = {"count": 2, "sha256": "0" * 64}
    settings = {"schema_version": SCHEMA_VERSION, "prompts": prompts, "splits": splits}
    first, second = ({**settings, "batch_size": 1, "seed": seed} for seed in (1, 2))
    assert missing(tmp_path, first) == missing(tmp_path, second) == [0, 1]
    chunks.empty_chunk(chunks.plan_id(second), 0).save(tmp_path)
    with pytest.raises(UserError, match=r"was made with seed=2, here 1\. Choose another out="):
        missing(tmp_path, first)
    assert chunks.read_json(tmp_path / chunks.PLAN, chunks.Plan, "out", "").written == second


def test_a_chunk_that_was_left_out_is_tried_again(pair: ModelPair, tmp_path: Path) -> None:
    requests = some_requests(6)
    whole = plan(pair, requests, RECIPE)
    rows = label_chunk(pair, split_into_chunks(requests, 3)[0], RECIPE, NO_PROGRESS)
    missing(tmp_path, whole)
    chunks.chunk_of(chunks.plan_id(whole), 0, rows).save(tmp_path)
    chunks.empty_chunk(chunks.plan_id(whole), 1).save(tmp_path)
    assert missing(tmp_path, whole) == [1]


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
        for index in missing(folder, settings):
            chunks.chunk_of(chunks.plan_id(settings), index, rows[index]).save(folder)
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
@pytest.mark.slow
def test_killed_at_random_moments(
    pair: ModelPair, original: Path, tmp_path: Path, moments: int
) -> None:
    def begun(folder: Path) -> Child:
        return forked(lambda: make_dataset(pair, folder, PROMPTS))

    start = time.monotonic()
    assert begun(tmp_path / "whole").wait() == 0
    whole, random, unfinished = time.monotonic() - start, Random(1), 0
    for moment in range(moments):
        folder = tmp_path / str(moment)
        child = begun(folder)
        time.sleep(random.uniform(0, 0.8 * whole))  # the first run is the slowest
        child.kill()
        unfinished += child.wait() == -signal.SIGKILL
        assert begun(folder).wait() == 0
        assert_same(folder, original)
    assert unfinished, "some of them were killed"
