"""The file an interrupted training is kept in: what is in it is found again, and damage is
named."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from predictors.training.trainer import ResumeFile
from runtime import files
from tests.helpers.damage.refusals import refuses

RUN = {"predictor": {"depth": 1}, "seed": 0, "data": "aa"}
TENSORS = {"module.w": torch.arange(6.0).view(2, 3), "optimizer.0.step": torch.tensor(3.0)}


@pytest.fixture
def file(tmp_path: Path) -> ResumeFile:
    written = ResumeFile(tmp_path / "specdecpp", RUN)
    written.write(TENSORS, {"history": [{"epoch": 1}]})
    return written


def test_what_was_written_is_read(file):
    same = ResumeFile(file.path.with_name("specdecpp"), dict(reversed(RUN.items())))
    tensors, progress = same.read() or ({}, {})
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert progress["history"] == [{"epoch": 1}]
    file.forget()
    assert file.read() is None and not list(file.path.parent.iterdir())


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:at] + bytes([content[at] ^ 1]) + content[at:][1:]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "a few bytes": lambda content: content[:5],
    "half": lambda content: content[: len(content) // 2],
    "all but a byte": lambda content: content[:-1],
    "a byte more": lambda content: content + b"\0",
    "other header size": flip(0),
    "flip in the settings": lambda content: content.replace(b'depth\\":', b'deptH\\":'),
    "flip in the history": lambda content: content.replace(b'epoch\\": 1', b'epoch\\": 2'),
    "flip in a name": lambda content: content.replace(b"module.w", b"module.v"),
    "other type": lambda content: content.replace(b'"F32","shape":[2,3]', b'"I32","shape":[2,3]'),
    "other shape": lambda content: content.replace(b"[2,3]", b"[3,2]"),
    "flip in a value": flip(-3),
    "no JSON": lambda content: b"{" * len(content),
    "zeros": lambda content: bytes(len(content)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_the_file_stays(file, damage):
    whole = file.path.read_bytes()
    content = DAMAGE[damage](whole)
    assert content != whole
    file.path.write_bytes(content)
    refuses(r"^out: \S+/\.specdecpp-\w+\.resume is damaged \(.*\)\. Delete it to", file.read)
    assert file.path.read_bytes() == content


@pytest.mark.parametrize("step", ["write_bytes", "_sync", "replace"])
def test_a_full_disk_keeps_the_last_state(file, step, monkeypatch):
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(files if step == "_sync" else Path, step, full)
        says = r"^out: \S+\.resume cannot be written .*Free some space"
        refuses(says, file.write, {"module.w": torch.zeros(2, 3)}, {"history": []})
    tensors, progress = file.read() or ({}, {})
    assert torch.equal(tensors["module.w"], TENSORS["module.w"]) and progress["history"]
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]


def test_what_is_something_else_under_this_name_is_refused(file):
    other = ResumeFile(file.path.with_name("specdecpp"), {**RUN, "seed": 1})
    file.path.rename(other.path)
    refuses("is of another run .seed=0, here 1.*Delete it", other.read)
    file.path.mkdir()
    refuses("^out: .* is damaged", file.read)


def test_files_of_other_runs_are_mentioned(file, capsys):
    other = ResumeFile(file.path.with_name("specdecpp"), {**RUN, "predictor": {"depth": 2}})
    assert other.read() is None
    assert "other settings (predictor.depth=1, here 2). It is not used" in capsys.readouterr().out
    file.path.write_bytes(b"half")
    assert other.read() is None
    assert "holds something unreadable" in capsys.readouterr().out
    assert ResumeFile(file.path.with_name("specdec"), RUN).read() is None
    assert not capsys.readouterr().out
