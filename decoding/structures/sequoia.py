"""Sequoia: a static tree that was searched for, read from the artefact of scripts/tune_tree.py."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decoding.sampling import hub_pair, without_replacement
from decoding.structures.static_tree import StaticTree
from runtime.errors import UserError

FORMAT_VERSION = 1
REMEDY = "Make one: python scripts/tune_tree.py"


class Sequoia(StaticTree):
    """The tree of the artefact `tree`, tuned for siblings without replacement (2402.12374).

    With at most two children a node (max_children=2) hub pairs are exact too; the acceptance it was
    tuned for is then an approximation, which costs speed at most."""

    sibling_samplers = (without_replacement, hub_pair)

    def __init__(self, tree: str | Path) -> None:
        super().__init__(read_artefact(Path(tree))["parents"])


def read_artefact(path: Path) -> dict[str, Any]:
    """Raises UserError for a file that is missing, not JSON, or holds no tree."""
    if not path.is_file():
        raise UserError(f"structure.tree: no tree in {path}. {REMEDY}")
    try:
        artefact: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version, parents = artefact["format_version"], artefact["parents"]
        sound = version == FORMAT_VERSION and len(parents) > 0
        sound = sound and all(
            type(parent) is int and 0 <= parent < row for row, parent in enumerate(parents, 1)
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"structure.tree: {path} is no tree artefact ({type(error).__name__}: {error})."
            f" {REMEDY}"
        ) from error
    if not sound:
        raise UserError(
            f"structure.tree: {path} holds format {version} or no tree; this version reads"
            f" {FORMAT_VERSION}. {REMEDY}"
        )
    return artefact


def write_artefact(path: Path, contents: Mapping[str, Any]) -> None:
    """contents: `parents` and how they were found. The file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(
        json.dumps({"format_version": FORMAT_VERSION, **contents}, indent=1) + "\n",
        encoding="utf-8",
    )
    os.replace(partial, path)
