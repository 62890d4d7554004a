"""Saving and loading checkpoints where something is wrong: one line that names the file; what was
good stays. Whatever happens to the bytes of a checkpoint, loading it works or ends in one line."""

import errno
import json
import os
import random
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from predictors import base
from predictors.base import Predictor, load_predictor, read_metrics, save_predictor
from predictors.calibration import Calibration
from predictors.inputs import Inputs
from predictors.survival import Survival
from runtime import files
from runtime.errors import UserError
from runtime.files import refuse_foreign, replaced_folder
from tests.helpers.damage.damage import damage_one_file, for_as_long_as_asked
from tests.helpers.damage.refusals import refuses
from tests.helpers.training.checkpoints import METRICS, rewrite_checksum, write_checkpoint

DIM = 6


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoints" / "hrad", "hrad", DIM)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def rewrite(checkpoint: Path, change: Any, checksum: bool, name: str = "config.json") -> None:
    """change: what replaces some values, or a function of all."""
    held = json.loads((checkpoint / name).read_text())
    held = change(held) if callable(change) else {**held, **change}
    (checkpoint / name).write_text(json.dumps(held))
    if checksum:
        rewrite_checksum(checkpoint)


def refused(checkpoint: Path, match: str, key: str = "checkpoint") -> str:
    return refuses(f"^{key}: {match}", load_predictor, checkpoint, key=key)


UNSEALED = [{}, {"sha257": {}}, {"sha256": None}, {"sha256": {}}, {"sha256": []}]
SCOPED = HealthCheck.function_scoped_fixture
NAN, INF = float("nan"), float("inf")
Change = Callable[[dict[str, Any]], Any]
WRONG: dict[str, Change] = {
    "NaN": lambda w: {**w, "layers.0.bias": w["layers.0.bias"] * NAN},
    "infinite": lambda w: {**w, "layers.6.weight": w["layers.6.weight"] + INF},
    "wider": lambda w: {**w, "layers.0.weight": torch.zeros(256, DIM + 1)},
    "half precision": lambda w: {name: tensor.half() for name, tensor in w.items()},
    "integers": lambda w: {name: tensor.int() for name, tensor in w.items()},
    "one missing": lambda w: {name: tensor for name, tensor in w.items() if name != "mean"},
    "one too many": lambda w: {**w, "extra": torch.zeros(1)},
    "none": lambda w: {"x": torch.zeros(0)},
}


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_weights_are_refused(checkpoint, wrong, checksums):
    path = checkpoint / "model.safetensors"
    save_file(WRONG[wrong](load_file(path)), path)
    if not checksums:
        rewrite_checksum(checkpoint)
    says = ".*checkpoints/hrad is incomplete or damaged.*train.py"
    line = refused(checkpoint, says, "stop.checkpoint")
    assert ("model.safetensors is not as it was written" in line) == checksums


NO_STATES = Inputs((), (), depth=True, history=True).to_dict()
CHANGES: list[tuple[str, Any, str]] = [
    ("config.json", lambda c: [c], "python train.py"),
    ("config.json", {"format_version": 99}, "python train.py"),
    ("config.json", {"predictor": "os"}, "python train.py"),
    ("config.json", {"predictor": "base"}, "python train.py"),
    ("config.json", {"predictor": "a.b"}, "python train.py"),
    ("config.json", {"predictor": ""}, "python train.py"),
    ("config.json", {"predictor": 7}, "python train.py"),
    ("config.json", {"dim": DIM + 1}, "incomplete or damaged.*state_dict.*python train.py"),
    ("config.json", {"dim": 10**12}, "python train.py"),
    ("config.json", {"dim": -1}, "python train.py"),
    ("config.json", lambda c: {k: v for k, v in c.items() if k != "settings"}, "python train.py"),
    ("config.json", lambda c: {k: v for k, v in c.items() if k != "inputs"}, "python train.py"),
    ("config.json", lambda c: c["settings"].update(width=3) or c, "python train.py"),
    ("config.json", lambda c: c["settings"].update(gamma=0) or c, "python train.py"),
    ("config.json", lambda c: c["inputs"].update(target_hidden=[INF]) or c, "python train.py"),
    ("config.json", {"inputs": NO_STATES}, f"its inputs make no {DIM} columns"),
    ("calibration.json", {"scale": ["x"] * 3}, "incomplete or damaged"),
    ("calibration.json", {"scale": [1.0, 2.0]}, "incomplete or damaged"),
    ("calibration.json", {"bias": [1e308, -1e308, 0.0]}, "incomplete or damaged"),
    ("calibration.json", {"offset": [NAN] * 3}, "incomplete or damaged"),
    ("calibration.json", {"curves": [[[0.0], [9.0]]]}, "incomplete or damaged"),
]


