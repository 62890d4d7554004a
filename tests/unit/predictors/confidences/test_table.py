from pathlib import Path

import pytest
import torch

from predictors.confidences.table import (
    MANIFEST,
    TENSORS,
    blocks,
    is_imported,
    joined,
    read_confidences,
    table,
)
from runtime.errors import UserError
from tests.helpers.training.confidences import logged, write_logged

Z, S = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0]])
NAN = torch.tensor([[1.0, float("nan")]])


@pytest.mark.parametrize(
    ("logits", "labels", "says"),
    [
        (Z, S[:, :1], "same shape"),
        (Z[0], S[0], "same shape"),
        (Z[:0], S[:0], "same shape"),
        (NAN, S, "finite logits"),
        (Z, S.flip(1), "one that rises"),
        (Z, 2 * S, "between 0 and 1"),
        (Z, NAN, "between 0 and 1"),
    ],
)
def test_what_is_no_table_is_refused(logits: torch.Tensor, labels: torch.Tensor, says: str) -> None:
    with pytest.raises(UserError) as error:
        table("source.files: x.pt", "toy", logits, labels, torch.tensor([2]), torch.tensor([0]))
    line = str(error.value)
    assert line.startswith("source.files: x.pt: expected") and says in line and "\n" not in line


def test_values_that_do_not_count_may_be_anything() -> None:
    found = table("x", "toy", NAN, S.flip(1) + 1, torch.tensor([0]), torch.tensor([0]))
    assert found.logits.tolist() == [[0, 0]] and found.labels.tolist() == [[0, 0]]


def test_blocks_of_proposals_are_the_units() -> None:
    assert blocks(130).bincount().tolist() == [64, 64, 2]


def test_tables_are_joined_with_their_groups_and_domains_apart() -> None:
    found = joined([logged(100, domain="code"), logged(70, 1, "chat"), logged(10, 2, "code")], "x")
    assert found.domains == ("chat", "code")
    assert found.domain.bincount().tolist() == [70, 110]
    assert len(found.group.unique()) == 2 + 2 + 1


@pytest.mark.parametrize("gamma", [None, 2])
def test_one_gamma(gamma: int | None) -> None:
    other = table("x", "toy", Z, S, torch.tensor([2]), torch.tensor([0]))
    with pytest.raises(UserError, match=r"^x: expected proposals of \d tokens, got \d"):
        joined([logged(10), other], "x", gamma)


def test_a_folder_comes_back(tmp_path: Path) -> None:
    made, found = logged(100), read_confidences(write_logged(tmp_path / "x", 100))
    for name in ("logits", "labels", "length", "group", "domain"):
        assert torch.equal(getattr(made, name), getattr(found, name))
    assert found.domains == ("toy",) and found.facts["labels"] == "realised"
    assert is_imported(tmp_path / "x") and not is_imported(tmp_path)


@pytest.mark.parametrize("name", [MANIFEST, TENSORS])
@pytest.mark.parametrize("how", ["cut", "gone", "changed"])
def test_a_damaged_folder_is_refused_in_one_line(name: str, how: str, tmp_path: Path) -> None:
    path = write_logged(tmp_path / "x") / name
    content = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-9] if how == "cut" else content[:-9] + b"x" + content[-8:])
    with pytest.raises(UserError) as error:
        read_confidences(tmp_path / "x")
    line = str(error.value)
    assert line.startswith("data:") and "import_confidence" in line and "\n" not in line
