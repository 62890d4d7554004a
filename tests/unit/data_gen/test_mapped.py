"""Samples in a file that memory is mapped to."""

from pathlib import Path

import pytest
import torch

from data_gen.storage.dataset import joined
from data_gen.storage.mapped import mapped
from runtime.errors import UserError
from runtime.files import temporary_of
from tests.helpers.damage.refusals import refuses


def parts() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "inputs": torch.randn(n, 2, 3, generator=generator).bfloat16(),
            "label": torch.arange(n),
            "reached": torch.arange(n) % 2 == 0,
            "weight": torch.rand(n, 2, generator=generator),
        }
        for n in (3, 0, 5)
    ]


def test_parts_are_joined_in_a_file_without_a_name(tmp_path: Path) -> None:
    found, whole = mapped(iter(parts()), tmp_path / ".x.rows"), joined(parts())
    assert found.keys() == whole.keys() and not list(tmp_path.iterdir())
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    assert all(found[name].dtype == whole[name].dtype for name in whole)


def test_an_end_in_between_leaves_no_file(tmp_path: Path) -> None:
    def failing():
        yield parts()[0]
        raise UserError("data: damaged")

    refuses("data: damaged", mapped, failing(), tmp_path / ".x.rows")
    assert not list(tmp_path.iterdir())
    refuses("out: samples cannot be written", mapped, iter(parts()), Path("/proc/none/rows"))


def test_parts_of_other_forms_are_refused(tmp_path: Path) -> None:
    first, second = parts()[0], parts()[2]
    for other in (
        {**second, "inputs": second["inputs"][:, :1]},
        {name: values for name, values in second.items() if name != "label"},
        {**second, "weight": second["weight"].double()},
        {**second, "label": second["label"][:1]},
    ):
        refuses("not all of one form", mapped, iter([first, other]), tmp_path / "rows")
    assert not list(tmp_path.iterdir())


def test_what_a_killed_training_has_left_is_removed(tmp_path: Path) -> None:
    left = temporary_of(tmp_path / "x.rows", 2**22 + 1)
    left.write_bytes(b"x")
    mapped(iter(parts()), tmp_path / "x.rows")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = {"inputs": torch.zeros(1 << 16, 8), "label": torch.zeros(1 << 16)}
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    monkeypatch.setattr("data_gen.storage.mapped.temporary_of", lambda *_: Path("/dev/full"))
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    refuses("No space left on device", mapped, iter([big]), Path("x"))