@pytest.mark.parametrize(("name", "change", "says"), CHANGES, ids=range(len(CHANGES)))
def test_wrong_values_are_refused(checkpoint, name, change, says):
    rewrite(checkpoint, change, checksum=True, name=name)
    refused(checkpoint, f".*{says}")


def test_every_digit_counts(checkpoint):
    for name in ("config.json", "calibration.json", "metrics.json"):
        content = (checkpoint / name).read_bytes()
        for place in [n for n, byte in enumerate(content) if chr(byte).isdigit()][::7]:
            changed = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
            (checkpoint / name).write_bytes(changed)
            refused(checkpoint, "(.*damaged|.*version)")
            refuses("^folder: .*damaged|^folder: .*version", read_metrics, checkpoint, "folder")
        (checkpoint / name).write_bytes(content)
    load_predictor(checkpoint)


def test_an_edited_model_card_is_said(checkpoint, capsys):
    assert read_metrics(checkpoint, "folder") == METRICS and not capsys.readouterr().out
    (checkpoint / "README.md").write_text("Better than it is.")
    assert read_metrics(checkpoint, "folder") == METRICS
    assert capsys.readouterr().out == (
        f"warning: {checkpoint}/README.md is not as it was written. The numbers are those of"
        " metrics.json\n"
    )
    load_predictor(checkpoint)


@pytest.mark.parametrize("kept", UNSEALED, ids=str)
def test_a_checkpoint_without_its_checksums_is_refused(checkpoint, kept):
    def without(config: dict[str, Any]) -> dict[str, Any]:
        del config["sha256"]
        return {**config, **kept}

    rewrite(checkpoint, without, checksum=False)
    refused(checkpoint, ".*damaged.*its checksum does not fit")


def test_a_missing_or_an_older_checkpoint_names_the_command(checkpoint):
    rewrite(checkpoint, {"format_version": 2}, checksum=False)
    refused(checkpoint, ".*has format version 2, this version reads 5. Train it again: python")
    refused(checkpoint / "nowhere", ".*python train.py")


