"""Programs in child processes that are killed: forked from one that has imported train.py, so that
they start at once."""

import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

FORKS = multiprocessing.get_context("forkserver")
LAZY = "imblearn.over_sampling sklearn.isotonic sklearn.linear_model scipy.optimize torch._dynamo"
LATE = "hydra_plugins.hydra_submitit_launcher.config"
FORKS.set_forkserver_preload(["train", "tests.helpers.training.trainings", *LAZY.split(), LATE])
STEPS = ("fsync", "replace", "rename", "unlink", "mkdir", "rmdir")
"""Calls of `os` that make, name or remove files for good."""
KILLS = [0, 1, *(pytest.param(n, marks=pytest.mark.full) for n in range(2, 20))]
"""Seeds of the moments at which they are killed."""


def start(
    folder: Path, *arguments: str, program: str = "train", last_step: int | None = None
) -> ForkServerProcess:
    """``python train.py *arguments`` in `folder`. program: module of another one; last_step: it
    dies instead of taking that one of its `STEPS`."""
    process = FORKS.Process(target=_run, args=(program, str(folder), arguments, last_step))
    process.start()
    return process


def finish(
    folder: Path, *arguments: str, program: str = "train", last_step: int | None = None
) -> int:
    """The exit code of `start`."""
    process = start(folder, *arguments, program=program, last_step=last_step)
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def kill_after(seconds: float, folder: Path, *arguments: str, program: str = "train") -> None:
    process = start(folder, *arguments, program=program)
    time.sleep(seconds)
    process.kill()
    process.join()


def result(checkpoint: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Content of a checkpoint: its weights and calibration as bytes, its metrics without the time
    they took."""
    metrics = json.loads((checkpoint / "metrics.json").read_text())
    del metrics["seconds"]
    names = ("model.safetensors", "calibration.json")
    return {name: (checkpoint / name).read_bytes() for name in names}, metrics


def _run(program: str, folder: str, arguments: tuple[str, ...], last_step: int | None) -> None:
    import torch

    import predictors.card
    import predictors.confidences.run
    import predictors.reliability
    import predictors.training.trainer  # noqa: F401  (what the program imports when it runs)

    main = importlib.import_module(program).main
    os.chdir(folder)
    sys.stdout = sys.stderr = open("log.txt", "a")
    torch.set_num_threads(1)
    sys.argv = [f"{program.rpartition('.')[2]}.py", *arguments]
    if last_step is not None:
        _die_at(last_step)
    main()


def _die_at(step: int) -> None:
    """Kill this process before it takes its `step`-th step on a file in checkpoints/."""
    taken = 0

    def counted(call: Any) -> Any:
        def wrapper(path: Any, *rest: Any, **options: Any) -> Any:
            nonlocal taken
            if isinstance(path, int) or "checkpoints" in str(path):
                if taken == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                taken += 1
            return call(path, *rest, **options)

        return wrapper

    for name in STEPS:
        setattr(os, name, counted(getattr(os, name)))
