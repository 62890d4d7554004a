"""Preallocated key/value buffers and the attention function that reads them without copying."""

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from decoding.models.layers.temperature import OPTION, at_positions
from runtime.errors import UserError

ATTENTION = "grouped_heads"
SPARE = 1024  # rows that a full buffer gets beyond those that it needs, at most as many again
FEW_ROWS = 16  # more are faster in two products, as far as these are


class BufferLayer(CacheLayerMixin):
    """Keys and values of one layer: ``[batch, kv_heads, capacity, head_dim]``, the first ``length``
    rows are in use.

    Appending writes in place; a full buffer becomes a larger one, with spare rows. Dropping rows
    only changes ``length``."""

    is_sliding = False
    keys: torch.Tensor  # allocated on first use
    values: torch.Tensor

    def __init__(self, planned: int = 0) -> None:
        """planned: rows that are certain to come; no more are allocated as long as they do."""
        super().__init__()
        self.length, self._planned = 0, planned

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows = self._capacity(key_states.shape[-2])
        self.keys, self.values = _buffer(key_states, rows), _buffer(value_states, rows)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, n = self.length, key_states.shape[-2]
        end = start + n
        if end > self.keys.shape[-2]:
            self.keys = _grown(self.keys, start, self._capacity(end))
            self.values = _grown(self.values, start, self._capacity(end))
        self.keys.narrow(2, start, n).copy_(key_states)
        self.values.narrow(2, start, n).copy_(value_states)
        self.length = end
        return self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)

    def _capacity(self, needed: int) -> int:
        return self._planned if needed <= self._planned else needed + min(max(needed, 256), SPARE)

    def keep(self, start: int, rows: torch.Tensor) -> None:
        """Move the rows ``start + rows`` to the front of the block at ``start`` and drop what
        follows."""
        if self.is_initialized:
            self.length = start + len(rows)
            source = (start + rows).to(self.keys.device)
            self.keys[:, :, start : self.length] = self.keys[:, :, source]
            self.values[:, :, start : self.length] = self.values[:, :, source]

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
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(layer_idx).update(key_states, value_states)

    def layer(self, index: int) -> BufferLayer:
        while len(self.layers) <= index:
            self.layers.append(BufferLayer(self._planned))
        return self.layers[index]

    def part(self, first: int, count: int) -> "BufferCache":
        """`count` layers from `first` on as a cache of their own: what one holds, so does the
        other."""
        self.layer(first + count - 1)
        found = BufferCache()
        found.layers = self.layers[first : first + count]
        return found

    def rows(self, start: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of the keys and values from row ``start`` on, per layer."""
        used = [(layer.keys, layer.values, slice(start, layer.length)) for layer in self.layers]
        return [
            (keys[:, :, some].clone(), values[:, :, some].clone()) for keys, values, some in used
        ]

    def set_length(self, length: int) -> None:
        """Forget every row from ``length`` on."""
        for layer in self.layers:
            layer.length = length

    def keep(self, start: int, rows: list[int]) -> None:
        """Keep of the rows from ``start`` on only ``start + rows``, in that order."""
        index = torch.tensor(rows, dtype=torch.long)
        for layer in self.layers:
            layer.keep(start, index)


def _buffer(like: torch.Tensor, capacity: int) -> torch.Tensor:
    """Zeros; an ordinary tensor even in inference mode, so that the cache may be written outside of
    it later."""
    batch, heads, _, dim = like.shape
    with torch.inference_mode(False):
        return torch.zeros(batch, heads, capacity, dim, dtype=like.dtype, device=like.device)


def _grown(old: torch.Tensor, used: int, capacity: int) -> torch.Tensor:
    new = _buffer(old, capacity)
    new[:, :, :used] = old[:, :, :used]
    return new


def written(buffer: torch.Tensor, start: int, rows: torch.Tensor) -> torch.Tensor:
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
    buffer[start:end] = rows
    return buffer


class Scores(NamedTuple):
    """How scores of attention are computed. scaling: factor of the products, None: 1 / sqrt(d);
    softcap: bound of their size, None: none; dropout: share of the weights that is dropped; sinks:
    [heads], the score of a row of zeros that each row sees besides, None: there is none."""

    scaling: float | None = None
    softcap: float | None = None
    dropout: float = 0.0
    sinks: torch.Tensor | None = None

    @property
    def own(self) -> bool:
        """Whether torch's attention cannot compute them."""
        return self.softcap is not None or self.sinks is not None


PLAIN = Scores()


def grouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention that folds grouped query heads into rows, so keys and values are never repeated in
    memory.

    query ``[B, heads, n, d]``, key and value ``[B, kv_heads, L, d]``, mask ``[B, 1, n, L]``
    (additive or boolean) or None: one row sees everything, several rows start at an empty cache and
    are causal. options: as transformers gives them, ``scaling``, ``softcap`` and ``dropout`` among
    them. Returns ``[B, n, heads, d]``."""
    many = attention_mask is not None and attention_mask.shape[1] != 1
    if many or options.get("position_bias") is not None:
        raise UserError(
            "pair: expected attention without position biases or masks of single heads, got a model"
            " that has some. Choose another, see docs/guides/own-pair.md"
        )
    sinks, dropout = options.get("s_aux"), options.get("dropout") or 0.0
    scores = Scores(options.get("scaling"), options.get("softcap"), dropout, sinks)
    if (positions := options.get(OPTION)) is not None:
        query = at_positions(module, query, key.shape[2] - query.shape[2], positions)
    groups = query.shape[1] // key.shape[1]
    if attention_mask is None and query.shape[2] > 1 and scores.own:
        shape = 1, 1, query.shape[2], key.shape[2]
        attention_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
    mask = None if attention_mask is None else folded(attention_mask, groups)
    return attend(query, key, value, mask, scores), None


def folded(mask: torch.Tensor, groups: int) -> torch.Tensor:
    """[B, 1, n, L] -> [B, 1, groups * n, L]: for the rows of `groups` query heads one after
    another."""
    return mask if groups == 1 or mask.shape[2] == 1 else mask.repeat(1, 1, groups, 1)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scores: Scores = PLAIN,
) -> torch.Tensor:
    """Attend as `grouped_sdpa` does, with the mask `folded` before. Return ``[B, n, heads, d]``."""
    batch, heads, n, dim = query.shape
    groups = heads // key.shape[1]
    if mask is None and n > 1:
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=scores.scaling,
            dropout_p=scores.dropout,
            enable_gqa=groups > 1,
        )
        return out.transpose(1, 2).contiguous()
    if groups > 1:
        query = query.reshape(batch, key.shape[1], groups * n, dim)
    scaling = scores.scaling or dim**-0.5
    if scores.own:
        out = _by_hand(query, key, value, mask, scores)
    elif mask is not None and not scores.dropout and _in_two_products(query, mask, n):
        raw = torch.baddbmm(mask[0], query[0], key[0].transpose(1, 2), alpha=scaling)
        out = torch.bmm(torch.softmax(raw, dim=-1), value[0])
    else:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, dropout_p=scores.dropout
        )
    return out.reshape(batch, heads, n, value.shape[-1]).transpose(1, 2).contiguous()


def _in_two_products(query: torch.Tensor, mask: torch.Tensor, n: int) -> bool:
    """Whether torch's own attention is slower: in bfloat16 on a CPU it takes as long as in
    float32."""
    many = n > FEW_ROWS and len(query) == 1 and query.device.type == "cpu"
    return many and query.dtype == mask.dtype == torch.bfloat16


def _by_hand(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scores: Scores,
) -> torch.Tensor:
    """query: [B, kv_heads, groups * n, d], a group's rows one after another."""
    found = query @ key.transpose(2, 3) * (scores.scaling or query.shape[-1] ** -0.5)
    if scores.softcap is not None:
        found = scores.softcap * torch.tanh(found / scores.softcap)
    if mask is not None and mask.dtype == torch.bool:
        found = found.masked_fill(~mask, torch.finfo(found.dtype).min)
    elif mask is not None:
        found = found + mask
    found = found.to(torch.promote_types(found.dtype, torch.float32))
    if scores.sinks is None:
        return torch.softmax(found, dim=-1).to(value.dtype) @ value
    batch, heads, rows, _ = found.shape
    each = scores.sinks.view(heads, -1, 1)  # [kv_heads, groups, 1]
    sinks = each.expand(-1, -1, rows // each.shape[1]).reshape(1, heads, rows, 1).to(found)
    weights = torch.softmax(torch.cat([found, sinks.expand(batch, -1, -1, -1)], -1), dim=-1)
    return weights[..., :-1].to(value.dtype) @ value


AttentionInterface.register(ATTENTION, grouped_sdpa)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
