"""The guide on `generate`: its first example runs as it stands."""

import re
from pathlib import Path

import torch

from tests.helpers.models.tiny_pair import save_tiny_pair

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "generate.md").read_text()


def test_the_example_runs(tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)[0]
    save_tiny_pair(tmp_path)
    found: dict = {}

    exec(compile(code.replace("/path/to/models", str(tmp_path)), "generate.md", "exec"), found)

    assert isinstance(found["output"], torch.Tensor) and found["output"].shape[1] > 3
