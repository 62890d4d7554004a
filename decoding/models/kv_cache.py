"""Preallocated key/value buffers and the attention function that reads them without copying."""

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from decoding.together import sent
from runtime.errors import UserError

ATTENTION = "grouped_heads"
POSITIONS = "row_positions"  # the option by which positions reach attention through the model
SPARE = 1024  # rows that a full buffer gets beyond those that it needs, at most as many again
FEW_ROWS = 16  # more are faster in two products, as far as these are

Kind = tuple[torch.dtype, int, int]


class BufferLayer(CacheLayerMixin):
    """Keys and values of one layer: ``[batch, kv_heads, capacity, head_dim]``, the first ``length``
    rows are in use.

    Appending writes in place; a full buffer becomes a larger one, with spare rows. Dropping rows
    only changes ``length``."""

    is_sliding = False
    keys: Tensor  # allocated on first use
    values: Tensor

    def __init__(self, planned: int = 0) -> None:
        """planned: rows that are certain to come; no more are allocated as long as they do."""
        super().__init__()
        self.length, self._planned = 0, planned
        self._held: tuple[Any, Any, Kind, list[tuple[int, int, int]]] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows = self._capacity(key_states.shape[-2])
        self.keys, self.values = _buffer(key_states, rows), _buffer(value_states, rows)
        self.is_initialized = True

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_held": None}  # a copy has buffers of its own

    def held(self) -> tuple[Kind, list[tuple[int, int, int]]]:
        """Return dtype, batch and kv_heads, and for each sequence the addresses of its keys and
        values, and the capacity."""
        held = self._held
        if held is None or held[0]() is not self.keys or held[1]() is not self.values:
            pairs = zip(self.keys, self.values, strict=True)
            places = [(k.data_ptr(), v.data_ptr(), self.keys.shape[2]) for k, v in pairs]
            kind = (self.keys.dtype, *self.keys.shape[:2])
            held = self._held = ref(self.keys), ref(self.values), kind, places
        return held[2:]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        n = key_states.shape[-2]
        start = self.reserve(n)
        self.keys.narrow(2, start, n).copy_(key_states)
        self.values.narrow(2, start, n).copy_(value_states)
        return self.keys.narrow(2, 0, self.length), self.values.narrow(2, 0, self.length)

    def reserve(self, n: int) -> int:
        """Count n rows as cached, which the caller writes. Return their start."""
        start = self.length
        self.length = start + n
        if self.length > self.keys.size(2):
            self.keys = _grown(self.keys, start, self._capacity(self.length))
            self.values = _grown(self.values, start, self._capacity(self.length))
        return start

    def _capacity(self, needed: int) -> int:
        return self._planned if needed <= self._planned else needed + min(max(needed, 256), SPARE)

    def reset(self) -> None:
        self.length = 0

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1


class BufferCache(Cache):
    """The ``past_key_values`` of a causal model with full attention; layers appear on the first
    forward."""

    layers: list[BufferLayer]  # type: ignore[assignment]

    def __init__(self, planned: int = 0) -> None:
        """planned: as in `BufferLayer`."""
        super().__init__(layer_class_to_replicate=BufferLayer)
        self._planned = planned

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        return self.layer(layer_idx).update(key_states, value_states)

    def layer(self, index: int) -> BufferLayer:
        while len(self.layers) <= index:
            self.layers.append(BufferLayer(self._planned))
        return self.layers[index]

    def part(self, first: int, count: int) -> "BufferCache":
        """`count` layers from `first` on as a cache of their own: what one holds, so does the
        other."""
        self.layer(first + count - 1)
        shared = BufferCache()
        shared.layers = self.layers[first : first + count]
        return shared

    def rows(self) -> list[tuple[Tensor, Tensor]]:
        """Copies of the keys and values, per layer."""
        return [
            (layer.keys[:, :, : layer.length].clone(), layer.values[:, :, : layer.length].clone())
            for layer in self.layers
        ]

    def set_length(self, length: int) -> None:
        """Forget every row from ``length`` on."""
        for layer in self.layers:
            layer.length = length

    def keep(self, start: int, rows: list[int]) -> None:
        """Keep of the rows from ``start`` on only ``start + rows``, in that order."""
        places, on = start + torch.tensor(rows, dtype=torch.long), dict[torch.device, Tensor]()
        for layer in self.layers:
            if layer.is_initialized:
                layer.length, device = start + len(rows), layer.keys.device
                if device not in on:
                    on[device] = sent(places, device)
                source = on[device]
                layer.keys[:, :, start : layer.length] = layer.keys[:, :, source]
                layer.values[:, :, start : layer.length] = layer.values[:, :, source]


