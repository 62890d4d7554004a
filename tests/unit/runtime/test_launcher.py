"""What launchers, and variables they left in the shell, make of a script."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.cli import share_the_terminal
from runtime.errors import UserError
from runtime.launcher import Launched, launched
from runtime.processes import this_process

SCRIPT = """
from runtime.cli import program
from runtime.settings.kinds import Count, Group

class Settings(Group):
    a: Count

@program(__file__, Settings, several=SEVERAL)
def main(cfg):
    import body

    body.main(cfg)

if __name__ == "__main__":
    main()
"""
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, Launched(0, 1, 1)),
        ({"RANK": "1"}, Launched(0, 1, 1)),
        ({"RANK": "x", "WORLD_SIZE": "1"}, Launched(0, 1, 1)),
        ({"RANK": "1", "WORLD_SIZE": ""}, Launched(0, 1, 1)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, Launched(5, 8, 4)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, Launched(1, 2, 1)),
    ],
)
def test_place_among_processes(
    variables: dict[str, str], found: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launched() == found


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"WORLD_SIZE": "two"}, "^WORLD_SIZE: two is no whole number"),
        ({"WORLD_SIZE": "-2"}, "^WORLD_SIZE: -2 is no whole number"),
        ({"WORLD_SIZE": "2", "RANK": "x"}, "^RANK: x is no whole number"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "^RANK: 2 is not below WORLD_SIZE=2"),
    ],
)
def test_wrong_variables_are_named(
    variables: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=says):
        launched()


def job(folder: Path, several: bool, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "conf").mkdir(exist_ok=True)
    (folder / "conf" / "job.yaml").write_text("a: 1\n")
    (folder / "job.py").write_text(SCRIPT.replace("SEVERAL", str(several)))
    (folder / "body.py").write_text("def main(cfg): print('done')")
    command, environment = [sys.executable, "job.py"], {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


@pytest.mark.slow
def test_a_script_of_one_process(tmp_path: Path) -> None:
    only = (
        "error: WORLD_SIZE: this script is one process. Run it without accelerate launch, or unset"
        " WORLD_SIZE\n"
    )
    alone, among = job(tmp_path, False, RANK="1"), job(tmp_path, False, RANK="0", WORLD_SIZE="2")
    assert (alone.returncode, alone.stdout, alone.stderr) == (0, "done\n", "")
    assert (among.returncode, among.stdout, among.stderr) == (2, "", only)
    wrong = job(tmp_path, False, WORLD_SIZE="x")
    assert (wrong.returncode, wrong.stderr) == (
        2,
        "error: WORLD_SIZE: x is no whole number from 0 on. Unset it\n",
    )


def test_of_several_the_first_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, printed in (("0", "x\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        with monkeypatch.context() as patch:
            patch.setattr("sys.argv", ["job.py"])
            patch.setattr("sys.stdout", sys.stdout)
            share_the_terminal(several=True)
            print("x")
        assert capsys.readouterr().out == printed


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_processes_that_cannot_meet_are_refused(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(
        UserError,
        match=f"^{missing}: not set, so that 2 processes .WORLD_SIZE. cannot find each other",
    ):
        this_process.__wrapped__()
