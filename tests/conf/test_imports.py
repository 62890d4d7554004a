"""Imports point one way, as the contracts in pyproject.toml say; training reads shards only."""

import ast
from pathlib import Path

from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

ROOT = Path(__file__).resolve().parents[2]


def test_the_contracts_are_kept() -> None:
    contracts = str(ROOT / "pyproject.toml")
    assert lint_imports(config_filename=contracts, no_cache=True) == EXIT_STATUS_SUCCESS


def test_training_reads_the_dataset_and_nothing_else_of_the_harvest() -> None:
    nodes = ast.walk(ast.parse((ROOT / "train.py").read_text()))
    modules = {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    later = ("data_gen.", "decoding.", "evaluation.", "serving.", "reports.", "scripts.")
    reading = {"samples", "storage.dataset", "storage.shards"}
    assert {name for name in modules if name.startswith(later)} <= {
        *(f"data_gen.{name}" for name in reading),
        "decoding.settings",
    }
