"""What launchers, and variables they left in the shell, make of a script."""

import os
import subprocess
import sys

import pytest

from runtime.cli import share_the_terminal
from runtime.processes import Launched, launched, this_process
from tests.helpers.damage.refusals import refuses

SCRIPT = """
from runtime.cli import program
from runtime.settings.kinds import Count, Group

class Settings(Group):
    a: Count

@program(__file__, Settings)
def main(settings):
    print('done')

if __name__ == "__main__":
    main()
"""
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, Launched(0, 1)),
        ({"RANK": "1"}, Launched(0, 1)),
        ({"RANK": "x", "WORLD_SIZE": "1"}, Launched(0, 1)),
        ({"RANK": "1", "WORLD_SIZE": ""}, Launched(0, 1)),
        ({"RANK": "5", "WORLD_SIZE": "8"}, Launched(5, 8)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, Launched(1, 2)),
        ({"SLURM_PROCID": "1"}, Launched(0, 1)),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, Launched(0, 1)),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, "^SLURM_PROCID: srun has started"),
        ({"SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "4", "RANK": "3"}, Launched(3, 4)),
        ({"WORLD_SIZE": "two"}, "^WORLD_SIZE: two is no whole number"),
        ({"WORLD_SIZE": "-2"}, "^WORLD_SIZE: -2 is no whole number"),
        ({"WORLD_SIZE": "2", "RANK": "x"}, "^RANK: x is no whole number"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "^RANK: 2 is not below WORLD_SIZE=2"),
    ],
)
def test_place_among_processes(variables, found, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if isinstance(found, Launched):
        assert launched() == found
    else:
        refuses(found, launched)


@pytest.mark.slow
def test_a_script_of_one_process(tmp_path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "job.yaml").write_text("a: 1\n")
    (tmp_path / "job.py").write_text(SCRIPT)
    only = (
        "this program starts its own processes, if any (gen_data.py: workers=ray workers.count=8)."
        " Run it without accelerate launch, or unset WORLD_SIZE"
    )
    none = "x is no whole number from 0 on. Unset it"
    for variables, answer in (
        ({"RANK": "1"}, (0, "done\n", "")),
        ({"RANK": "0", "WORLD_SIZE": "2"}, (2, "", f"error: WORLD_SIZE: {only}\n")),
        ({"WORLD_SIZE": "x"}, (2, "", f"error: WORLD_SIZE: {none}\n")),
    ):
        done = subprocess.run(
            [sys.executable, "job.py"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, **variables},
        )
        assert (done.returncode, done.stdout, done.stderr) == answer


def test_of_several_the_first_prints(monkeypatch, capsys):
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
def test_processes_that_cannot_meet_are_refused(missing, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    told = f"^{missing}: not set, so that 2 processes .WORLD_SIZE. cannot find each other"
    refuses(told, this_process.__wrapped__)