class SideBySide(Cache):
    """Caches of several requests, whose rows come in one call, one after another.

    masks: of each, as `grouped_sdpa` takes them; sizes: rows of each"""

    def __init__(
        self, caches: Sequence[BufferCache], masks: Sequence[Tensor | None], sizes: Sequence[int]
    ) -> None:
        super().__init__(layers=[])
        self._caches, self._masks, self._sizes = caches, masks, list(sizes)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> Any:
        """Append the rows to their caches. Return, in place of keys and values, those of each."""
        parts = zip(
            self._caches,
            key_states.split(self._sizes, 2),
            value_states.split(self._sizes, 2),
            strict=True,
        )
        held = [cache.update(keys, values, layer_idx) for cache, keys, values in parts]
        return Beside(zip(held, self._masks, self._sizes, strict=True)), None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


class Beside(list[tuple[tuple[Tensor, Tensor], Tensor | None, int]]):
    """Keys and values, mask and number of rows of several requests."""


def _buffer(like: Tensor, capacity: int) -> Tensor:
    """Zeros; an ordinary tensor even in inference mode, so that the cache may be written outside of
    it later."""
    batch, heads, _, dim = like.shape
    with torch.inference_mode(False):
        return torch.zeros(batch, heads, capacity, dim, dtype=like.dtype, device=like.device)


def _grown(old: Tensor, used: int, capacity: int) -> Tensor:
    new = _buffer(old, capacity)
    new[:, :, :used] = old[:, :, :used]
    return new


def written(buffer: Tensor, start: int, rows: Tensor) -> Tensor:
    """`buffer` with `rows` [n, ...] from row `start` on; a larger one where they do not fit, an
    ordinary tensor even in inference mode, so that it may be written outside of it later."""
    end = start + len(rows)
    if end > len(buffer):
        size = max(end, 2 * len(buffer), 256), *rows.shape[1:]
        with torch.inference_mode(False):
            grown = torch.zeros(size, dtype=rows.dtype, device=rows.device)
        if len(buffer):
            grown[: len(buffer)] = buffer
        buffer = grown
    buffer.narrow(0, start, len(rows)).copy_(rows)
    return buffer


