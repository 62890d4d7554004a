"""Programs run in this process, from their command line, on a tiny pair."""

import json
import sys
from collections.abc import Iterable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from runtime.cli import Program

CONF = Path(__file__).resolve().parents[3] / "conf"
GREEDY = ("warp=greedy", "draft_warp.temperature=0")
SPLITS = ("splits.calibration=0.3", "splits.test=0.3")
JSONL = ("dataset=jsonl", "dataset.path=prompts.jsonl", "dataset.chat=false")


def composed(program: str, *overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(program, list(overrides))


def models(pair: Path) -> list[str]:
    return [f"pair.{side}={pair / side}" for side in ("target", "draft")]


def base(pair: Path) -> list[str]:
    return [*models(pair), "pair.dtype=float64", *JSONL]


def write_prompts(prompts: int | Iterable[Mapping[str, str]], path: str = "prompts.jsonl") -> None:
    """These, or so many of three words."""
    if isinstance(prompts, int):
        prompts = [{"id": f"p{n}", "prompt": f"w{n + 1} w{n + 2} w{n + 3}"} for n in range(prompts)]
    Path(path).write_text("\n".join(map(json.dumps, prompts)))


def odd_and_even(count: int) -> list[dict[str, str]]:
    """Prompts of two datasets."""
    of = ("even", "odd")
    return [{"prompt": f"w{n} w{n + 1} w2", "dataset": of[n % 2]} for n in range(1, count + 1)]


def mode(program: Program) -> SimpleNamespace:
    """Return a mode of a program, such as ``tune.tree``, as a module with its `main`."""
    return SimpleNamespace(__name__=program.script.stem, main=program)


def run(program: Any, *arguments: str) -> str:
    """Return what it printed, which is printed."""
    GlobalHydra.instance().clear()
    outer, argv = sys.stdout, [f"{program.__name__.rpartition('.')[2]}.py", *arguments]
    with patch("sys.argv", argv), redirect_stdout(StringIO()) as printed:
        try:
            program.main()
        finally:
            outer.write(printed.getvalue())
    return printed.getvalue()


def refused(program: Any, *arguments: str) -> str:
    """Return the line that the program ends with, whatever else it prints."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as printed:
        with pytest.raises(SystemExit) as exit_code:
            run(program, *arguments)
    assert exit_code.value.code == 2
    message = printed.getvalue().strip().splitlines()[-1]
    assert message.startswith("error: ")
    return message
