"""Imports point one way: runtime <- predictors <- decoding <- data_gen <- drafts <-
evaluation <- serving <- reports <- scripts; training reads shards and nothing else."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ORDER = [
    "runtime",
    "predictors",
    "decoding",
    "data_gen",
    "drafts",
    "evaluation",
    "serving",
    "reports",
    "scripts",
]
FILES = sorted(path for name in ORDER for path in (ROOT / name).rglob("*.py"))
TRAIN = ROOT / "train.py"


def imports(path: Path) -> Iterator[str]:
    """Dotted names imported anywhere in `path`, the source package of ``from x.y import z`` as
    ``x.y``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} line {node.lineno}: relative import"
            yield str(node.module)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_import_points_back(path: Path) -> None:
    rank = ORDER.index(path.relative_to(ROOT).parts[0])
    later = {*ORDER[rank + 1 :], "train", "tests"}
    assert not [name for name in imports(path) if name.split(".")[0] in later]


@pytest.mark.parametrize(
    "path", [TRAIN, *sorted((ROOT / "scripts").glob("*.py"))], ids=lambda path: path.name
)
def test_a_script_runs_on_what_is_installed(path: Path) -> None:
    assert not [
        name for name in imports(path) if name.split(".")[0] in ("scripts", "train", "tests")
    ]


def test_training_reads_the_dataset_and_nothing_else_of_the_harvest() -> None:
    own = {name for name in imports(TRAIN) if name.split(".")[0] in ORDER}
    reading = {
        "decoding.settings",  # the names of a pair's settings: no model
        *("data_gen.samples", "data_gen.storage.dataset", "data_gen.storage.shards"),
    }
    assert {name for name in own if not name.startswith(("predictors.", "runtime."))} <= reading


def test_the_walk_sees_both_import_forms(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        "import decoding.verification as distribution\ndef f():\n    from scripts.job import main\n"
    )
    assert list(imports(file)) == ["decoding.verification", "scripts.job"]
