"""A Hugging Face causal model with a cache we control.

Supported: decoder-only models whose attention, full, in sliding windows or in chunks, goes through
the transformers attention interface. Classes that were tried: docs/guides/own-pair.md."""

import copy
import functools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from decoding.interfaces import LMOutput, RowsWanted, Wanted
from decoding.models.context import context_limit, kept_layers, windows_of
from decoding.models.cpu_llama import LlamaForward, fits
from decoding.models.draft_vocabulary import among_all
from decoding.models.forward import (
    Forward,
    Rows,
    RowTree,
    TransformersForward,
    additive_mask,
    at_most_float32,
    causal,
    ids_on,
    picked,
)
from decoding.models.kv_cache import ATTENTION, BufferCache, BufferLayer, written
from decoding.together import sent
from runtime.errors import UserError


class Clock:
    """Counts the seconds spent inside `with clock:`. On a GPU the host waits for them only when
    they are read."""

    def __init__(self, device: torch.device) -> None:
        self._stream = (
            functools.partial(torch.cuda.current_stream, device) if device.type == "cuda" else None
        )
        self.reset()

    def reset(self) -> None:
        self._seconds = 0.0
        self._open: list[Any] = []  # pairs of events that the GPU may not have reached

    def __enter__(self) -> None:
        self._start = self._now()

    def __exit__(self, *_: object) -> None:
        if self._stream is None:
            self._seconds += self._now() - self._start
        else:
            self._open.append((self._start, self._now()))

    @property
    def seconds(self) -> float:
        for start, end in self._open:
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1000
        self._open.clear()
        return self._seconds

    def _now(self) -> Any:
        """Return seconds on the host, an event in the stream of a GPU."""
        if self._stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream())
        return event


class Held(NamedTuple):
    """A copy of the cache. rows: per layer, keys and values [1, kv_heads, n, d]; states:
    [n, L + 1, H], if they are recorded."""

    rows: list[tuple[Tensor, Tensor]]
    states: Tensor | None


