"""Trainings killed at any moment: the same command goes on, and the result is that of an
uninterrupted one."""

import os
import random
import re
import signal
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from predictors.base import load_predictor
from runtime.errors import UserError
from tests.helpers.data.harvests import write_harvest
from tests.helpers.training.trainings import KILLS, finish, kill_after, result, start

TOY = ("data=data/toy", "logger=none")
TRAIN = {
    "specdecpp": ("predictor=specdecpp", "predictor.depth=1", "trainer.epochs=12", *TOY),
    "hrad": ("predictor=hrad", "trainer.epochs=6", *TOY),
}


Whole = dict[str, tuple[float, Any]]
"""Seconds and result of each training in one go."""


@pytest.fixture(autouse=True)
def toy(tmp_path: Path) -> None:
    write_harvest(tmp_path / "data" / "toy")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    found = {}
    for name, arguments in TRAIN.items():
        folder = tmp_path_factory.mktemp(name)
        write_harvest(folder / "data" / "toy")
        warm = (*arguments, "trainer.epochs=1", "out=checkpoints/first")  # files, imports
        assert finish(folder, *warm) == 0
        started = time.perf_counter()
        assert finish(folder, *arguments) == 0
        found[name] = time.perf_counter() - started, result(folder / "checkpoints" / name)
    return found


@pytest.mark.parametrize("kill", KILLS)
@pytest.mark.slow
def test_killed_at_a_random_moment(kill: int, uninterrupted: Whole, tmp_path: Path) -> None:
    name = sorted(TRAIN)[kill % 2]
    seconds, expected = uninterrupted[name]
    kill_after(random.Random(kill).uniform(0, seconds), tmp_path, *TRAIN[name])
    assert finish(tmp_path, *TRAIN[name]) == 0
    assert result(tmp_path / "checkpoints" / name) == expected
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [name]


@pytest.mark.slow
def test_what_was_trained_is_not_trained_again(uninterrupted: Whole, tmp_path: Path) -> None:
    """Killed four times on the way, each time after some more epochs."""
    checkpoints = tmp_path / "checkpoints"
    for _ in range(4):
        process, before = start(tmp_path, *TRAIN["specdecpp"]), states(checkpoints)
        while states(checkpoints) == before and process.is_alive():
            time.sleep(0.002)
        process.kill()
        process.join()
    with pytest.raises(UserError, match="no checkpoint"):
        load_predictor(checkpoints / "specdecpp")
    assert finish(tmp_path, *TRAIN["specdecpp"]) == 0
    assert result(checkpoints / "specdecpp") == uninterrupted["specdecpp"][1]
    printed = (tmp_path / "log.txt").read_text()
    epochs = [int(epoch) for epoch in re.findall(r"resuming after epoch (\d+)", printed)]
    assert len(epochs) == 4 and epochs == sorted(set(epochs)) and epochs[0] >= 1


def states(checkpoints: Path) -> set[tuple[str, int]]:
    return {(path.name, path.stat().st_mtime_ns) for path in checkpoints.glob(".*.resume")}


def begun(folder: Path, *arguments: str) -> ForkServerProcess:
    """A training that has saved a state."""
    process = start(folder, *arguments)
    while not states(folder / "checkpoints"):
        time.sleep(0.002)
    return process


@pytest.mark.parametrize("last", [6, 44, pytest.param(-1, marks=pytest.mark.full)])
@pytest.mark.slow
def test_killed_at_each_step_of_writing(last: int, tmp_path: Path) -> None:
    """A good checkpoint is there all the time, the earlier one or the new one; at the end nothing
    else is.

    last: the step it dies at; -1 for each of them. The earlier checkpoint is out of its place
    between two renames; the next run puts it back."""
    quick = (*TRAIN["specdecpp"], "trainer.epochs=2")
    out = tmp_path / "checkpoints" / "specdecpp"
    assert finish(tmp_path, *quick) == 0
    new = result(out)
    earlier = (*quick, "predictor.w_rej=2")
    for step in range(1000) if last < 0 else [last]:
        assert finish(tmp_path, *earlier) == 0
        old = result(out)
        assert old != new
        code = finish(tmp_path, *quick, last_step=step)
        where = out if out.exists() else out.with_name(".specdecpp.old")
        load_predictor(where)
        assert result(where) in (old, new)
        assert finish(tmp_path, *quick) == 0
        assert result(out) == new and [path.name for path in out.parent.iterdir()] == ["specdecpp"]
        if code == 0:
            break
    assert last >= 0 or step > 40


@pytest.mark.parametrize(
    ("rows", "setting", "unlike"),
    [
        (30, "trainer.lr=1e-3", r"trainer\.lr=0\.001, here 5e-05"),
        (31, "seed=0", "data=.*, here .*"),
    ],
    ids=["settings", "data"],
)
@pytest.mark.slow
def test_another_training_does_not_continue_it(
    rows: int, setting: str, unlike: str, uninterrupted: Whole, tmp_path: Path
) -> None:
    checkpoints = tmp_path / "checkpoints"
    write_harvest(tmp_path / "data" / "toy", rows=rows)
    process = begun(tmp_path, *TRAIN["hrad"], setting)
    process.kill()
    process.join()
    write_harvest(tmp_path / "data" / "toy")
    (kept,) = checkpoints.glob(".*.resume")
    assert finish(tmp_path, *TRAIN["hrad"]) == 0
    assert result(checkpoints / "hrad") == uninterrupted["hrad"][1]
    lines = (tmp_path / "log.txt").read_text().splitlines()
    (line,) = [line for line in lines if "holds an interrupted training" in line]
    held = rf"{kept.name} holds an interrupted training with other settings \({unlike}\)"
    assert re.search(held, line)
    assert sorted(path.name for path in checkpoints.iterdir()) == sorted([kept.name, "hrad"])


@pytest.mark.slow
def test_a_second_training_into_one_folder_is_refused(uninterrupted: Whole, tmp_path: Path) -> None:
    """Also one with other settings; the first goes on, undisturbed."""
    first = begun(tmp_path, *TRAIN["specdecpp"])
    os.kill(first.pid or 0, signal.SIGSTOP)
    assert finish(tmp_path, *TRAIN["specdecpp"]) == 2
    assert finish(tmp_path, *TRAIN["specdecpp"], "seed=1") == 2
    os.kill(first.pid or 0, signal.SIGCONT)
    first.join()
    refusal = "error: out: another process is making checkpoints/specdecpp. Wait for it, or choose"
    said = (tmp_path / "log.txt").read_text()
    assert said.count(f"{refusal} another out=<folder>\n") == 2
    assert result(tmp_path / "checkpoints" / "specdecpp") == uninterrupted["specdecpp"][1]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["specdecpp"]