@pytest.mark.parametrize("name", ["config.json", "calibration.json", "model.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "empty"])
def test_damaged_files_are_refused(checkpoint, name, damage):
    path, size = checkpoint / name, (checkpoint / name).stat().st_size
    if damage == "missing":
        path.unlink()
    else:
        os.truncate(path, size // 2 if damage == "truncated" else 0)
    refused(checkpoint, ".*python train.py")


def full(*arguments: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def saves(checkpoint: Path, predictor: Predictor, match: str) -> str:
    """The one line that saving a checkpoint in place of another ends in."""
    with pytest.raises(UserError, match=match) as refusal:
        with replaced_folder(checkpoint, "config.json") as folder:
            save_predictor(predictor, folder, {"dim": DIM})
    return str(refusal.value)


@pytest.fixture
def kept(checkpoint: Path) -> Any:
    """Holds that what was saved before is still there, alone."""
    before = content(checkpoint)
    yield load_predictor(checkpoint)
    assert content(checkpoint) == before
    assert [path.name for path in checkpoint.parent.iterdir()] == ["hrad"]
    load_predictor(checkpoint)


@pytest.mark.parametrize("step", ["save", "write_bytes", "_sync", "mkdir", "replace", "rename"])
def test_a_full_disk_keeps_the_earlier_checkpoint(checkpoint, kept, step, monkeypatch):
    holder = {"save": base, "_sync": files}.get(step, Path)
    with monkeypatch.context() as patched:
        patched.setattr(holder, step, full)
        says = r"^out: \S*hrad\S* cannot be written .*No space left on device.*Free some"
        assert "\n" not in saves(checkpoint, kept, says)


def test_a_disk_that_takes_no_more_keeps_the_earlier_checkpoint(checkpoint, kept):
    """Real writes that fail in the middle of model.safetensors."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        saves(checkpoint, kept, "^out: .*model.safetensors cannot be written .*File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_the_last_rename_fails(checkpoint, kept, monkeypatch):
    """The earlier checkpoint has left its place; it is put back."""
    rename = Path.rename

    def second_fails(self: Path, target: Path) -> Path:
        return full() if self.name == ".hrad.writing" else rename(self, target)  # type: ignore[return-value, func-returns-value]

    monkeypatch.setattr(Path, "rename", second_fails)
    saves(checkpoint, kept, "^out: .* cannot be written")


def test_an_interrupted_save_and_a_checkpoint_out_of_its_place(checkpoint, kept):
    with pytest.raises(KeyboardInterrupt):
        with replaced_folder(checkpoint, "config.json") as folder:
            (folder / "config.json").write_text("half")
            raise KeyboardInterrupt
    with pytest.raises(UserError, match="^out: .* holds something else"):
        with replaced_folder(checkpoint.parent, "config.json"):
            pass
    checkpoint.rename(checkpoint.with_name(".hrad.old"))
    refuse_foreign(checkpoint, "config.json")


@pytest.mark.parametrize("read_only", ["hrad", "checkpoints"])
def test_a_read_only_folder_is_refused_at_once(checkpoint, read_only, monkeypatch):
    access, opened = os.access, os.open
    may = lambda path, mode: Path(path).name != read_only and access(path, mode)  # noqa: E731
    monkeypatch.setattr(os, "access", may)

    def refusing(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_RDWR and read_only in (Path(path).name, Path(path).parent.name):
            raise PermissionError(path)
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refusing)
    says = "^out: .*(read-only|no folder to write in).* choose another out=<folder>|Choose"
    refuses(says, refuse_foreign, checkpoint, "config.json")
    load_predictor(checkpoint)


CURVES = (((-1.0, 0.0, 1.0), (0.1, 0.4, 0.9)),)
ISOTONIC = Calibration("isotonic", curves=CURVES, survival=Survival(0.9, 0.2, -0.1))
SCALES = (0.1, 0.0, -0.1), (1.0, 1.1, 0.9), (0.0, 0.1, -0.2)
VECTOR = Calibration("platt", *SCALES, rows=9, nll_after=0.5)


@pytest.fixture(scope="module", params=["specdecpp", "hrad"])
def whole(request: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("checkpoint")
    calibration = ISOTONIC if request.param == "specdecpp" else VECTOR
    write_checkpoint(folder, request.param, DIM, calibration=calibration)
    return Whole({path.name: path.read_bytes() for path in folder.iterdir()})


def loads(folder: Path, whole: dict[str, bytes], seed: int) -> bool:
    """Whether the checkpoint loads after damage number `seed`; anything but a UserError of one line
    is raised. In three cases of four the checksums are made to fit, so that it gets as far as the
    parsers."""
    chance = random.Random(seed)
    for name, content in whole.items():
        (folder / name).write_bytes(content)
    for _ in range(chance.choice([1, 1, 2])):
        damage_one_file(folder, chance)
    if chance.random() < 0.75:
        with suppress(ValueError):  # no JSON any more
            rewrite_checksum(folder)
    try:
        predictor = load_predictor(folder)
    except UserError as error:
        assert "\n" not in str(error) and str(error).startswith("checkpoint: ")
        return False
    assert torch.isfinite(predictor.predict_proba(torch.ones(3, DIM))).all()
    assert torch.isfinite(predictor.calibration.survival(torch.rand(2, 4))).all()
    return True


class Whole(dict[str, bytes]):
    """Files of a checkpoint; what a failing example prints of them is short."""

    __repr__ = object.__repr__


@settings(max_examples=300, deadline=None, suppress_health_check=[SCOPED])
@given(seed=st.integers(0, 2**32))
@pytest.mark.slow
def test_a_damaged_checkpoint_loads_or_is_refused(tmp_path, whole, seed):
    assert loads(tmp_path, whole, seed) in (True, False), "and nothing is raised"


def test_what_dropout_may_leave_out_is_looked_at(tmp_path, whole):
    """Weights of which a hidden unit of H-RAD overflows."""
    assert len({loads(tmp_path, whole, -25328) for _ in range(20)}) == 1


@pytest.mark.slow
def test_for_as_long_as_asked(tmp_path, whole, capsys):
    """FUZZ_SECONDS=600 pytest -m slow tests/unit/predictors/test_checkpoint_faults.py"""
    for_as_long_as_asked("checkpoints", lambda seed: loads(tmp_path, whole, seed), capsys)


def test_the_undamaged_one_loads_and_damage_under_checksums_never_does(tmp_path, whole):
    for name, content in whole.items():
        (tmp_path / name).write_bytes(content)
    load_predictor(tmp_path)
    for name in ("model.safetensors", "calibration.json", "metrics.json", "config.json"):
        for seed in range(30):
            at = random.Random(seed).randrange(len(whole[name]))
            content = bytearray(whole[name])
            content[at] ^= 1
            (tmp_path / name).write_bytes(content)
            refuses("^checkpoint: ", load_predictor, tmp_path)
        (tmp_path / name).write_bytes(whole[name])
