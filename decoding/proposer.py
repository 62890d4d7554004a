"""The file that configures drafts inside a serving engine (`export.py serving=vllm` writes it), and
the stop rule and structure that it names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from decoding.interfaces import DraftStructure, StopRule
from runtime.errors import UserError
from runtime.json_files import OpenForm, read_json
from runtime.settings.check import part

RULES = "decoding.stopping."
STRUCTURES = "decoding.structures."
AGAIN = "Write the file again: python scripts/export.py serving=vllm"


class ProposerFile(OpenForm):
    """What drafts. draft: its folder; structure, stop: as in `conf/`; adaptive: whether what is
    fastest bounds the drafts."""

    version = ("format_version", 1)
    format_version: int
    draft: str
    dtype: str
    structure: dict[str, Any]
    stop: dict[str, Any]
    adaptive: bool

    def made_structure(self) -> DraftStructure:
        """Make the structure. Raises UserError."""
        made: DraftStructure = _made(self.structure, "structure", STRUCTURES)
        return made

    def made_stop(self) -> StopRule:
        """Make the stop rule, with its predictor. Raises UserError."""
        made: StopRule = _made(self.stop, "stop", RULES)
        return made


def read_proposer(path: str, key: str) -> ProposerFile:
    """Read such a file. Raises UserError naming `key`."""
    return read_json(Path(path).expanduser(), ProposerFile, key, AGAIN)


def _made(settings: Mapping[str, Any], key: str, package: str) -> Any:
    """Make a stop rule or a structure. Raises UserError for classes of other packages and settings
    that they do not have."""
    for each in _parts_of(settings):
        if not str(each.get("_target_")).startswith(package):
            got = each.get("_target_")
            raise UserError(f"{key}: expected classes of {package[:-1]}, got {got!r}. {AGAIN}")
    if fault := next(part(settings, key), None):
        raise UserError(str(fault._replace(remedy=fault.remedy or AGAIN)))
    try:
        return instantiate(settings)
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise


def _parts_of(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return these settings and all inside of them."""
    inside = [each for each in settings.values() if isinstance(each, Mapping)]
    return [settings, *(part for each in inside for part in _parts_of(each))]
