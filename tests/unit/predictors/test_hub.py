"""A folder server stands in for the hub. Its address is read when huggingface_hub is imported, so
each side is a process of its own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from predictors.hub import local_folder, push_to_hub
from runtime.errors import UserError
from tests.helpers.data.hub_stub import hub, no_hub
from tests.helpers.training.checkpoints import write_checkpoint

PUSH = "from predictors.hub import push_to_hub; print(push_to_hub({folder!r}, 'me/value'))"
FETCH = """
import torch
from predictors.hub import from_pretrained
from predictors.base import load_predictor
x = torch.randn(5, 4)
ours, theirs = load_predictor({folder!r}), from_pretrained('me/value')
assert torch.equal(ours.predict_proba(x), theirs.predict_proba(x))
"""


def said(code: str, address: str, cache: Path) -> subprocess.CompletedProcess[str]:
    settings = {"HF_ENDPOINT": address, "HF_HOME": str(cache), "HF_TOKEN": "hf_x"}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **settings, "HF_HUB_DISABLE_XET": "1"},
        timeout=120,
    )


def test_a_checkpoint_goes_to_the_hub_and_comes_back_the_same(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "made", "specdecpp", 4)
    (folder / "notes.txt").write_text("private")
    with hub(tmp_path / "hub") as address:
        pushed = said(PUSH.format(folder=str(folder)), address, tmp_path / "a")
        assert pushed.returncode == 0, pushed.stderr
        fetched = said(FETCH.format(folder=str(folder)), address, tmp_path / "b")
        assert fetched.returncode == 0, fetched.stderr
        missing = said("from predictors.hub import *; local_folder('me/x')", address, tmp_path)

    sent = {path.name for path in (tmp_path / "hub" / "me" / "value").iterdir()}
    assert sent == {path.name for path in folder.iterdir()} - {"notes.txt"}
    assert "UserError: predictor: no folder me/x" in missing.stderr


def test_a_hub_that_does_not_answer_is_one_line(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "made", "specdecpp", 4)
    pushed = said(PUSH.format(folder=str(folder)), "http://127.0.0.1:9", tmp_path / "a")
    assert "UserError: repository: me/value was not written" in pushed.stderr


@pytest.mark.parametrize("body", [b"<html>log in</html>", b"{}", b"null"])
def test_what_is_no_hub_is_one_line(body: bytes, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "made", "specdecpp", 4)
    with no_hub(body) as address:
        pushed = said(PUSH.format(folder=str(folder)), address, tmp_path / "a")
        fetched = said("from predictors.hub import *; local_folder('me/x')", address, tmp_path)
    lines = [found.stderr.strip().splitlines()[-1] for found in (pushed, fetched)]
    assert "UserError: repository: me/value was not written (what answers there is no" in lines[0]
    assert "UserError: predictor: no folder me/x, and no such repository" in lines[1]


def test_a_folder_is_what_it_is(tmp_path: Path) -> None:
    assert local_folder(tmp_path) == tmp_path
    assert local_folder("/nowhere/at/all") == Path("/nowhere/at/all")


@pytest.mark.parametrize("source", ["", " ", None, 3])
def test_what_is_no_folder_is_refused(source: Any) -> None:
    with pytest.raises(UserError, match="predictor: expected a folder or owner/name"):
        local_folder(source)


def test_a_changed_checkpoint_is_not_pushed(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "made", "specdecpp", 4)
    (folder / "metrics.json").write_text("{}")
    with pytest.raises(UserError, match="folder: .*metrics.json is not as it was written"):
        push_to_hub(folder, "me/value")
