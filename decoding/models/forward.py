"""The forward of a causal model on some rows, with any cache: the interface, and its general
implementation by transformers."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)
from transformers import utils as transformers_utils

from decoding.interfaces import RowsWanted
from decoding.models.context import Windows
from decoding.models.kv_cache import POSITIONS, BufferCache, SideBySide, has_temperature
from decoding.models.packing import PackedLinear, refresh
from decoding.together import sent

# Earlier versions of transformers keep all hidden states, or count from another layer in a list.
SELECTS = hasattr(
    getattr(transformers_utils, "output_capturing", None), "resolve_hidden_states_indices"
)
# The same layers, but for biases and norms of queries and keys.
FAMILY = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)


@dataclass(frozen=True)
class Rows:
    """The rows of one call, of B sequences.

    tokens: [B, n]
    positions: [B or 1, n]
    mask: [B or 1, 1, n, L], added to the attention scores of the n rows over all L rows of the
        cache, these included; None: one row sees everything, several start an empty cache and are
        causal
    added: [B, n, H], added to the embeddings of the tokens; None: nothing
    chain: they continue the cache one after another; then the mask may be None for a forward that
        needs none to know it
    """

    tokens: Tensor
    positions: Tensor
    mask: Tensor | None = None
    added: Tensor | None = None
    chain: bool = False

    def __post_init__(self) -> None:
        if not self.tokens.numel():
            raise ValueError("expected at least one token, got none")

    @property
    def begin(self) -> bool:
        """Return whether they are the first of their text; for rows on the CPU only."""
        return int(self.positions[0, 0]) == 0


Result = tuple[Tensor, Tensor | None]
"""Logits [B, m, V] of the rows asked for, and the hidden states asked for, [B, n, len(hidden), H],
None where there are none."""


class Call(NamedTuple):
    """The arguments of a `Forward`. hidden: indices into n_layers + 1 states: the embedding, the
    output of each layer but the last, and the input of the output layer."""

    rows: Rows
    cache: BufferCache
    hidden: Sequence[int] = ()
    logits: RowsWanted = "all"

    def masked(self, dtype: torch.dtype) -> "Call":
        """Return the call with the mask that a chain came without."""
        tokens = self.rows.tokens
        if not self.rows.chain or self.rows.mask is not None:
            return self
        seen = causal(tokens.shape[1], tokens.device)
        mask = additive_mask(seen, self.cache.get_seq_length(), dtype, tokens.device)
        return self._replace(rows=replace(self.rows, mask=mask))


class Forward(Protocol):
    """A causal model's forward, as `CachedLM` and `BatchedLM` call it."""

    def __call__(
        self, rows: Rows, cache: BufferCache, hidden: Sequence[int] = (), logits: RowsWanted = "all"
    ) -> Result:
        """Run the rows and append them to the cache. See `Call`."""
        ...


