"""``python train.py -m``: a folder per job, finished jobs skipped, failed ones named, with every
launcher."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

import train
from data_gen.storage.dataset import Harvest
from predictors.base import load_predictor
from runtime.job import job_name
from runtime.json_files import write_checksummed
from tests.helpers.data.harvests import write_harvest
from tests.helpers.programs.programs import refused, run
from tests.helpers.training.trainings import result

ROOT = Path(__file__).resolve().parents[2]
SWEEP = ("predictor.layers=[-1],[-9],null", "trainer.epochs=1", "logger=none", "data=data/toy")
FOLDERS = [
    f"data=data%2Ftoy+predictor.layers={layers}+trainer.epochs=1" for layers in ("[-1]", "null")
]


@pytest.fixture(autouse=True)
def toy(here: Path) -> None:
    write_harvest(here / "data" / "toy")


@pytest.mark.slow
def test_jobs_have_folders_and_are_done_once(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path("checkpoints/specdecpp-sweep")
    manifest = Harvest.open("data/toy").manifest.written

    def swept(*more: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) if code else nullcontext() as end:
            run(train, "-m", *SWEEP, *more)
        assert not code or end.value.code == code
        printed = capsys.readouterr()
        return printed.out + printed.err

    def remade(**changed: object) -> None:
        write_checksummed(Path("data/toy/manifest.json"), {**manifest, **changed})

    printed = swept(code=2)  # one of the three fails, the others are trained
    expected = "predictor.layers: expected some of the recorded layers"
    failed = "failed: predictor.layers=[-9] trainer.epochs=1 logger=none data=data/toy:"
    assert f"{failed} {expected}" in printed and f"error: {expected}" in printed
    assert printed.count("saved checkpoints/") == 2
    assert sorted(path.name for path in root.iterdir()) == FOLDERS
    before = [result(root / name) for name in FOLDERS]
    assert "predictor.layers=null" in (root / FOLDERS[1] / "config.json").read_text()

    first, second = (root / name for name in FOLDERS)
    (first / "model.safetensors").write_bytes(b"half")
    printed = swept(code=2)
    assert f"out: {second} is finished, overwrite=true redoes it" in printed
    assert f"out: {first} is trained again: out: {first} is incomplete or damaged" in printed
    assert printed.count("saved checkpoints/") == 1
    assert [result(root / name) for name in FOLDERS] == before

    one = "predictor.layers=[-1]"
    remade(command="python scripts/gen_data.py out=./data/toy", versions={"torch": "9"})
    assert f"out: {first} is finished" in swept(one), "the harvest holds the same"
    remade(warp={**manifest["warp"], "top_k": 5})
    assert "is trained again: training.data=" in swept(one), "made with other settings"
    write_harvest(Path("data/toy"), rows=31)
    printed = swept(one)
    assert "is trained again: training.data=" in printed
    assert printed.count("saved checkpoints/") == 1
    assert swept(one, "overwrite=true").count("saved checkpoints/") == 1


def test_a_single_run_is_not_a_place_for_a_sweep() -> None:
    Path("checkpoints/x").mkdir(parents=True)
    Path("checkpoints/x/metrics.json").write_text("{}")
    message = refused(train, "-m", *SWEEP, "predictor.layers=[-1]", "out=checkpoints/x")
    assert message.startswith("error: out: checkpoints/x is the result of a single run")


def test_names_of_jobs() -> None:
    assert job_name(["predictor.w_rej=3", "out=x", "logger=none", "predictor.depth=1"]) == job_name(
        ["predictor.depth=1", "predictor.w_rej=3", "overwrite=true", "logger.project=y"]
    )
    assert job_name(["data=a/b"]) != job_name(["data=a_b"]) and "/" not in job_name(["data=a/b"])
    assert job_name([]) == "defaults"
    long = [job_name([f"data={'x' * 200}{n}"]) for n in range(2)]
    assert long[0] != long[1] and max(map(len, long)) < 200


@pytest.mark.parametrize(
    ("setting", "wrong"),
    [("count=none", "count: expected a whole number from 1 on"), ("+gpu=1", "gpu: expected gpus")],
)
def test_settings_of_the_launcher_are_checked(setting: str, wrong: str) -> None:
    setting = f"+hydra.launcher.{setting[1:]}" if setting[0] == "+" else f"hydra.launcher.{setting}"
    message = refused(train, "-m", *SWEEP, "hydra/launcher=ray", setting)
    assert message.startswith(f"error: hydra.launcher.{wrong}")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["basic", "joblib", "submitit_local", "ray"])
def test_every_launcher(launcher: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "train.py"), "-m", *SWEEP, f"hydra/launcher={launcher}"]
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    outputs = []
    for _ in range(2):
        done = subprocess.run(
            command, env={**os.environ, **settings}, capture_output=True, text=True
        )
        logs = [path.read_text() for path in tmp_path.glob("outputs/*/*/.submitit/*/*_log.out")]
        outputs.append(done.stdout + "".join(logs))
        assert done.returncode == 2, done.stderr
        assert "error: predictor.layers: expected" in done.stderr, done.stderr
    root = tmp_path / "checkpoints" / "specdecpp-sweep"
    assert sorted(path.name for path in root.iterdir()) == FOLDERS
    for name in FOLDERS:
        load_predictor(root / name)
        assert f"{name} is finished, overwrite=true redoes it" in outputs[1]
