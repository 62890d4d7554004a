"""scripts/gen_data.py as one process and as two of `accelerate launch`, killed for real."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import psutil
import pytest

from data_gen.storage.dataset import Harvest, verify
from data_gen.storage.sharing import Worker

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
SETTINGS = (
    "gamma=3 batch_size=4 max_new_tokens=24 anchors.stride=1 dataset=jsonl dataset.chat=false"
    " pair.dtype=float64 pair.name=tiny"
).split()
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
PROMPTS = 96
MOMENTS = 4  # tests/invariant/test_processes.py has more


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [
        {"id": f"p{n}", "prompt": f"w{n % 29 + 1} w{n % 31 + 1} w{n % 7 + 1}"}
        for n in range(PROMPTS)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


class Job:
    """The command line, started."""

    def __init__(self, size: int, pair: Path, prompts: Path, out: Path, *more: str) -> None:
        launcher = [sys.executable] if size == 1 else LAUNCH
        models = [f"pair.{side}={pair / side}" for side in ("target", "draft")]
        given = (f"dataset.path={prompts}", f"out={out}", *more)
        self.process = subprocess.Popen(
            [*launcher, str(ROOT / "scripts" / "gen_data.py"), *SETTINGS, *models, *given],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={**ENVIRONMENT, "HOME": str(Path.home())},
        )

    def wait(self) -> tuple[int, str]:
        printed, _ = self.process.communicate(timeout=900)
        return self.process.returncode, printed

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill(self) -> None:
        """Launcher and workers, as when the machine goes down."""
        for process in [psutil.Process(self.process.pid), *self.workers()]:
            process.kill()
        self.process.communicate(timeout=60)

    def wait_for_begin(self, out: Path) -> None:
        while not (out / "plan.json").exists():
            assert self.process.poll() is None, self.wait()
            time.sleep(0.01)


Start = Callable[..., Job]


@pytest.fixture(scope="module")
def start(tiny_pair_dir: Path, prompts: Path) -> Start:
    """Of (processes, out, *more settings)."""
    return lambda size, out, *more: Job(size, tiny_pair_dir, prompts, out, *more)


def done(job: Job) -> str:
    """What it printed."""
    code, printed = job.wait()
    assert code == 0, printed
    return printed


@pytest.fixture(scope="module")
def original(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("original") / "data"
    done(start(1, out))
    return out


def assert_same(out: Path, original: Path) -> None:
    assert verify(out) == []
    contents = [Harvest.open(folder).manifest.written["content"] for folder in (out, original)]
    assert contents[0] == contents[1]


def test_two_processes_make_the_records_of_one(
    start: Start, original: Path, tmp_path: Path
) -> None:
    out = tmp_path / "data"
    printed = done(start(2, out))
    assert printed.count("saved ") == printed.count("mean accepted length") == 1
    assert f"{PROMPTS} prompts labelled" in printed, "one bar, for all prompts"
    assert_same(out, original)
    assert done(start(2, out, "verify=true")).count("is whole") == 1
    assert done(start(2, out, "estimate=true")).count("time: about") == 1


def test_one_of_two_killed_ends_the_run_and_a_rerun_finishes(
    start: Start, original: Path, tmp_path: Path
) -> None:
    job = start(2, tmp_path / "data")
    job.wait_for_begin(tmp_path / "data")
    job.workers()[-1].kill()
    assert job.wait()[0] != 0
    done(start(2, tmp_path / "data"))
    assert_same(tmp_path / "data", original)


def test_an_error_is_said_and_ends_all(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (out := tmp_path / "data").write_text("a file in the way")
    code, printed = start(2, out).wait()
    assert code != 0 and f"error: out: {out} holds something else, which would be lost" in printed
    with pytest.raises(ValueError), Worker(1, 2).reporting():
        raise ValueError
    again = "Finished chunks are kept: run the same command again"
    assert f"process 2 of 2 stops. {again}" in capsys.readouterr().err


@pytest.mark.parametrize("size", [1, 2])
def test_killed_at_random_moments(start: Start, original: Path, tmp_path: Path, size: int) -> None:
    """Of the harvest itself: while the models load there is nothing to lose."""
    job = start(size, tmp_path / "whole")
    job.wait_for_begin(tmp_path / "whole")
    began = time.monotonic()
    assert job.wait()[0] == 0
    whole, random, chunks = time.monotonic() - began, Random(size), []
    for moment in range(MOMENTS):
        out = tmp_path / str(moment)
        job = start(size, out)
        job.wait_for_begin(out)
        time.sleep(random.uniform(0, 0.9 * whole))
        job.kill()
        chunks.append(len(list(out.glob("chunk-*.json"))))
        done(start(size, out))
        assert_same(out, original)
    assert len(set(chunks)) > 1, "the moments should differ"
