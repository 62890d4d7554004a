"""train.py as one process and as several of `accelerate launch` (of CPUs, gloo): the result of one
process, from one writer; and what a harvest needs at its peak does not grow with the number of
prompts, for shards stream to disk."""

import json
import os
import re
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
from tests.helpers.programs.programs import base, run, write_prompts

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes"]


# Training -----------------------------------------------------------------------------------------

HRAD = ("predictor=hrad", "trainer.epochs=4", "data=data/toy", "logger=none")
TOLERANCE = 2e-6
"""Of weights and metrics. Seen: 3e-8 and 2.4e-7, with dropout and class-balanced draws."""


def launch(folder: Path, processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``train.py *arguments`` on that many CPU processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launcher = [*LAUNCH, str(processes), "--main_process_port", port]
    settings = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    captured = {"env": {**os.environ, **settings}, "capture_output": True, "text": True}
    return subprocess.run([*launcher, str(ROOT / "train.py"), *arguments], cwd=folder, **captured)


def numbers(value: object, name: str = "") -> dict[str, float]:
    """The numbers in JSON, by their places, without seconds."""
    if isinstance(value, int | float):
        return {name: float(value)}
    parts = dict(enumerate(value)) if isinstance(value, list) else value
    found = dict[str, float]()
    for key, part in parts.items() if isinstance(parts, dict) else ():
        found |= {} if key == "seconds" else numbers(part, f"{name}.{key}")
    return found


def difference(folder: Path, processes: int, *arguments: str) -> float:
    """The largest between what one process trains and what several do: of weights, and of numbers
    in the metrics."""
    write_harvest(folder / "data" / "toy")
    alone, several = (folder / "checkpoints" / name for name in ("1", str(processes)))
    printed = StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.chdir(folder)
        run(train, *arguments, "out=checkpoints/1")
    done = launch(folder, processes, *arguments, f"out=checkpoints/{processes}")
    assert done.returncode == 0, done.stderr
    for text in (printed.getvalue(), done.stdout):
        assert text.count("saved checkpoints/") == 1, "one process prints and writes"
    assert not (folder / "outputs").exists(), "no run folders"
    assert {*(folder / "checkpoints").iterdir()} == {alone, several}
    a, b = (load_file(each / "model.safetensors") for each in (alone, several))
    weights = max(float((a[name] - b[name]).abs().max()) for name in a)
    left, right = (
        numbers(json.loads((each / "metrics.json").read_text())) for each in (alone, several)
    )
    assert left.keys() == right.keys()
    return max(weights, *(abs(left[name] - right[name]) for name in left))


SPECDECPP = ("predictor=specdecpp", "data=data/toy", "logger=none")


@pytest.mark.parametrize(
    ("processes", "arguments"),
    [
        (2, HRAD),
        pytest.param(2, (*SPECDECPP, "trainer.epochs=4"), marks=pytest.mark.full),
        (2, (*SPECDECPP, "trainer.accumulate=2", "trainer.epochs=4")),
        (3, (*SPECDECPP, "trainer.batch_size=1", "trainer.epochs=2")),
        pytest.param(
            *(2, (*HRAD, "trainer.epochs=20", "trainer.lr=3e-3", "trainer.patience=1")),
            marks=pytest.mark.full,
        ),
    ],
    ids=["hrad", "specdecpp", "accumulate", "two of three have nothing", "early stopping"],
)
def test_several_processes_train_what_one_trains(
    processes: int, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    assert difference(tmp_path, processes, *arguments) < TOLERANCE
    if "trainer.patience=1" in arguments:
        metrics = json.loads((tmp_path / "checkpoints" / "2" / "metrics.json").read_text())
        assert metrics["epochs"] < 20, "it did stop early, in both processes"


def test_a_sweep_under_the_launcher_is_refused(tmp_path: Path) -> None:
    done = launch(tmp_path, 2, "-m", "predictor.depth=0,1")
    assert done.returncode != 0
    said = r"error( in process 1)?: -m: a sweep runs its jobs in one process each"
    assert re.search(said, done.stderr), "whichever ends first ends the other"


# Memory -------------------------------------------------------------------------------------------

PROGRAM = """
import resource, runpy
runpy.run_path("scripts/gen_data.py", run_name="__main__")
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak(prompts: int, pair: Path, folder: Path) -> float:
    """MB at the peak of a harvest."""
    source = folder / f"{prompts}.jsonl"
    words = (range(n % 31 + 1, n % 31 + n % 9 + 3) for n in range(prompts))
    write_prompts(({"prompt": " ".join(f"w{n}" for n in each)} for each in words), str(source))
    data = [*base(pair), "pair.name=tiny", f"dataset.path={source}", f"out={folder / str(prompts)}"]
    settings = ["gamma=4", "max_new_tokens=16", "batch_size=20", "anchors.stride=2"]
    command = [sys.executable, "-c", PROGRAM, *settings, *data]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    return int(done.stdout.split("peak ")[1]) / 1024


def test_ten_times_the_prompts_take_the_same_memory(tiny_pair_dir: Path, tmp_path: Path) -> None:
    few, many = (peak(prompts, tiny_pair_dir, tmp_path) for prompts in (200, 2000))
    print(f"peak memory: {few:.0f} MB with 200 prompts, {many:.0f} MB with 2,000")
    assert many < 1.1 * few
