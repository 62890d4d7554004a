"""Layers whose attention does not reach back to the beginning: sliding windows and chunks.

The cache keeps every row; which of them a row sees is a mask for each type of layer, made from
positions, for a tree's rows lie elsewhere in the cache than in the text. A rollback finds
everything still there, whatever had left the window in between."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoding.models.kv_cache import BufferCache

if TYPE_CHECKING:
    from decoding.models.forward import Rows

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
SIZES = {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}  # keys of a model's config
MAKERS = {SLIDING: "create_sliding_window_causal_mask", CHUNKED: "create_chunked_causal_mask"}

Masks = Tensor | dict[str, Tensor | None] | None


@dataclass(frozen=True)
class Windows:
    """sizes: of each windowed type of layer, in tokens: of a sliding window, the row's own
    included, or of a chunk; types: all types of layers; layers: how many keep
    keys and values."""

    sizes: Mapping[str, int]
    types: frozenset[str]
    layers: int

    def masks(self, rows: Rows, cache: BufferCache) -> Masks:
        """`rows.mask` for each type of layer; one where all are of one type.

        Appends the positions of the rows to `cache`, behind the model's layers: like keys they
        are kept, dropped and handed over."""
        known = self._noted(rows, cache)
        if rows.mask is None and known.shape[1] <= min(self.sizes.values()):
            return None
        found = {kind: self._mask(kind, rows, known) for kind in self.types}
        return found if len(found) > 1 else next(iter(found.values()))

    def _noted(self, rows: Rows, cache: BufferCache) -> Tensor:
        """[B, L], positions of all cached rows, these included."""
        positions = rows.positions.expand(rows.tokens.shape)[:, None, :, None]
        return cache.layer(self.layers).update(positions, positions[..., :0])[0][:, 0, :, 0]

    def _mask(self, kind: str, rows: Rows, known: Tensor) -> Tensor | None:
        if kind not in self.sizes:
            return rows.mask
        size, own, seen = self.sizes[kind], rows.positions[:, :, None], known[:, None, :]
        near = own // size == seen // size if kind == CHUNKED else seen > own - size
        if rows.mask is None:  # a chain, all of whose past is cached
            return (near & (seen <= own))[:, None]
        return rows.mask.masked_fill(~near[:, None], torch.finfo(rows.mask.dtype).min)


def windows_of(model: PreTrainedModel, max_length: int) -> Windows | None:
    """Those that texts of `max_length` tokens outgrow; None: there are none."""
    sizes = {kind: size for kind, size in window_sizes(model).items() if size < max_length}
    if not sizes:
        return None
    return Windows(sizes, frozenset(layer_types(model) or sizes), kept_layers(model))


def layer_types(model: PreTrainedModel) -> Sequence[str] | None:
    """Return the type of each layer; None of a class that knows one type, whatever a config file
    says besides."""
    config = model.config.get_text_config()
    found: Sequence[str] | None = getattr(config, "layer_types", None)
    declared = hasattr(type(config), "layer_types")
    return found if declared or "layer_types" in signature(type(config)).parameters else None


def kept_layers(model: PreTrainedModel) -> int:
    """Layers with keys and values of their own: Gemma 3n and 4 share those of earlier ones in their
    last layers."""
    config = model.config.get_text_config()
    return int(config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0))


def window_sizes(model: PreTrainedModel) -> dict[str, int]:
    """Return the window of each windowed type of layer that the model has."""
    config = model.config.get_text_config()
    types = layer_types(model)
    kinds = SIZES if types is None else set(SIZES) & set(types)
    found = {kind: getattr(config, SIZES[kind], None) for kind in kinds}
    return {kind: size for kind, size in found.items() if size}


def longest_text(model: PreTrainedModel) -> int | None:
    """Tokens up to which the model's windows can be left out of account, where its own code does
    not make masks of them, so that they cannot be told; None: any number."""
    code = vars(sys.modules[type(model.get_decoder()).__module__])
    sizes = window_sizes(model)
    return min((size for kind, size in sizes.items() if MAKERS[kind] not in code), default=None)
