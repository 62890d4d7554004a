"""The README: short enough to be read; its Python, and that of the guide to generate, run as they
stand."""

import re
from pathlib import Path

import pytest

from tests.helpers.models.tiny_pair import save_tiny_pair

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs/guides/generate.md").read_text()
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
PYTHON = [*BLOCK.findall(README), *BLOCK.findall(GUIDE)[:1]]


def test_it_is_short() -> None:
    assert len(README.split()) <= 1000


def test_the_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a toy pair in place of the embedded one."""
    folder = save_tiny_pair(tmp_path / ".cache" / "draftpredict" / "smollm2")
    monkeypatch.setenv("HOME", str(tmp_path))
    names: dict = {}
    for code in PYTHON:
        exec(compile(code.replace("/path/to/models", str(folder)), "README.md", "exec"), names)
    assert names["output"].shape[1] > names["inputs"].input_ids.shape[1]
    assert re.search(r"w\d+(.|\n)* \d\.\d+\n", capsys.readouterr().out)


def test_the_python_is_ten_lines() -> None:
    assert len(PYTHON) == 2
    for code in PYTHON:
        assert len([line for line in code.splitlines() if line.strip()]) <= 10
