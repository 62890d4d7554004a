"""`accelerate launch` with CPU processes (gloo): the result of one process, from one writer."""

import json
import os
import socket
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from safetensors.torch import load_file

import train
from tests.helpers.data.harvests import write_harvest
from tests.helpers.programs.programs import run

ROOT = Path(__file__).resolve().parents[2]
HRAD = ("predictor=hrad", "trainer.epochs=4", "data=data/toy", "logger=none")
TOLERANCE = 2e-6
"""Of weights and metrics. Seen: 3e-8 and 2.4e-7, with dropout and class-balanced draws."""


def launch(folder: Path, processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``train.py *arguments`` on that many CPU processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launcher = [
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        str(processes),
    ]
    launcher += ["--main_process_port", port]
    command = [sys.executable, *launcher, str(ROOT / "train.py"), *arguments]
    settings = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **settings}, capture_output=True, text=True
    )


def differ(a: Path, b: Path) -> tuple[float, float]:
    """Largest difference of weights, and of numbers in the metrics."""
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (a, b))
    weights = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
    left, right = (
        dict(numbers(json.loads((folder / "metrics.json").read_text()))) for folder in (a, b)
    )
    assert left.keys() == right.keys()
    return weights, max(abs(left[name] - right[name]) for name in left)


def numbers(value: object, name: str = "") -> list[tuple[str, float]]:
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    found = [
        pair for key, inner in items if key != "seconds" for pair in numbers(inner, f"{name}.{key}")
    ]
    return [*found, (name, float(value))] if isinstance(value, int | float) else found


def difference(folder: Path, processes: int, *arguments: str) -> float:
    """The largest between what one process trains and what several do."""
    write_harvest(folder / "data" / "toy")
    alone = StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(alone):
        patch.chdir(folder)
        run(train, *arguments, "out=checkpoints/1")
    done = launch(folder, processes, *arguments, f"out=checkpoints/{processes}")
    assert done.returncode == 0, done.stderr
    for printed in (alone.getvalue(), done.stdout):
        assert printed.count("saved checkpoints/") == 1, "one process prints and writes"
    assert len(list((folder / "outputs").glob("*/*/.hydra"))) == 2, "one run folder each"
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == sorted(
        {"1", str(processes)}
    )
    return max(differ(folder / "checkpoints" / "1", folder / "checkpoints" / str(processes)))


@pytest.mark.slow
def test_two_processes_train_what_one_trains(tmp_path: Path) -> None:
    assert difference(tmp_path, 2, *HRAD) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "arguments"),
    [
        (2, ("predictor=specdecpp", "trainer.epochs=4", "data=data/toy", "logger=none")),
        (
            2,
            (
                "predictor=specdecpp",
                "trainer.accumulate=2",
                "trainer.epochs=4",
                "data=data/toy",
                "logger=none",
            ),
        ),
        (
            3,
            (
                "predictor=specdecpp",
                "trainer.batch_size=1",
                "trainer.epochs=2",
                "data=data/toy",
                "logger=none",
            ),
        ),
        (2, (*HRAD, "trainer.epochs=20", "trainer.lr=3e-3", "trainer.patience=1")),
    ],
    ids=["specdecpp", "accumulate", "two of three have nothing", "early stopping"],
)
def test_other_batches_and_counts(
    processes: int, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    assert difference(tmp_path, processes, *arguments) < TOLERANCE
    if "trainer.patience=1" in arguments:
        metrics = json.loads((tmp_path / "checkpoints" / "2" / "metrics.json").read_text())
        assert metrics["epochs"] < 20, "it did stop early, in both processes"


@pytest.mark.slow
def test_a_sweep_under_the_launcher_is_refused(tmp_path: Path) -> None:
    done = launch(tmp_path, 2, "-m", "predictor.depth=0,1")
    assert (
        done.returncode != 0
        and "error: -m: a sweep runs its jobs in one process each" in done.stderr
    )
