"""The windows of a model's layers, and the longest context it supports.

Sliding windows and chunks: the cache keeps every row, and a mask for each type of layer says which
of them a row sees. It is made from positions, because a tree's rows lie elsewhere in the cache than
in the text. So rows that had left a window are still there after a rollback.

Rotations whose angles depend on the length of the text ("dynamic", "longrope"): up to a boundary
they do not. Beyond it every key would have to be rotated anew with each token, or once at the
boundary; transformers does so for some classes, keeps old keys for others, and uses the longest row
of a batch for all. The cached values would depend on the calls that cached them."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from decoding.models.kv_cache import BufferCache
from runtime.errors import UserError

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
SIZES = {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}  # keys of a model's config
MAKERS = {SLIDING: "create_sliding_window_causal_mask", CHUNKED: "create_chunked_causal_mask"}
UNLIMITED = 1 << 17  # tokens of a context if neither the model nor the user names a limit


@dataclass(frozen=True)
class Windows:
    """The windows of a model. sizes: tokens of the window (the row's own included) or chunk of each
    windowed type of layer; types: all types of layers; layers: number that keep keys and
    values."""

    sizes: Mapping[str, int]
    types: frozenset[str]
    layers: int

    def masks(
        self, mask: Tensor | None, positions: Tensor, cache: BufferCache
    ) -> Tensor | dict[str, Tensor | None] | None:
        """Return `mask` for each type of layer; a single one if all are of one type. positions:
        [B, n].

        Appends the positions of the rows to `cache`, as a layer after the model's: they are kept,
        dropped and handed over like keys."""
        column = positions[:, None, :, None]
        seen, _ = cache.layer(self.layers).update(column, column[..., :0])
        seen = seen[:, 0, None, :, 0]  # [B, 1, L], positions of all cached rows, these included
        if mask is None and seen.shape[2] <= min(self.sizes.values()):
            return None
        rows, masks = positions[:, :, None], dict[str, Tensor | None]()
        for kind in self.types:
            masks[kind] = mask
            if size := self.sizes.get(kind):
                near = rows // size == seen // size if kind == CHUNKED else seen > rows - size
                if mask is None:  # a chain, all of whose past is cached
                    masks[kind] = (near & (seen <= rows))[:, None]
                else:
                    masks[kind] = mask.masked_fill(~near[:, None], torch.finfo(mask.dtype).min)
        return masks if len(masks) > 1 else next(iter(masks.values()))


def windows_of(model: PreTrainedModel, max_length: int) -> Windows | None:
    """Return the windows that are shorter than `max_length` tokens; None if there are none."""
    sizes = {kind: size for kind, size in _window_sizes(model).items() if size < max_length}
    if not sizes:
        return None
    return Windows(sizes, frozenset(_layer_types(model) or sizes), kept_layers(model))


def kept_layers(model: PreTrainedModel) -> int:
    """Return the number of layers with their own keys and values: the last layers of Gemma 3n and 4
    share those of earlier ones."""
    config = model.config.get_text_config()
    return int(config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0))


def _layer_types(model: PreTrainedModel) -> Sequence[str] | None:
    """Return the type of each layer; None for a class that knows only one type, whatever its config
    file says."""
    config = model.config.get_text_config()
    types: Sequence[str] | None = getattr(config, "layer_types", None)
    declared = hasattr(type(config), "layer_types")
    return types if declared or "layer_types" in signature(type(config)).parameters else None


def _window_sizes(model: PreTrainedModel) -> dict[str, int]:
    """Return the window of each windowed type of layer that the model has."""
    config, types = model.config.get_text_config(), _layer_types(model)
    kinds = SIZES if types is None else set(SIZES) & set(types)
    sizes = {kind: getattr(config, SIZES[kind], None) for kind in kinds}
    return {kind: size for kind, size in sizes.items() if size}


def steady_length(config: PreTrainedConfig) -> int | None:
    """Return the longest text, in tokens, for which the angles do not depend on its length; None:
    any length."""
    config = config.get_text_config()
    given = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    of_all = [rope for rope in given if isinstance(rope, dict)]
    of_types = [rope for every in of_all for rope in every.values() if isinstance(rope, dict)]
    limits = [limit for rope in of_all + of_types if (limit := _boundary(rope, config)) is not None]
    return min(limits, default=None)


def _boundary(rope: dict[str, Any], config: Any) -> int | None:
    kind = str(rope.get("rope_type") or rope.get("type"))
    if kind in ("longrope", "su") or "long_mscale" in rope:  # the last of PhiMoE, whatever the type
        name = "original_max_position_embeddings"
        return rope.get(name) or getattr(config, name, None) or config.max_position_embeddings
    return int(config.max_position_embeddings) if "dynamic" in kind else None


def refuse_unsteady(key: str, model: PreTrainedModel, longest: int | None) -> None:
    """Raise UserError if texts of `longest` tokens (None: as many as the model takes) exceed
    `steady_length`. key: config key of the model."""
    steady = steady_length(model.config)
    if steady is None:
        return
    longest = longest or model.config.get_text_config().max_position_embeddings
    if longest > steady:
        raise UserError(
            f"{key}: expected pair.max_length of at most {steady}, for beyond {steady} tokens the"
            f" rotations of {type(model).__name__} depend on the length of the text, got"
            f" {longest}. Set pair.max_length={steady}, or choose another model"
        )


def context_limit(model: PreTrainedModel, asked: int | None) -> int:
    """Return the most tokens of a context: the least of the number asked for, the model's limit
    and, if the model's code makes no masks for its windows, the length at which a window matters.
    Raises UserError if angles of rotation would change on the way."""
    refuse_unsteady("pair", model, asked)
    if asked is not None and asked < 2:
        raise UserError(
            f"pair.max_length: {asked} has no room for a prompt and a response. Raise it"
        )
    code = vars(sys.modules[type(model.get_decoder()).__module__])
    sizes = _window_sizes(model).items()
    limits = [size for kind, size in sizes if MAKERS[kind] not in code]
    return min([configured_limit(model.config, asked), *limits])


def configured_limit(config: PreTrainedConfig, asked: int | None) -> int:
    """Return the most tokens of a context as far as a configuration says: `context_limit` may be
    lower."""
    limits = asked, getattr(config.get_text_config(), "max_position_embeddings", None)
    return min((limit for limit in limits if limit), default=UNLIMITED)