def grouped_sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor | Beside,
    value: Any,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention that folds grouped query heads into rows, so keys and values are never repeated in
    memory.

    query ``[B, heads, n, d]``, key and value ``[B, kv_heads, L, d]``, mask ``[B, 1, n, L]``
    (additive or boolean) or None: one row sees everything, several rows start at an empty cache and
    are causal; or key those of several requests beside one another, each with its own mask.
    options: as transformers gives them. Returns ``[B, n, heads, d]``."""
    if isinstance(key, Beside):
        rows = query.split([size for *_, size in key], 2)
        each = [
            grouped_sdpa(module, part, *held, mask, **options)[0]
            for part, (held, mask, _) in zip(rows, key, strict=True)
        ]
        return torch.cat(each, 1), None
    many = attention_mask is not None and attention_mask.shape[1] != 1
    if many or options.get("position_bias") is not None:
        raise UserError(
            "pair: expected attention without position biases or masks of single heads, got a model"
            " that has some. Choose another, see docs/guides/own-pair.md"
        )
    scores: dict[str, Any] = {name: options.get(name) for name in ("scaling", "softcap")}
    scores |= {"dropout": options.get("dropout") or 0.0, "sinks": options.get("s_aux")}
    if (positions := options.get(POSITIONS)) is not None:
        query = at_positions(module, query, key.shape[2] - query.shape[2], positions)
    mask = None
    if attention_mask is not None:
        mask = folded(attention_mask, query.shape[1] // key.shape[1])
    return attend(query, key, value, mask, **scores), None


def folded(mask: Tensor, groups: int) -> Tensor:
    """[B, 1, n, L] -> [B, 1, groups * n, L]: for the rows of `groups` query heads one after
    another."""
    return mask if groups == 1 or mask.shape[2] == 1 else mask.repeat(1, 1, groups, 1)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend as `grouped_sdpa` does, with the mask `folded` before. Return ``[B, n, heads, d]``.

    scaling: factor of the products, None: 1 / sqrt(d); softcap: bound of the scores' size, None:
    none; dropout: share of the weights that is dropped; sinks: [heads], the score of a row of zeros
    that each row sees besides, None: there is none."""
    batch, heads, n, dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    by_hand = softcap is not None or sinks is not None  # torch's attention has neither
    if mask is None and n > 1:
        if not by_hand:
            out = F.scaled_dot_product_attention(
                query,
                key,
                value,
                is_causal=True,
                scale=scaling,
                dropout_p=dropout,
                enable_gqa=groups > 1,
            )
            return out.transpose(1, 2).contiguous()
        shape = 1, 1, n, key.shape[2]
        mask = folded(torch.ones(shape, dtype=torch.bool, device=query.device).tril(), groups)
    if groups > 1:
        query = query.reshape(batch, kv_heads, groups * n, dim)
    scaling = scaling or dim**-0.5
    # On a CPU torch's own attention takes as long in bfloat16 as in float32.
    slow = n > FEW_ROWS and batch == 1 and query.device.type == "cpu" and not dropout
    if by_hand:
        out = _by_hand(query @ key.transpose(2, 3) * scaling, value, mask, softcap, sinks)
    elif mask is not None and slow and query.dtype == mask.dtype == torch.bfloat16:
        raw = torch.baddbmm(mask[0], query[0], key[0].transpose(1, 2), alpha=scaling)
        out = torch.bmm(torch.softmax(raw, dim=-1), value[0])
    else:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, dropout_p=dropout
        )
    return out.reshape(batch, heads, n, value.shape[-1]).transpose(1, 2).contiguous()


def _by_hand(
    scores: Tensor, value: Tensor, mask: Tensor | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """scores: [B, kv_heads, groups * n, L], a group's rows one after another."""
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if sinks is None:
        return torch.softmax(scores, dim=-1).to(value.dtype) @ value
    batch, heads, rows, _ = scores.shape
    each = sinks.view(heads, -1, 1)  # [kv_heads, groups, 1]
    column = each.expand(-1, -1, rows // each.shape[1]).reshape(1, heads, rows, 1).to(scores)
    weights = torch.softmax(torch.cat([scores, column.expand(batch, -1, -1, -1)], -1), dim=-1)
    return weights[..., :-1].to(value.dtype) @ value


def has_temperature(config: Any) -> bool:
    """Whether the layers of a text part scale queries by position, as Llama 4 does: see
    `at_positions`."""
    return bool(getattr(config, "attn_temperature_tuning", False))


def at_positions(module: Any, query: Tensor, before: int, positions: Tensor) -> Tensor:
    """Return the query [B, heads, n, d] of attention `module`, scaled for `positions` [B or 1, n]
    instead of for rows that come after `before` cached ones.

    Layers without rotation scale the query at position t by 1 + a log(1 + floor((t + 1) / s))
    (scaling after 2501.19399). The class takes the row's place in the cache for its position, which
    it is in a chain alone, not in a tree or a padded batch."""
    if module.use_rope or not module.attn_temperature_tuning:
        return query
    rows = torch.arange(before, before + query.shape[2], device=positions.device)
    wanted, applied = (
        torch.log1p(torch.floor((places.float() + 1.0) / module.floor_scale)) * module.attn_scale
        + 1.0
        for places in (positions, rows)
    )
    return query * (wanted / applied)[:, None, :, None].to(query)


AttentionInterface.register(ATTENTION, grouped_sdpa)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
