"""train.py in child processes that are killed: forked from one that has imported it, so that they
start at once."""

import json
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
LAZY = [
    "imblearn.over_sampling",
    "sklearn.isotonic",
    "sklearn.linear_model",
    "scipy.optimize",
    "torch._dynamo",
]
FORKS.set_forkserver_preload(
    [
        "train",
        "tests.helpers.training.trainings",
        *LAZY,
        "hydra_plugins.hydra_submitit_launcher.config",
    ]
)
STEPS = ("fsync", "replace", "rename", "unlink", "mkdir", "rmdir")
"""Calls of `os` that make, name or remove files for good."""


def start(folder: Path, *arguments: str, last_step: int | None = None) -> ForkServerProcess:
    """``python train.py *arguments`` in `folder`. last_step: dies instead of taking that one of its
    `STEPS`."""
    process = FORKS.Process(target=_train, args=(str(folder), arguments, last_step))
    process.start()
    return process


def finish(folder: Path, *arguments: str, last_step: int | None = None) -> int:
    """The exit code of `start`."""
    process = start(folder, *arguments, last_step=last_step)
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def kill_after(seconds: float, folder: Path, *arguments: str) -> None:
    process = start(folder, *arguments)
    time.sleep(seconds)
    process.kill()
    process.join()


def result(checkpoint: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Content of a checkpoint: its weights and calibration as bytes, its metrics without the time
    they took."""
    metrics = json.loads((checkpoint / "metrics.json").read_text())
    del metrics["seconds"]
    return {
        name: (checkpoint / name).read_bytes() for name in ("model.safetensors", "calibration.json")
    }, metrics


def _train(folder: str, arguments: tuple[str, ...], last_step: int | None) -> None:
    import torch

    import predictors.card
    import predictors.confidences.run
    import predictors.reliability
    import predictors.training.trainer  # noqa: F401  (what the program imports when it runs)
    import train

    os.chdir(folder)
    sys.stdout = sys.stderr = open("log.txt", "a")
    torch.set_num_threads(1)
    sys.argv = ["train.py", *arguments]
    if last_step is not None:
        _die_at(last_step)
    train.main()


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
