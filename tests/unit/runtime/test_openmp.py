"""Programs say how OpenMP's threads wait before torch loads the library, which asks only once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAMS = [ROOT / "train.py", *sorted((ROOT / "scripts").glob("[a-z]*.py"))]
NOTING = """
import importlib.abc, os, sys, runpy
from unittest.mock import MagicMock

class Noting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), os.environ.get("OMP_WAIT_POLICY"))
            raise SystemExit

sys.meta_path.insert(0, Noting())
runpy.run_path(sys.argv[1])["main"].main(MagicMock())
"""


def said(program: Path, **settings: str) -> str:
    """GOMP_SPINCOUNT and OMP_WAIT_POLICY in the moment torch is first imported."""
    given = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [sys.executable, "-c", NOTING, str(program)]
    done = subprocess.run(
        command,
        env={**given, "PYTHONPATH": str(ROOT), **settings},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
@pytest.mark.few(2, rest="slow")
def test_every_program_sets_it_before_torch_loads(program):
    assert said(program) == "10000 None"


@pytest.mark.slow
def test_the_user_s_own_choice_stays():
    assert said(PROGRAMS[0], GOMP_SPINCOUNT="7") == "7 None"
    assert said(PROGRAMS[0], OMP_WAIT_POLICY="ACTIVE") == "None ACTIVE"
