"""Tasks of a job, done in this process and by actors of Ray, of which some fail or die."""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from runtime.errors import UserError
from runtime.workers import Local, Ray
from tests.helpers.damage.refusals import refuses

TASKS = [3, 1, 4, 1, 5, 9]


def started() -> list[int]:
    """A state that counts what was done with it."""
    return []


def added(state: list[int], task: int) -> tuple[int, int]:
    state.append(task)
    return task + 1, os.getpid()


def trouble(folder: Path, kind: str, state: list[int], task: int) -> int:
    """On the first tasks so many times as the folder has files."""
    if task == TASKS[0]:
        for file in folder.iterdir():
            file.unlink()
            if kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise MemoryError(f"no room for {task}")
    return task


def refused(state: list[int], task: int) -> int:
    raise UserError("pair: broken. Mend it")


def ray(**changed: object) -> Ray:
    settings = {"count": 2, "gpus": 0, "cpus": 1, "address": None, "retries": 2, "lost": "stop"}
    return Ray(**(settings | changed))


def test_this_process_does_tasks_in_order() -> None:
    with Local().team(started) as team:
        found = list(team.map(added, TASKS))
    assert found == [(task, (task + 1, os.getpid())) for task in TASKS]


def test_actors_do_every_task_once_and_again_where_one_dies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ray().team(started) as team:
        found = list(team.map(added, TASKS))
        assert sorted(task for task, _ in found) == sorted(TASKS)
        assert all(result and result[0] == task + 1 for task, result in found)
        assert len({result[1] for _, result in found if result} | {os.getpid()}) > 1
        for kind, times in (("killed", 2), ("memory", 1)):
            for number in range(times):
                (tmp_path / str(number)).touch()
            done = list(team.map(partial(trouble, tmp_path, kind), TASKS))
            assert sorted(task for task, _ in done) == sorted(TASKS)
            assert all(task == result for task, result in done)
            assert capsys.readouterr().err.count("its task is done again") == times
        refuses("pair: broken", lambda: list(team.map(refused, TASKS)))


@pytest.mark.slow
def test_a_task_that_fails_again_ends_the_job_or_is_left_out(tmp_path: Path) -> None:
    def run(kind: str, lost: str) -> Callable[[], list[tuple[int, int | None]]]:
        for number in range(9):
            (tmp_path / str(number)).touch()
        with ray(lost=lost).team(started) as team:
            return sorted(team.map(partial(trouble, tmp_path, kind), TASKS), key=str)

    for kind, why in (("memory", "2 tries .out of memory: no room for 3"), ("killed", "3 tries")):
        refuses(f"workers: task 3 was lost after {why}", run, kind, "stop")
        assert (3, None) in run(kind, "skip")


@pytest.mark.slow
def test_what_is_not_there_is_refused() -> None:
    def team(**changed: object) -> None:
        with ray(**changed).team(started):
            raise AssertionError

    refuses("workers.gpus: expected GPUs that there are, got 2 processes with 1 each", team, gpus=1)
    refuses("workers.address: no cluster of Ray answers at x:1", team, address="x:1")
    refuses("workers.address: no cluster .* at 127.0.0.1:1 ", team, address="127.0.0.1:1")


@pytest.mark.slow
def test_a_state_that_cannot_be_made_ends_the_job() -> None:
    with ray().team(partial(refused, [], 0)) as team:
        refuses("pair: broken", lambda: list(team.map(added, TASKS)))
