"""The file that configures drafts inside a serving engine (`export.py serving=vllm` writes it), and
the stop rule and structure that it names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
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
        made: DraftStructure = _made(self.structure, "structure", STRUCTURES, DraftStructure)
        return made

    def made_stop(self) -> StopRule:
        """Make the stop rule, with its predictor. Raises UserError."""
        made: StopRule = _made(self.stop, "stop", RULES, StopRule)
        return made


def read_proposer(path: str, key: str) -> ProposerFile:
    """Read such a file. Raises UserError naming `key`."""
    file = read_json(Path(path).expanduser(), ProposerFile, key, AGAIN)
    if "${" in str(file.written):
        raise UserError(f"{key}: expected plain values, got an interpolation in {path}. {AGAIN}")
    return file


def _made(settings: Mapping[str, Any], key: str, package: str, kind: type) -> Any:
    """Make a stop rule or a structure. Raises UserError for anything but classes of that package,
    wherever it stands in `settings`, and for settings that they do not have."""
    for each in _parts_of(settings):
        name = str(each.get("_target_"))
        if not (name.startswith(package) and isinstance(_named(name), type)):
            raise UserError(f"{key}: expected classes of {package[:-1]}, got {name!r}. {AGAIN}")
    if kind not in getattr(_named(settings["_target_"]), "__mro__", ()) or "_partial_" in settings:
        raise UserError(f"{key}: expected a {kind.__name__}, got {dict(settings)}. {AGAIN}")
    if fault := next(part(settings, key), None):
        raise UserError(str(fault._replace(remedy=fault.remedy or AGAIN)))
    try:
        return instantiate(settings)
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise


def _named(target: str) -> Any:
    module, _, name = target.rpartition(".")
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None


def _parts_of(settings: Any) -> Iterator[Mapping[str, Any]]:
    """Yield these settings and all inside of them."""
    if isinstance(settings, Mapping):
        yield settings
        settings = settings.values()
    elif not isinstance(settings, list):
        return
    for inner in settings:
        yield from _parts_of(inner)
