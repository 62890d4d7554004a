"""The README: short enough to be read, and its Python runs as it stands."""

import re
from pathlib import Path

import pytest

from tests.helpers.models.tiny_pair import save_tiny_pair

README = (Path(__file__).parents[2] / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_it_is_short() -> None:
    assert len(README.split()) <= 1200


def test_the_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a toy pair in place of the embedded one."""
    save_tiny_pair(tmp_path / ".cache" / "draftpredict" / "smollm2")
    monkeypatch.setenv("HOME", str(tmp_path))
    found: dict = {}
    for code in PYTHON:
        exec(compile(code, "README.md", "exec"), found)
    assert found["output"].shape[1] > found["inputs"].input_ids.shape[1]
    assert re.search(r"w\d+(.|\n)* \d\.\d+\n", capsys.readouterr().out)


def test_the_python_is_ten_lines() -> None:
    assert len(PYTHON) == 2
    for code in PYTHON:
        assert len([line for line in code.splitlines() if line.strip()]) <= 10
