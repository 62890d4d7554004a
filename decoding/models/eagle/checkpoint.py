"""The files of a published EAGLE draft: which of the formats they are of, by themselves alone.

Known are speculators' (`speculators_model_type`), the flat ones of SafeAILab and SpecForge
(`midlayer.*`), and EAGLE-1 (`fc.weight` before ordinary layers)."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils.hub import cached_file

from decoding.models.eagle.speculators import KIND
from decoding.models.options import first_line, source_of, where_of
from decoding.settings import ModelSettings
from runtime.errors import UserError

REMEDY = "Download it again, or give another draft"
Format = Literal["speculators", "flat", "eagle1"]


@dataclass(frozen=True)
class Checkpoint:
    """format: how `config` and the tensors in `weights` are to be read."""

    format: Format
    config: Mapping[str, Any]
    weights: Path


def find_checkpoint(draft: ModelSettings) -> Checkpoint | None:
    """The draft of a pair, if it is a published EAGLE draft.

    Raises UserError where its configuration says so and its weights do not, or are damaged."""
    where, source = where_of(draft), source_of(draft)
    if "gguf_file" in where:
        return None
    try:
        config, _ = PreTrainedConfig.get_config_dict(source, **where)
    except (OSError, ValueError, TypeError):
        return None  # what is wrong there is said where any draft is loaded
    if not isinstance(config, dict):
        return None
    said = _says(config, source)
    weights = _weights(source, where)
    if weights is None:
        if said:
            raise UserError(
                f"pair.draft: expected model.safetensors or pytorch_model.bin in {source}, got"
                f" neither. {REMEDY}"
            )
        return None
    found = "speculators" if KIND in config else _format_of(_names(weights, said))
    if said and found is None:
        raise UserError(
            f"pair.draft: expected weights of an EAGLE draft, as its config.json says, got others"
            f" in {weights}. {REMEDY}"
        )
    return None if found is None else Checkpoint(found, config, weights)


def _says(config: Mapping[str, Any], source: str) -> bool:
    """Whether a configuration is that of an EAGLE-3 draft. Raises UserError for a speculator of
    another kind."""
    if (kind := config.get(KIND, "eagle3")) != "eagle3":
        raise UserError(
            f"pair.draft: expected a speculator of kind eagle3, got {kind!r} in {source}. Give an"
            " EAGLE-3 draft"
        )
    return KIND in config or "eagle3" in str(config.get("architectures")).lower()


def _weights(source: str, where: Mapping[str, Any]) -> Path | None:
    """The one file of weights; None: there is none, or there are several."""
    quiet = {
        f"_raise_exceptions_for_{what}": False
        for what in ("gated_repo", "missing_entries", "connection_errors")
    }
    for name in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"):
        try:
            found = cached_file(source, name, **where, **quiet)
        except (OSError, ValueError):
            return None
        if found is not None:
            return None if name.endswith(".json") else Path(found)
    return None


def _format_of(names: set[str]) -> Format | None:
    """Return the format of a flat configuration's weights; None: not of an EAGLE draft."""
    if any(name.startswith("midlayer.") for name in names):
        return "flat"
    if "fc.weight" not in names or "layers.0.self_attn.q_proj.weight" not in names:
        return None
    return "flat" if "layers.0.hidden_norm.weight" in names else "eagle1"


def _names(weights: Path, said: bool) -> set[str]:
    """Return the names of the tensors; none where they cannot be read and nothing `said` that they
    are an EAGLE draft's: a damaged file is then refused where any draft is loaded."""
    try:
        if weights.suffix == ".safetensors":
            with safe_open(weights, "pt") as file:
                return set(file.keys())
        return set(_state(weights, mmap=True))
    except UNREADABLE as error:
        if said:
            raise damaged(weights, error) from error
        return set()


def read_tensors(weights: Path) -> dict[str, Tensor]:
    """All tensors of the file. Raises UserError where it is damaged, or holds anything else."""
    try:
        if weights.suffix == ".safetensors":
            return load_file(weights)
        return _state(weights)
    except UNREADABLE as error:
        raise damaged(weights, error) from error


def _state(weights: Path, mmap: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a pickled file. mmap: read what is looked at, where the file is of a
    kind for it."""
    with open(weights, "rb") as file:
        zipped = file.read(2) == b"PK"
    found = torch.load(weights, "cpu", weights_only=True, mmap=mmap and zipped)
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(x, Tensor) for name, x in found.items()
    ):
        raise TypeError("it holds other things than tensors")
    return found


UNREADABLE = (
    SafetensorError,
    pickle.UnpicklingError,
    OSError,
    EOFError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"pair.draft: {path} is damaged ({first_line(error)}). {REMEDY}")
