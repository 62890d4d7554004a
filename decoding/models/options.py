"""Options for loading one model, from its settings: source, device, dtype, and further arguments of
`from_pretrained`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from decoding.models.packing import fast_bfloat16
from decoding.settings import ModelSettings
from runtime.errors import UserError

REMEDY = (
    "Run `python pairs/build_pair.py` with the same pair= and pair.bits= for an embedded pair, or"
    " give a hub id or an existing folder."
)

OWN_KEYS = {
    "device_map": "Set pair.{side}_device",
    "dtype": "Set pair.{side}_dtype",
    "torch_dtype": "Set pair.{side}_dtype",
    "trust_remote_code": "Set pair.trust_remote_code",
    "attn_implementation": "Leave it out: the caches here need their own attention",
    "output_loading_info": "Leave it out",
}


def load_config(model: ModelSettings) -> PreTrainedConfig:
    source = source_of(model)
    try:
        return AutoConfig.from_pretrained(
            source, trust_remote_code=model.trust_remote_code, **where_of(model)
        )
    except Exception as error:  # a damaged file makes it raise anything
        raise UserError(
            f"pair.{model.side}: cannot read a model from {source} ({first_line(error)}). {REMEDY}"
        ) from error


def source_of(model: ModelSettings) -> str:
    """Return the folder or hub id of a model. Raises UserError for a path that does not exist,
    before the hub is asked."""
    source, where = model.source, where_of(model)
    path = Path(source).expanduser()
    file = path / where.get("subfolder", "") / where.get("gguf_file", "config.json")
    looks_like_path = source.startswith(("~", ".", "/")) or source.count("/") > 1
    if looks_like_path and not file.is_file():
        raise UserError(f"pair.{model.side}: no model in {source}. {REMEDY}")
    return str(path) if path.exists() else source


def device_map_of(model: ModelSettings) -> Any:
    """Return a device, a strategy of accelerate such as "auto", or a device for each part of the
    model."""
    if not on_cpu(model.device) and not torch.accelerator.is_available():
        raise UserError(
            f"pair.{model.side}_device: {model.device} needs a GPU and there is none here. Set"
            f" pair.{model.side}_device=cpu"
        )
    return model.device


def on_cpu(device_map: Any) -> bool:
    places = device_map.values() if isinstance(device_map, Mapping) else [device_map]
    return set(places) <= {"cpu", "disk"}


def options_of(model: ModelSettings) -> dict[str, Any]:
    """Return further keyword arguments of `from_pretrained`. Raises UserError for those that have a
    key of their own."""
    for name, key in OWN_KEYS.items():
        if name in model.options:
            raise UserError(
                f"pair.{model.side}_options: {name} cannot be given there."
                f" {key.format(side=model.side)}"
            )
    return dict(model.options)


def where_of(model: ModelSettings) -> dict[str, Any]:
    """Return the options that select a file or revision, for config and tokenizer as well."""
    options = options_of(model)
    return {
        name: options[name] for name in ("gguf_file", "revision", "subfolder") if name in options
    }


def dtype_of(model: ModelSettings, device: str) -> torch.dtype:
    stored = load_config(model).get_text_config().dtype if model.dtype == "auto" else None
    return resolve_dtype(model.dtype, device, stored)


def resolve_dtype(name: str, device: str, stored: torch.dtype | str | None = None) -> torch.dtype:
    """Return the dtype of a name. ``auto`` is the files' dtype if that has 16 bits, else bfloat16;
    on a CPU it is bfloat16 only if the files have it and the processor multiplies it, else float32.
    Other names are torch dtypes. stored: dtype of the files; None: not known.

    A harvest's plan, costs, thresholds and results record the resolved dtype, not "auto"."""
    if name == "auto":
        kept = getattr(torch, stored) if isinstance(stored, str) else stored
        if device == "cpu":
            return kept if kept == torch.bfloat16 and fast_bfloat16() else torch.float32
        return kept if kept in (torch.bfloat16, torch.float16) else torch.bfloat16
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(
            f"pair.dtype: {name} is not a torch dtype. Use auto, float32, bfloat16 or float16."
        )
    return dtype


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
