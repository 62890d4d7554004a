"""Saving and loading checkpoints where something is wrong: one line that names the file; what was
good stays."""

import errno
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from predictors import base
from predictors.base import load_predictor, read_metrics, save_predictor
from predictors.inputs import Inputs
from runtime import files
from runtime.errors import UserError
from runtime.files import refuse_foreign, replaced_folder
from tests.helpers.training.checkpoints import METRICS, rewrite_checksum, write_checkpoint

DIM = 6
WEIGHTS = dict[str, torch.Tensor]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoints" / "hrad", "hrad", DIM)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


NAN, INF = float("nan"), float("inf")
WRONG: dict[str, Callable[[WEIGHTS], WEIGHTS]] = {
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
def test_wrong_weights_are_refused(checkpoint: Path, wrong: str, checksums: bool) -> None:
    path = checkpoint / "model.safetensors"
    save_file(WRONG[wrong](load_file(path)), path)
    if not checksums:
        rewrite_checksum(checkpoint)
    with pytest.raises(
        UserError, match="^stop.checkpoint: .*checkpoints/hrad is incomplete or damaged.*train.py"
    ) as no:
        load_predictor(checkpoint, key="stop.checkpoint")
    assert ("model.safetensors is not as it was written" in str(no.value)) == checksums


SETTINGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda c: [c],
    "no settings": lambda c: {name: value for name, value in c.items() if name != "settings"},
    "unknown setting": lambda c: {**c, "settings": {**c["settings"], "width": 3}},
    "bad setting": lambda c: {**c, "settings": {**c["settings"], "gamma": 0}},
    "huge": lambda c: {**c, "dim": 10**12},
    "negative": lambda c: {**c, "dim": -1},
    "no inputs": lambda c: {name: value for name, value in c.items() if name != "inputs"},
    "endless layer": lambda c: {**c, "inputs": {**c["inputs"], "target_hidden": [INF]}},
    "a module that is none": lambda c: {**c, "predictor": "a.b"},
    "no name": lambda c: {**c, "predictor": ""},
    "a number": lambda c: {**c, "predictor": 7},
}


@pytest.mark.parametrize("wrong", SETTINGS)
def test_wrong_configs_are_refused(checkpoint: Path, wrong: str) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(SETTINGS[wrong](config)))
    rewrite_checksum(checkpoint)
    with pytest.raises(UserError, match="^checkpoint: .*python train.py") as refusal:
        load_predictor(checkpoint)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "change",
    [
        {"scale": ["x"] * 3},
        {"scale": [1.0, 2.0]},
        {"bias": [1e308, -1e308, 0.0]},
        {"offset": [NAN] * 3},
        {"curves": [[[0.0], [9.0]]]},
    ],
    ids=str,
)
def test_wrong_calibrations_are_refused(checkpoint: Path, change: dict[str, Any]) -> None:
    path = checkpoint / "calibration.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    rewrite_checksum(checkpoint)
    with pytest.raises(UserError, match="^checkpoint: .*incomplete or damaged"):
        load_predictor(checkpoint)


def test_inputs_that_cannot_make_the_columns_are_refused(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    inputs = Inputs((), (), depth=True, history=True).to_dict()
    (checkpoint / "config.json").write_text(json.dumps({**config, "inputs": inputs}))
    rewrite_checksum(checkpoint)
    with pytest.raises(UserError, match=f"^checkpoint: .*its inputs make no {DIM} columns"):
        load_predictor(checkpoint)


def test_every_digit_counts(checkpoint: Path) -> None:
    """Of what is JSON, the scores too; a model card may be edited."""
    for name in ("config.json", "calibration.json", "metrics.json"):
        content = (checkpoint / name).read_bytes()
        for place in [n for n, byte in enumerate(content) if chr(byte).isdigit()][::7]:
            changed = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
            (checkpoint / name).write_bytes(changed)
            with pytest.raises(UserError, match="^checkpoint: .*damaged|^checkpoint: .*version"):
                load_predictor(checkpoint)
            with pytest.raises(UserError, match="^folder: .*damaged|^folder: .*version"):
                read_metrics(checkpoint, "folder")
        (checkpoint / name).write_bytes(content)
    load_predictor(checkpoint)


def test_an_edited_model_card_is_said(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert read_metrics(checkpoint, "folder") == METRICS and not capsys.readouterr().out
    (checkpoint / "README.md").write_text("Better than it is.")
    assert read_metrics(checkpoint, "folder") == METRICS
    assert capsys.readouterr().out == (
        f"warning: {checkpoint}/README.md is not as it was written. The numbers are those of"
        " metrics.json\n"
    )
    load_predictor(checkpoint)


@pytest.mark.parametrize(
    "kept", [{}, {"sha257": {}}, {"sha256": None}, {"sha256": {}}, {"sha256": []}], ids=str
)
def test_a_checkpoint_without_its_checksums_is_refused(
    checkpoint: Path, kept: dict[str, Any]
) -> None:
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    del config["sha256"]
    path.write_text(json.dumps({**config, **kept}))
    with pytest.raises(UserError, match="^checkpoint: .*damaged.*its checksum does not fit"):
        load_predictor(checkpoint)


def test_an_older_checkpoint_names_the_command(checkpoint: Path) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 2}))
    with pytest.raises(
        UserError, match="has format version 2, this version reads 5. Train it again: python"
    ):
        load_predictor(checkpoint)