class TransformersForward:
    """The `Forward` of any model, which calls its own modules."""

    def __init__(self, model: PreTrainedModel, windows: Windows | None = None) -> None:
        """windows: of those layers that do not see everything."""
        self._model, self._windows = model, windows
        self._tempered = has_temperature(model.config.get_text_config())
        pure = "cache_params" in signature(model.forward).parameters  # without attention
        self._cache_name = "cache_params" if pure else "past_key_values"
        self._packed = [part for part in model.modules() if isinstance(part, PackedLinear)]
        head = model.get_output_embeddings()
        self._takes_none = type(getattr(head, "weight", None)) is nn.Parameter  # no rows, that is

    def __call__(
        self, rows: Rows, cache: BufferCache, hidden: Sequence[int] = (), logits: RowsWanted = "all"
    ) -> Result:
        """See `Forward`."""
        if self._packed and rows.begin:
            refresh(self._packed)
        return self._run(rows, cache, hidden, logits)

    def together(self, asked: Sequence[Sequence[Any]]) -> list[Result]:
        """Do several calls, each of its own cache; of the usual decoders as one, in which rows of
        all are one sequence but for attention. asked: the arguments of each `Call`."""
        calls = [Call(*each) for each in asked]
        plain = type(self._model) in FAMILY and self._windows is None
        alike = len({call.rows.added is None for call in calls}) == 1
        if len(calls) < 2 or not (plain and alike) or any(len(c.rows.tokens) > 1 for c in calls):
            return [self(*call) for call in calls]
        if self._packed and any(call.rows.begin for call in calls):
            refresh(self._packed)
        rows = [call.rows for call in calls]
        sizes = [each.tokens.shape[1] for each in rows]
        added = [each.added for each in rows if each.added is not None]
        joined = Rows(
            torch.cat([each.tokens for each in rows], 1),
            torch.cat([each.positions for each in rows], 1),
            rows[0].tokens.new_zeros(1, 1, sum(sizes), 1),  # none is made: each has its own
            torch.cat(added, 1) if added else None,
        )
        cache = SideBySide([each.cache for each in calls], [each.mask for each in rows], sizes)
        layers = sorted({layer for call in calls for layer in call.hidden})
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        wanted = [
            picked(torch.arange(start, start + size)[None], call.logits)[0].tolist()
            for start, size, call in zip(starts, sizes, calls, strict=True)
        ]
        scores, states = self._run(joined, cache, layers, sum(wanted, []) or "none")
        each = scores.split([len(rows) for rows in wanted], 1)
        places = [slice(start, start + n) for start, n in zip(starts, sizes, strict=True)]
        return [
            (part, None if states is None else of_layers(states[:, rows], layers, call.hidden))
            for part, rows, call in zip(each, places, calls, strict=True)
        ]

    def _run(self, rows: Rows, cache: Any, hidden: Sequence[int], logits: RowsWanted) -> Result:
        inputs: dict[str, Any] = {"input_ids": rows.tokens, self._cache_name: cache}
        if rows.added is not None:
            embedding = self._model.get_input_embeddings()
            inputs["inputs_embeds"] = embedding(inputs.pop("input_ids")) + rows.added
        if self._tempered:
            inputs[POSITIONS] = rows.positions
        mask: Any = rows.mask
        if self._windows is not None:
            positions = rows.positions.expand(rows.tokens.shape)
            mask = self._windows.masks(mask, positions, cache)
        # The rows to keep are not a tensor: in a model on several devices, the device that picks
        # them may differ from that of the inputs.
        keep: int | slice | list[int]
        spared = logits == "none" and not self._takes_none
        if isinstance(logits, str):
            keep = slice(0) if logits == "none" and not spared else int(logits != "all")
        else:
            first, count = next(iter(logits), 0), len(logits)
            run = slice(first, first + count)  # if they are one, there is nothing to send
            keep = run if list(logits) == [*range(first, first + count)] else list(logits)
        result = self._model(
            **inputs,
            attention_mask=mask,
            position_ids=rows.positions,
            use_cache=True,
            output_hidden_states=list(hidden) if SELECTS else bool(hidden),
            logits_to_keep=keep,
        )
        states = [result.hidden_states[layer].to(rows.tokens.device) for layer in hidden]
        scores = picked(result.logits, "none") if spared else result.logits
        return scores, torch.stack(states, 2) if states else None


def of_layers(states: Tensor, layers: Sequence[int], wanted: Sequence[int]) -> Tensor | None:
    """Return of hidden states [B, n, len(layers), H] those of the layers wanted, in their order;
    None where none is."""
    if not wanted:
        return None
    same = list(wanted) == list(layers)
    return states if same else states[:, :, [layers.index(layer) for layer in wanted]]


def picked(x: Tensor, rows: RowsWanted) -> Tensor:
    """Return those of the rows x [B, n, H] that are wanted; a view unless they are listed."""
    if rows == "all":
        return x
    if rows == "last":
        return x[:, -1:]
    return x[:, :0] if rows == "none" else x[:, list(rows)]


def causal(n: int, device: torch.device) -> Tensor:
    """Return the causal mask [n, n] bool: each row sees itself and those before."""
    return torch.ones(n, n, dtype=torch.bool, device=device).tril()


def additive_mask(visible: Tensor, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the additive mask [1, 1, n, length + n] on `device`: 0 where visible, the lowest
    finite number elsewhere. visible: [n, m] bool, which of the last m of length + n rows are
    seen."""
    n, m = visible.shape
    mask = torch.zeros(n, length + n, dtype=dtype, device=device)
    mask.narrow(1, length + n - m, m).masked_fill_(~sent(visible, device), torch.finfo(dtype).min)
    return mask[None, None]


def ids_on(tokens: Tensor, device: torch.device) -> Tensor:
    """Return tokens [n] on a device. A single one from the host is written by the device, without a
    wait."""
    if device.type == "cpu" or len(tokens) > 1 or tokens.device.type != "cpu":
        return sent(tokens, device)
    return torch.full((1,), int(tokens), device=device)


@dataclass(frozen=True)
class RowTree:
    """A tree of rows after a cache. parents: for each an earlier row of the tree, or -1; depth: 0
    for a row that follows the cache."""

    parents: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)

    def grown(self, parents: Tensor) -> "RowTree":
        """Return the tree with one more row for each of ``parents`` [n], indices of earlier rows
        (-1 = none)."""
        more: list[int] = parents.tolist()
        depth = self.depth.copy()
        for parent in more:
            depth.append(depth[parent] + 1 if parent >= 0 else 0)
        return RowTree(self.parents + more, depth)

    def visible(self, first: int = 0) -> Tensor:
        """[m - first, m] bool: which rows each one from `first` on sees, its ancestors and
        itself."""
        seen = np.zeros((len(self.parents) - first, len(self.parents)), dtype=np.bool_)
        for row, sees in enumerate(seen, first):
            while row >= 0:
                sees[row] = True
                row = self.parents[row]
        return torch.from_numpy(seen)


def at_most_float32(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize < 4 else torch.float32
