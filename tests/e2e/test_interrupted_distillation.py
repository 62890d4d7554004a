"""Distillations killed at any moment: the same command goes on. Training on the same chats ends in
the same draft, to the bit; chats are other samples after a kill, and every shard is whole."""

import json
import random
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pairs.chats import load_chats
from pairs.self_chat import written_tokens
from tests.helpers.models.tiny_pair import save_talking_target
from tests.helpers.training import trainings
from tests.helpers.training.trainings import KILLS

PROGRAM = "pairs.distill_draft"
finish = partial(trainings.finish, program=PROGRAM)
kill_after = partial(trainings.kill_after, program=PROGRAM)
SETTINGS = (
    "pair.target=target pair.dtype=float32 draft.layers=[0,3] out=made chats.folder=chats"
    " chats.tokens=900 chats.shard_tokens=100 chats.slots=3 chats.prompt_tokens=4 logger=none"
    " chats.response_tokens=6 chats.held_out=5 training.tokens=6000 training.batch_tokens=120"
    " save_seconds=0.02"
).split()


def result(draft: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Content of a draft's folder, and of its record what is not time."""
    record = json.loads((draft / "training.json").read_text())
    del record["progress"]["seconds"]
    return {p.name: p.read_bytes() for p in draft.iterdir() if p.name != "training.json"}, record


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target."""
    folder = tmp_path_factory.mktemp("distillation")
    save_talking_target(folder / "target")
    return folder


@pytest.fixture(scope="module")
def uninterrupted(place: Path) -> tuple[float, Any]:
    """With chats, which the other trainings are given: seconds and result of one in one go."""
    assert finish(place, *SETTINGS, "stage=generate") == 0
    started = time.perf_counter()
    assert finish(place, *SETTINGS, "stage=train") == 0
    return time.perf_counter() - started, result(place / "made")


@pytest.mark.parametrize("kill", KILLS)
@pytest.mark.slow
def test_a_training_killed_at_random_moments_ends_in_the_same_draft(
    kill: int, place: Path, uninterrupted: tuple[float, Any], tmp_path: Path
) -> None:
    """Twice on its way."""
    seconds, expected = uninterrupted
    for name in ("target", "chats"):
        shutil.copytree(place / name, tmp_path / name)
    moments = random.Random(kill)
    for _ in range(2):
        kill_after(moments.uniform(0, seconds), tmp_path, *SETTINGS, "stage=train")
    assert finish(tmp_path, *SETTINGS, "stage=train") == 0
    assert result(tmp_path / "made") == expected
    assert left(tmp_path) == {"chats", "made", "target"}


@pytest.mark.parametrize("kill", KILLS)
@pytest.mark.slow
def test_a_distillation_killed_at_random_moments_is_finished(
    kill: int, place: Path, uninterrupted: tuple[float, Any], tmp_path: Path
) -> None:
    """Both stages."""
    shutil.copytree(place / "target", tmp_path / "target")
    chats, before = tmp_path / "chats", dict[str, bytes]()
    moments = random.Random(kill)
    for _ in range(2):
        kill_after(moments.uniform(0, 2 * uninterrupted[0]), tmp_path, *SETTINGS)
        before |= {path.name: path.read_bytes() for path in chats.glob("*.safetensors")}
    assert finish(tmp_path, *SETTINGS) == 0
    now = {path.name: path.read_bytes() for path in chats.iterdir()}
    assert before.items() <= now.items() and all(name.endswith(".safetensors") for name in now)
    assert 900 <= written_tokens(chats) < 900 + 100 + 6
    assert all(load_chats(path) for path in chats.iterdir())
    progress = result(tmp_path / "made")[1]["progress"]
    assert 6000 <= progress["tokens"] < 6000 + 120
    assert left(tmp_path) == {"chats", "made", "target"}


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"outputs", "log.txt"}
