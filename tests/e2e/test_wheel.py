"""A wheel runs from any folder: conf/, the programs and the embedded pair's layers are in it."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import train
from runtime.job import as_called

ROOT = Path(__file__).parents[2]
BUILT_FROM = (
    *("pyproject.toml", "README.md", "LICENSE", "NOTICE", "train.py"),
    *("runtime", "predictors", "decoding", "data_gen", "evaluation", "serving", "reports"),
    *("pairs", "scripts", "conf"),
)
TINY = ("anchors.stride=1", "gamma=2", "max_new_tokens=4", "dataset.limit=4", "out=data/rounds")


@pytest.fixture(scope="module")
def draftpredict(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of an environment that holds the wheel, and sees the libraries of this one."""
    source, wheels, home = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "venv"))
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(source)]
    subprocess.run([*pip, *build], check=True)
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    install = ["--python", str(python), "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, *install, *map(str, wheels.glob("*.whl"))], check=True)
    site = home / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    return home / "bin" / "draftpredict"


def run(
    draftpredict: Path, folder: Path, *arguments: str, code: int = 0
) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(draftpredict), *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    return done


@pytest.mark.slow
def test_an_installed_wheel_runs_the_demo_from_an_empty_folder(
    draftpredict: Path, tmp_path: Path
) -> None:
    assert "name every bad file" in run(draftpredict, tmp_path, "gen_data", "--help").stdout
    assert not any(tmp_path.iterdir())
    run(draftpredict, tmp_path, "build_pair")
    run(draftpredict, tmp_path, "gen_data", *TINY)
    assert (tmp_path / "data" / "rounds" / "manifest.json").is_file()
    refusal = run(draftpredict, tmp_path, "train", "seed=-1", code=2)
    assert refusal.stderr.startswith("error: seed: expected ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], " report, train, "),
        (["training"], " report, train, "),
        (["train", "data=no", "pair=smollm2"], "Run: draftpredict gen_data out=no pair=smollm2"),
    ],
)
def test_what_is_wrong_is_said_with_the_command_that_was_called(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from runtime.cli import command

    monkeypatch.setattr("sys.argv", ["draftpredict", *arguments])
    monkeypatch.setattr(train.main, "called", "")  # and afterwards again
    with pytest.raises(SystemExit) as stopped:
        command()
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error
    assert as_called("Run: python scripts/tune.py seed=1") == "Run: draftpredict tune seed=1"