def full(*arguments: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("step", ["save", "_write_text", "_sync", "mkdir", "replace", "rename"])
def test_a_full_disk_keeps_the_earlier_checkpoint(
    checkpoint: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, predictor = content(checkpoint), load_predictor(checkpoint)
    holder = {"save": base, "_write_text": files, "_sync": files}.get(step, Path)
    monkeypatch.setattr(holder, step, full)
    with pytest.raises(
        UserError, match=r"^out: \S*hrad\S* cannot be written .*No space left on device.*Free some"
    ) as no:
        with replaced_folder(checkpoint, "config.json") as folder:
            save_predictor(predictor, folder, {"dim": DIM})
    assert "\n" not in str(no.value)
    monkeypatch.undo()
    assert content(checkpoint) == before and [
        path.name for path in checkpoint.parent.iterdir()
    ] == ["hrad"]
    load_predictor(checkpoint)


def test_a_disk_that_takes_no_more_keeps_the_earlier_checkpoint(checkpoint: Path) -> None:
    """Real writes that fail in the middle of model.safetensors."""
    before, predictor = content(checkpoint), load_predictor(checkpoint)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(
            UserError, match="^out: .*model.safetensors cannot be written .*File too large"
        ):
            with replaced_folder(checkpoint, "config.json") as folder:
                save_predictor(predictor, folder, {"dim": DIM})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert content(checkpoint) == before and [
        path.name for path in checkpoint.parent.iterdir()
    ] == ["hrad"]


def test_the_last_rename_fails(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier checkpoint has left its place; it is put back."""
    before, predictor, rename = content(checkpoint), load_predictor(checkpoint), Path.rename

    def second_fails(self: Path, target: Path) -> Path:
        return full() if self.name == ".hrad.writing" else rename(self, target)  # type: ignore[return-value, func-returns-value]

    monkeypatch.setattr(Path, "rename", second_fails)
    with pytest.raises(UserError, match="^out: .* cannot be written"):
        with replaced_folder(checkpoint, "config.json") as folder:
            save_predictor(predictor, folder, {"dim": DIM})
    assert content(checkpoint) == before and [
        path.name for path in checkpoint.parent.iterdir()
    ] == ["hrad"]


def test_a_checkpoint_out_of_its_place_is_put_back(checkpoint: Path) -> None:
    before = content(checkpoint)
    checkpoint.rename(checkpoint.with_name(".hrad.old"))
    refuse_foreign(checkpoint, "config.json")
    assert content(checkpoint) == before


@pytest.mark.parametrize("read_only", ["hrad", "checkpoints"])
def test_a_read_only_folder_is_refused_at_once(
    checkpoint: Path, read_only: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path).name != read_only and access(path, mode)
    )
    make = os.mkdir

    def refusing(path: str, mode: int = 0o777) -> None:
        if Path(path).parent.name == read_only:
            raise PermissionError(path)
        make(path, mode)

    monkeypatch.setattr(os, "mkdir", refusing)
    with pytest.raises(
        UserError,
        match="^out: .*(read-only|no folder to write in).* choose another out=<folder>|Choose",
    ):
        refuse_foreign(checkpoint, "config.json")
    load_predictor(checkpoint)
