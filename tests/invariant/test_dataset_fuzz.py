"""Whatever happens to the bytes of a dataset, reading it gives what was written or ends in one
line."""

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from data_gen.prompts import Prompt
from data_gen.responses.log import NAME, open_log
from data_gen.storage.chunks import MANIFEST, PLAN
from data_gen.storage.dataset import Harvest, verify
from data_gen.storage.sharing import ALONE, open_chunks
from decoding.models.loading import ModelPair
from evaluation.replay.read import read_table
from runtime.errors import UserError
from tests.helpers.damage.damage import damage_one_file, misplace_a_file
from tests.helpers.damage.fuzz import for_as_long_as_asked, no_hang
from tests.helpers.data.datasets import RECIPE, answered_dataset, rewrite_checksum

SMALL = replace(RECIPE, stride=1, max_new_tokens=6, batch_size=2)
READERS: dict[str, Callable[[Path], Any]] = {
    "manifest": lambda folder: Harvest.open(folder).manifest.written,
    "rounds": lambda folder: Harvest.open(folder).records("rounds", "all"),
    "mixed": lambda folder: Harvest.open(folder).records("mixed", "train"),
    "responses": lambda folder: list(Harvest.open(folder).prompts("all")),
    "prompts": lambda folder: list(
        Harvest.open(folder).by_prompt("rounds", "all", ["anchor", "token"])
    ),
    "table": lambda folder: vars(read_table(Harvest.open(folder), "all")),
}


class Whole(NamedTuple):
    """An undamaged dataset. read: what `READERS` give."""

    folder: Path
    prompts: list[Prompt]
    plan: dict[str, Any]
    read: dict[str, str]

    __repr__ = object.__repr__  # short in what a failing example prints


@pytest.fixture(scope="module")
def whole(pair: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    prompts, plan = answered_dataset(pair, folder, 4, SMALL)
    data = folder / "data"
    (data / ".lock").unlink()
    read = {name: shown(reader(data)) for name, reader in READERS.items()}
    return Whole(data, prompts, plan, {**read, "answers": shown(answers(data, prompts))})


def answers(folder: Path, prompts: list[Prompt]) -> dict[str, Any]:
    """What the log holds, without those of which nothing is left, which are asked for again."""
    with open_log(folder, {}) as log:
        log.missing(prompts)
        return {name: answer.content for name, answer in sorted(log.responses.items())}


def shown(value: Any) -> str:
    """All of it, comparable."""
    if isinstance(value, dict):
        return "".join(f"{key}: {shown(inner)}\n" for key, inner in value.items())
    if isinstance(value, list):
        return "".join(shown(inner) for inner in value)
    return repr(value.tolist() if isinstance(value, Tensor | np.ndarray) else value)


def reads(place: Path, whole: Whole, seed: int) -> bool:
    """Whether all of the dataset can be read after damage number `seed`. Raises what is no
    UserError of one line. In half of the cases the checksums are made to fit, so that it gets as
    far as the parsers."""
    chance = random.Random(seed)
    folder = place / str(seed)
    shutil.copytree(whole.folder, folder)
    try:
        for _ in range(chance.choice([1, 1, 2])):
            (damage_one_file if chance.random() < 0.9 else misplace_a_file)(folder, chance)
        if chance.random() < 0.5:
            rewrite_checksum(folder)
            return all_read(folder, whole).keys() == whole.read.keys()
        changed = {
            path.name
            for path in whole.folder.iterdir()
            if content(path) != content(folder / path.name)
        }
        found = all_read(folder, whole)
        for name, text in found.items():
            if name == "answers":
                assert set(text.splitlines()) <= set(whole.read[name].splitlines())
            else:
                assert text == whole.read[name], f"{name} is read, and wrong"
        refuse_unseen(folder, whole, changed)
        return found.keys() == whole.read.keys()
    finally:
        shutil.rmtree(folder)


def all_read(folder: Path, whole: Whole) -> dict[str, str]:
    """What could be read, by the name of the reader."""
    readers = {
        **READERS,
        "answers": lambda folder: answers(folder, whole.prompts),
        "verify": verify,
    }
    found = {name: outcome(lambda: reader(folder)) for name, reader in readers.items()}
    bad = found.pop("verify") or []
    assert all("\n" not in line and line.startswith(str(folder)) for line in bad)
    return {name: shown(value) for name, value in found.items() if value is not None}


def outcome(read: Callable[[], Any]) -> Any:
    """None where it ends in one line that names a key."""
    try:
        return read()
    except UserError as error:
        key = str(error).split(": ")[0]
        assert "\n" not in str(error) and key in ("data", "out", "responses.url"), error
        return None


def refuse_unseen(folder: Path, whole: Whole, changed: set[str]) -> None:
    """Every change is found by `verify`, and a resumed run makes those chunks again and no
    others."""
    found = outcome(lambda: verify(folder))
    assert found is None or bool(found) == bool(changed), (found, changed)
    again = outcome(
        lambda: list(
            open_chunks(folder, whole.plan, ALONE, lambda marker: None, lambda marker: None)
        )
    )
    chunks = {int(name.split("-")[1].split(".")[0]) for name in changed - {PLAN, MANIFEST, NAME}}
    assert (again is None and PLAN in changed) or set(again) == chunks


def content(path: Path) -> list[bytes] | None:
    """Lines in any order: each answer stands for itself, elsewhere there is a checksum over all of
    them."""
    return sorted(path.read_bytes().split(b"\n")) if path.is_file() else None


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32))
def test_a_damaged_dataset_is_read_rightly_or_refused(
    tmp_path: Path, whole: Whole, seed: int
) -> None:
    with no_hang():
        assert reads(tmp_path, whole, seed) in (True, False), "and nothing is raised"


@pytest.mark.slow
def test_for_as_long_as_asked(
    tmp_path: Path, whole: Whole, capsys: pytest.CaptureFixture[str]
) -> None:
    """FUZZ_SECONDS=600 pytest -m slow tests/invariant/test_dataset_fuzz.py"""
    for_as_long_as_asked("datasets", lambda seed: reads(tmp_path, whole, seed), capsys)


def test_the_undamaged_one_is_whole(whole: Whole, tmp_path: Path) -> None:
    shutil.copytree(whole.folder, tmp_path / "data")
    assert all_read(tmp_path / "data", whole) == whole.read and verify(tmp_path / "data") == []
    rewrite_checksum(tmp_path / "data")
    assert all(
        content(path) == content(tmp_path / "data" / path.name) for path in whole.folder.iterdir()
    )
