"""Sequoia: a static tree that was searched for, read from a file of scripts/tune.py what=tree."""

import pathlib
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, field_validator

from decoding.sampling import hub_pair, without_replacement
from decoding.structures.static_tree import StaticTree
from runtime.job import command_of
from runtime.json_files import MeasuredChecksum, OpenForm, read_json, write_checksummed
from runtime.settings.kinds import Path

FORMAT_VERSION = 1
KIND = "tree"  # in checksums: the file may be renamed


class Sequoia(StaticTree):
    """The tree of the artefact `tree`, tuned for siblings without replacement (2402.12374).

    With at most two children a node (max_children=2) hub pairs are exact too; the acceptance it was
    tuned for is then an approximation, which costs speed at most."""

    sibling_samplers = (without_replacement, hub_pair)

    def __init__(self, tree: Annotated[Path, "file of a tree (scripts/tune.py what=tree)"]) -> None:
        remedy = f"Make one: {command_of('tune', 'what=tree')}"
        super().__init__(
            read_json(pathlib.Path(tree), TreeFile, "structure.tree", remedy, KIND).parents
        )


class TreeFile(OpenForm):
    """The file of tune.py what=tree, with a command and a checksum, or one written by hand.

    parents: row of each node's parent; row 0 is the last committed token, node i is row i + 1"""

    version = ("format_version", FORMAT_VERSION)
    format_version: int
    parents: Annotated[list[NonNegativeInt], Field(min_length=1)]
    command: str | None = None
    checksum: MeasuredChecksum = None

    @field_validator("parents")
    @classmethod
    def _before_their_children(cls, parents: list[int]) -> list[int]:
        if any(parent >= row for row, parent in enumerate(parents, 1)):
            raise ValueError("a parent comes before its children")
        return parents


def write_artefact(path: pathlib.Path, contents: Mapping[str, Any]) -> None:
    """Write `parents` and how they were found. The file appears whole or not at all."""
    whole = {"format_version": FORMAT_VERSION, **contents}
    write_checksummed(path, whole, KIND, "structure.tree")
