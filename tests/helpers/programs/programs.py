"""Programs run in this process, from their command line, on a tiny pair."""

from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hydra.core.global_hydra import GlobalHydra

from runtime.cli import Program

GREEDY = ("warp=greedy", "draft_warp.temperature=0")
SPLITS = ("splits.calibration=0.3", "splits.test=0.3")


def base(pair: Path) -> list[str]:
    return [
        *(f"pair.{side}={pair / side}" for side in ("target", "draft")),
        *(
            "pair.dtype=float64",
            "dataset=jsonl",
            "dataset.path=prompts.jsonl",
            "dataset.chat=false",
        ),
    ]


def mode(program: Program) -> SimpleNamespace:
    """Return a mode of a program, such as ``tune.tree``, as a module with its `main`."""
    return SimpleNamespace(__name__=program.script.stem, main=program)


def run(program: Any, *arguments: str) -> None:
    GlobalHydra.instance().clear()
    with patch("sys.argv", [f"{program.__name__.rpartition('.')[2]}.py", *arguments]):
        program.main()


def refused(program: Any, *arguments: str) -> str:
    """Return the line that the program ends with, whatever else it prints."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as printed:
        with pytest.raises(SystemExit) as exit_code:
            run(program, *arguments)
    assert exit_code.value.code == 2
    message = printed.getvalue().strip().splitlines()[-1]
    assert message.startswith("error: ")
    return message