class CachedLM:
    """One sequence, one key/value cache, three verbs: ``forward``, ``crop``, ``keep_path``.

    Outputs arrive on ``output_device``: the CPU, or, inside an engine, the model's own, where they
    are warped, drawn from and verified. ``forwards``, ``seconds``: calls, and the time in them."""

    reads_target = False

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        vocab_size: int | None = None,
        max_length: int | None = None,
        vocabulary: Tensor | None = None,
        joins: bool = True,
    ) -> None:
        """vocabulary: [k], the tokens of the model's output layer, in its order (None: all, in the
        order of ids); joins: whether weights may be moved next to each other in memory; nothing
        else may read them meanwhile."""
        config = model.config.get_text_config()
        self.model = model.eval()
        self.model.set_attn_implementation(ATTENTION)
        self.device: torch.device = model.device
        self.vocab_size = vocab_size or config.vocab_size
        self.max_length = context_limit(model, max_length)
        self.vocabulary = vocabulary
        self.merges = False  # whether all tokens outside its vocabulary are one column of logits
        self._positions = torch.arange(self.max_length, device=self.device)
        embedding = model.get_input_embeddings()
        self._embedded: int = getattr(embedding, "num_embeddings", self.vocab_size)
        self.hidden_states: int = config.num_hidden_layers + 1
        self._recorded: list[int] | None = None  # layers whose hidden states are kept in `states`
        self._joins = joins
        self.network: Forward = self._network_of(model)
        self._begin()

    def _begin(self) -> None:
        """Start with an empty cache, and no engine."""
        self._cache, self._clock = self._empty_cache(), Clock(self.device)
        self.length = self.forwards = self._block_start = 0
        self._recording = True
        self._tree: RowTree | None = None  # of the rows from _block_start on; None: a chain
        self._added: Tensor | None = None  # [1, n, H], to the embeddings of the call
        self.states = torch.zeros(0)
        self.output_device = torch.device("cpu")
        self.user: int | None = None  # thread of the engine that decodes with it

    def fresh(self, target: Any = None) -> Self:
        """Return the same model with an empty cache of its own and shared weights, to run in
        another thread. target: the model whose states an EAGLE-style draft reads."""
        other = copy.copy(self)
        other.network = copy.copy(self.network)
        other._begin()
        return other

    def _empty_cache(self) -> BufferCache:
        return BufferCache()

    @property
    def exact(self) -> bool:
        """Whether a row is equal to the bit however it comes: the forward in C++."""
        return getattr(self.network, "exact", False)

    def in_halves(self) -> LlamaForward | None:
        """Return the model's forward if it can pause half-way (that of plain weights on the CPU),
        else None."""
        network = self.network
        return network if isinstance(network, LlamaForward) and network.plain() else None

    def _network_of(self, model: PreTrainedModel) -> Forward:
        self._windows = windows_of(model, self.max_length)
        if self._windows is None and fits(model):
            return LlamaForward(model, self.max_length, self._joins)
        return TransformersForward(model, self._windows)

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor | None = None,
        *,
        extend: bool = False,
        hidden: Sequence[int] = (),
        hidden_rows: RowsWanted = "all",
        logits: RowsWanted = "all",
    ) -> LMOutput:
        """Append ``tokens`` [n] to the cache and run the model on them.

        ``parents`` None: a chain that continues the cache. Otherwise a tree: ``parents[i]`` is the
        index, within the tree, of the row that row i follows (an earlier one), or -1 for the last
        row of the cache before the tree; a row sees that cache, its ancestors and itself, and its
        position is the cache's length plus its depth. The tree begins with this call, or, with
        ``extend``, goes on from the previous call. ``hidden``, ``hidden_rows``, ``logits``: see
        `Wanted`; nothing else leaves the device. Raises UserError when the context would exceed
        ``max_length``."""
        wanted, n = Wanted(hidden, hidden_rows, logits), len(tokens)
        if parents is None:
            self.check_context(self.length + n)
            positions = self._positions[self.length : self.length + n]
            plain = n == 1 or self.length == 0  # attention is complete, or causal without a mask
            return self._run(tokens, positions, None, wanted, chain=not plain)
        before = self._tree if extend else RowTree()
        assert before is not None, "extend needs a tree from the previous call"
        start = self._block_start if extend else self.length
        tree, rows_before = before.grown(parents), len(before.depth)
        places = [start + depth for depth in tree.depth[rows_before:]]
        self.check_context(max(places, default=0) + 1)
        if n == 1 and tree.depth[-1] == rows_before:  # the whole cache is its past
            visible, positions = None, self._positions[places[0] : places[0] + 1]
        else:
            visible = tree.visible(rows_before)
            positions = sent(torch.tensor(places), self.device)
        output = self._run(tokens, positions, visible, wanted)
        self._block_start, self._tree = start, tree
        return output

    def forward_masked(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor,
        *,
        hidden: Sequence[int] = (),
        logits: RowsWanted = "all",
    ) -> LMOutput:
        """Run the general form of `forward`: row i at ``positions[i]`` sees exactly ``visible[i]``
        of the ``length + n`` rows.

        tokens, positions: [n]; visible: [n, length + n] bool, each row must see itself. Logits stay
        as narrow as the model gives them: many are best converted a few rows at a time."""
        self.check_context(max(positions.tolist(), default=0) + 1)
        wanted = Wanted(hidden, logits=logits)
        return self._run(tokens, positions.to(self.device), visible, wanted, narrow=True)

    def refuse_missing(self, hidden: Sequence[int]) -> None:
        """Raise UserError if the model has fewer layers than ``hidden`` asks for."""
        if hidden and -min(hidden) > self.hidden_states:
            raise UserError(
                f"inputs: expected hidden states from layers -{self.hidden_states} to -1, got"
                f" {list(hidden)}. Set inputs.draft_layers=[-1] or inputs.target_layers=[-1]"
            )

    def record(self, layers: Sequence[int]) -> None:
        """Keep hidden states from now on of every cached row in ``states``, [length, len(layers) +
        1, H]: those after ``layers`` (0: the embeddings) and the last one, which the output layer
        reads."""
        self._recorded = [*layers, -1]

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Keep no hidden states meanwhile: nobody will read them."""
        self._recording = False
        try:
            yield
        finally:
            self._recording = True

    @property
    def _kept(self) -> list[int] | None:
        """Return the layers whose hidden states are kept now."""
        return self._recorded if self._recording else None

    def recorded(self, rows: list[int] | slice) -> Tensor:
        """Return the states of these cached rows, [n, len(layers) + 1, H]."""
        return self.states[rows]

    def compute(
        self, rows: Rows, cache: BufferCache, hidden: Sequence[int], logits: RowsWanted
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return what the `Forward` does with any cache, and the recorded hidden states, if any, as
        [B, n, len(layers) + 1, H]; those on ``device``. A draft with a smaller vocabulary than its
        target reads its last token in place of tokens it does not have."""
        self.refuse_missing(hidden)
        if self._embedded < self.vocab_size:
            rows = replace(rows, tokens=rows.tokens.clamp(max=self._embedded - 1))
        recorded = self._kept or ()
        scores, states = self.network(rows, cache, [*hidden, *recorded], logits)
        if states is None or not recorded:
            return scores, states, None
        count = len(hidden)
        return scores, states[:, :, :count] if count else None, states[:, :, count:]

    def of_target(self, states: Tensor) -> Tensor | None:
        """Return what to add to the embeddings of tokens, [b, n, H], from the target's recorded
        states [b, n, L + 1, H_target] at the tokens before; None for a draft that reads none."""
        return None

    def crop(self, length: int) -> None:
        """Forget every cached row from ``length`` on."""
        assert 0 <= length <= self.length, f"cannot crop {self.length} cached rows to {length}"
        self.length, self._tree = length, None
        self._cache.set_length(length)

    def keep_path(self, rows: list[int]) -> None:
        """Keep only ``rows`` of the tree (or chain) of the last call, a path in order; the cache
        before it stays."""
        self.keep(self._block_start, rows)

    def keep(self, start: int, rows: list[int]) -> None:
        """Keep only ``start + rows``, increasing, of the cached rows from ``start`` on."""
        self._tree = None
        if rows == list(range(len(rows))):
            return self.crop(start + len(rows))
        self._cache.keep(start, rows)
        if self._kept is not None:
            places = sent(start + torch.tensor(rows, dtype=torch.long), self.states.device)
            self.states[start : start + len(rows)] = self.states[places]
        self.length = start + len(rows)

    def load(self, rows: Sequence[tuple[Tensor, Tensor]], states: Tensor | None = None) -> None:
        """Replace the cache by rows computed elsewhere, as `Held` has them."""
        self.crop(0)
        for layer, (keys, values) in enumerate(rows):
            self._cache.update(keys, values, layer)
        self.length = rows[0][0].shape[-2]
        if states is not None:
            self.states = written(self.states, 0, states)

    def held(self) -> Held:
        """Return a copy of the cache, as `load` takes it."""
        states = None if self._kept is None else self.states[: self.length].clone()
        return Held(self._cache.rows(), states)

    @property
    def cached_layers(self) -> int:
        """Number of cached layers: those with keys and values, and one of positions if there are
        windows."""
        return kept_layers(self.model) + (self._windows is not None)

    @property
    def row_bytes(self) -> int:
        """Bytes of the keys and values of one cached row, in all layers."""
        layers = [layer for layer in self._cache.layers if isinstance(layer, BufferLayer)]
        return sum(x[:, :, 0].nbytes for layer in layers for x in (layer.keys, layer.values))

    def reset(self) -> None:
        """Empty the cache (buffers are kept) and zero the counters."""
        self.crop(0)
        self.forwards = 0
        self._clock.reset()

    @property
    def seconds(self) -> float:
        return self._clock.seconds

    def spread(self, logits: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the model's logits [..., k] as [..., V] on `output_device`, with -inf for tokens
        outside its vocabulary; as [..., k + 1] while it ``merges`` those."""
        if self.vocabulary is None:
            logits = logits[..., : self.vocab_size].to(self.output_device, dtype)
            if self._embedded >= self.vocab_size:
                return logits
            return pad(logits, (0, self.vocab_size - logits.shape[-1]), value=-math.inf)
        self.vocabulary = self.vocabulary.to(self.output_device)
        logits = logits.to(self.output_device, dtype)
        if self.merges:
            return pad(logits, (0, 1), value=-math.inf)
        return among_all(logits, self.vocabulary, self.vocab_size)

    def embed(self, token: int) -> Tensor:
        """Return the input embedding of one token, [H] float32."""
        index = ids_on(torch.tensor([token]), self.device)
        with torch.no_grad():
            return self.model.get_input_embeddings()(index)[0].float().to(self.output_device)

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor | None,
        wanted: Wanted,
        narrow: bool = False,
        chain: bool = False,
    ) -> LMOutput:
        """Run n rows. visible: [n, m] bool, which of the last m rows each of them sees, itself
        included; all see the rows before these. chain: see `Rows`."""
        with self._clock, torch.no_grad():
            mask = None
            if chain and not self.exact:
                visible = causal(len(tokens), self.device)
            if visible is not None:
                mask = additive_mask(visible, self.length, self.model.dtype, self.device)
            rows = Rows(
                ids_on(tokens, self.device)[None], positions[None], mask, self._added, chain
            )
            logits, states, kept = self.compute(rows, self._cache, wanted.hidden, wanted.logits)
            if kept is not None:
                self.states = written(self.states, self.length, kept[0])
            dtype = at_most_float32(logits.dtype) if narrow else torch.float32
            hidden = None
            if states is not None:  # copied, so that other rows can go
                hidden = picked(states, wanted.hidden_rows)[0].transpose(0, 1).clone()
                hidden = hidden.to(self.output_device)
            output = LMOutput(self.spread(logits[0], dtype), hidden)
        self._block_start, self._tree = self.length, None
        self.length += len(tokens)
        self.forwards += 1
        return output

    def check_context(self, context: int) -> None:
        """Raise UserError if a context of this many tokens exceeds `max_length`."""
        if context > self.max_length:
            raise UserError(
                f"pair.max_length: {context} tokens do not fit the context of {self.max_length}."
                " Shorten the prompt or max_new_tokens, or raise pair.max_length if the model"
                " allows it."
            )
