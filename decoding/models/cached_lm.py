"""A Hugging Face causal model with a cache we control.

Supported: decoder-only models whose attention goes through the transformers attention interface and
whose layers all keep a full key/value cache (Llama, Qwen2, Gemma, Mistral, Phi, ...).
Sliding-window layers are exact as long as the
context stays within the window: ``max_length`` is clamped to it. State-space and attention-sink
models are refused."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from decoding.models.cpu_llama import Forward, LlamaForward, fits
from decoding.models.kv_cache import ATTENTION, BufferCache
from decoding.models.lm import LMOutput, LogitsFor
from runtime.errors import UserError


class CachedLM:
    """One sequence, one key/value cache, three verbs: ``forward``, ``crop``, ``keep_path``.

    Outputs arrive on ``output_device`` (the CPU unless changed: all sampling and verification
    happen there, so a seed means the same on every machine). ``forwards`` and ``seconds`` count the
    calls and the time spent in them."""

    reads_target = False

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        vocab_size: int | None = None,
        max_length: int | None = None,
        vocabulary: torch.Tensor | None = None,
    ) -> None:
        """vocabulary: [k], the tokens that the model's output layer is about, in its order (None:
        all, in theirs)."""
        self.model = model.eval()
        self.model.set_attn_implementation(ATTENTION)
        self.device: torch.device = model.device
        self.vocab_size = vocab_size or model.config.get_text_config().vocab_size
        self.max_length = _context_limit(model.config, max_length)
        self.vocabulary = vocabulary
        self.output_device = torch.device("cpu")
        self.length = 0
        self.forwards = 0
        self.seconds = 0.0
        self._block_start = 0
        self._tree: Tree | None = None  # of the rows from _block_start on; None: they are a chain
        self._positions = torch.arange(self.max_length, device=self.device)
        self._cache = BufferCache()
        self._recorded: list[int] | None = None  # layers whose hidden states are kept in `states`
        self.states = torch.zeros(0)
        self._added: torch.Tensor | None = None  # [1, n, H], to the embeddings of the call
        self.network: Forward = (
            LlamaForward(model, self.max_length) if fits(model) else TransformersForward(model)
        )

    def forward(
        self,
        tokens: torch.Tensor,
        parents: torch.Tensor | None = None,
        *,
        extend: bool = False,
        hidden: bool = False,
        logits: LogitsFor = "all",
    ) -> LMOutput:
        """Append ``tokens`` [n] to the cache and run the model on them.

        ``parents`` None: a chain that continues the cache. Otherwise a tree: ``parents[i]`` is the
        index, within the tree, of the row that row i follows (an earlier one), or -1 for the last
        row of the cache before the tree; a row sees that cache, its ancestors and itself, and its
        position is the cache's length plus its depth. The tree begins with this call, or, with
        ``extend``, goes on from the previous call. Raises UserError when the context would exceed
        ``max_length``."""
        if parents is not None:
            return self._forward_tree(tokens, parents, extend, hidden, logits)
        n = len(tokens)
        self._check_room(self.length + n)
        positions = self._positions[self.length : self.length + n]
        plain = (
            n == 1 or self.length == 0
        )  # attention is complete or plainly causal: no mask needed
        visible = None if plain else torch.ones(n, n, dtype=torch.bool).tril()
        return self._run(tokens, positions, visible, hidden, logits)

    def _forward_tree(
        self,
        tokens: torch.Tensor,
        parents: torch.Tensor,
        extend: bool,
        hidden: bool,
        logits: LogitsFor,
    ) -> LMOutput:
        before = self._tree if extend else Tree.empty()
        assert before is not None, "extend needs a tree from the previous call"
        start = self._block_start if extend else self.length
        tree = before.grown(parents)
        known = len(before.depth)
        positions = [start + depth for depth in tree.depth[known:]]
        self._check_room(max(positions) + 1)
        straight = (
            len(tokens) == 1 and tree.depth[-1] == known
        )  # the whole cache is its past: no mask needed
        visible = None if straight else tree.visible(known)
        output = self._run(
            tokens, torch.tensor(positions, device=self.device), visible, hidden, logits
        )
        self._block_start, self._tree = start, tree
        return output

    def forward_masked(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        visible: torch.Tensor,
        *,
        hidden: bool = False,
        logits: LogitsFor = "all",
    ) -> LMOutput:
        """The general form: row i at ``positions[i]`` sees exactly ``visible[i]`` of the ``length +
        n`` rows.

        tokens, positions: [n]; visible: [n, length + n] bool, each row must see itself. Logits stay
        as
        narrow as the model gives them: where there are many, they are best converted a few rows at
        a time."""
        self._check_room(int(positions.max()) + 1)
        return self._run(tokens, positions.to(self.device), visible, hidden, logits, narrow=True)

    def record(self, layers: Sequence[int]) -> None:
        """From now on keep hidden states of every cached row in ``states``, [length, len(layers) +
        1, H]: those after ``layers`` (0: the embeddings) and the last one, which the output layer
        reads."""
        self._recorded = [*layers, -1]

    def compute(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        cache: BufferCache,
        hidden: bool,
        logits: LogitsFor,
        added: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor] | None, torch.Tensor | None]:
        """What the `Forward` gives with any cache, and of the hidden states those that are
        recorded, if any, as [B, n, len(layers) + 1, H] on ``device``."""
        recorded = self._recorded
        found, states = self.network(
            tokens, positions, mask, cache, hidden or recorded is not None, logits, added
        )
        if recorded is None:
            return found, states, None
        assert states is not None
        kept = torch.stack([states[layer].to(self.device) for layer in recorded], 2)
        return found, states if hidden else None, kept

    def crop(self, length: int) -> None:
        """Forget every cached row from ``length`` on."""
        assert 0 <= length <= self.length, f"cannot crop {self.length} cached rows to {length}"
        self.length, self._tree = length, None
        self._cache.set_length(length)

    def keep_path(self, rows: list[int]) -> None:
        """Of the tree (or chain) of the last call keep only ``rows``, a path in order; the cache
        before it stays."""
        self.keep(self._block_start, rows)

    def keep(self, start: int, rows: list[int]) -> None:
        """Of the cached rows from ``start`` on keep only ``start + rows``, in increasing order."""
        self._tree = None
        if rows == list(range(len(rows))):
            return self.crop(start + len(rows))
        self._cache.keep(start, rows)
        if self._recorded is not None:
            self.states[start : start + len(rows)] = self.states[[start + row for row in rows]]
        self.length = start + len(rows)

    def load(
        self, rows: Sequence[tuple[torch.Tensor, torch.Tensor]], states: torch.Tensor | None = None
    ) -> None:
        """Replace the cache by rows computed elsewhere: per layer, keys and values [1, kv_heads, n,
        d]. states: [n, len(layers) + 1, H], of a model that records them."""
        self.crop(0)
        for layer, (keys, values) in enumerate(rows):
            self._cache.update(keys, values, layer)
        self.length = rows[0][0].shape[-2]
        if states is not None:
            self.states = written(self.states, 0, states)

    @property
    def row_bytes(self) -> int:
        """Keys and values of one cached row, all layers."""
        return sum(
            part[:, :, 0].nbytes
            for layer in self._cache.layers
            for part in (layer.keys, layer.values)
        )

    def reset(self) -> None:
        """Empty the cache (buffers are kept) and zero the counters."""
        self.crop(0)
        self.forwards = 0
        self.seconds = 0.0

    def spread(self, logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What the model gives, [..., k], as logits [..., V] on `output_device`: -inf for tokens it
        cannot say."""
        if self.vocabulary is None:
            return logits[..., : self.vocab_size].to(self.output_device, dtype)
        logits = logits.to(self.output_device, dtype)
        self.vocabulary = self.vocabulary.to(self.output_device)
        full = logits.new_full((*logits.shape[:-1], self.vocab_size), -math.inf)
        return full.index_copy_(-1, self.vocabulary, logits)

    def embed(self, token: int) -> torch.Tensor:
        """Input embedding of one token, [H] float32."""
        index = torch.tensor([token], device=self.device)
        with torch.no_grad():
            return self.model.get_input_embeddings()(index)[0].float().to(self.output_device)

    def _run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        visible: torch.Tensor | None,
        hidden: bool,
        logits: LogitsFor,
        narrow: bool = False,
    ) -> LMOutput:
        """visible: [n, m] bool, which of the last m rows each of the n sees, itself included; all
        see those before."""
        n = len(tokens)
        start = time.perf_counter()
        with torch.no_grad():
            mask = None if visible is None else self._additive(visible)
            tokens, positions = tokens.to(self.device)[None], positions[None]
            found, states, kept = self.compute(
                tokens, positions, mask, self._cache, hidden, logits, self._added
            )
            if kept is not None:
                self.states = written(self.states, self.length, kept[0])
            dtype = at_most_float32(found.dtype) if narrow else torch.float32
            output = LMOutput(
                self.spread(found[0], dtype),
                None if states is None else torch.cat(tuple(states)).to(self.output_device),
            )
        self._block_start, self._tree = self.length, None
        self.length += n
        self.forwards += 1
        if self.device.type == "cuda":
            torch.cuda.current_stream(
                self.device
            ).synchronize()  # not the device: the other model may be running
        self.seconds += time.perf_counter() - start
        return output

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        """[n, m] bool -> [1, 1, n, L] in the model's dtype: 0 where visible, the lowest finite
        number elsewhere."""
        n, m = visible.shape
        mask = torch.zeros(n, self.length + n, dtype=self.model.dtype)
        mask.narrow(1, self.length + n - m, m).masked_fill_(
            ~visible.cpu(), torch.finfo(mask.dtype).min
        )
        return mask[None, None].to(self.device)

    def _check_room(self, context: int) -> None:
        if context > self.max_length:
            raise UserError(
                f"pair.max_length: {context} tokens do not fit the context of {self.max_length}."
                " Shorten the prompt or max_new_tokens, or raise pair.max_length if the model"
                " allows it."
            )


class TransformersForward:
    """The `Forward` of any model, by its own modules."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        cache: BufferCache,
        hidden: bool = False,
        logits: LogitsFor = "all",
        added: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor] | None]:
        """See `Forward`."""
        embedding = self._model.get_input_embeddings()
        given = (
            {"input_ids": tokens} if added is None else {"inputs_embeds": embedding(tokens) + added}
        )
        result = self._model(
            **given,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=hidden,
            logits_to_keep=rows_to_keep(logits),
        )
        return result.logits, result.hidden_states


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


@dataclass(frozen=True)
class Tree:
    """Rows after a cache. parents: an earlier row of the tree, or -1, of each; depth: 0 for a row
    that follows the cache."""

    parents: list[int]
    depth: list[int]

    @classmethod
    def empty(cls) -> "Tree":
        return cls([], [])

    def grown(self, parents: torch.Tensor) -> "Tree":
        """With one more row for each of ``parents`` [n], indices of earlier rows (-1 = none)."""
        more: list[int] = parents.tolist()
        depth = self.depth.copy()
        for parent in more:
            depth.append(depth[parent] + 1 if parent >= 0 else 0)
        return Tree(self.parents + more, depth)

    def visible(self, first: int = 0) -> torch.Tensor:
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


def rows_to_keep(logits: LogitsFor) -> int | slice | list[int]:
    """As transformers has it: the last so many rows (0 is all of them), or which. No tensor: of a
    model on several devices the last one, which picks the rows, need not be the one that the inputs
    go to."""
    if logits == "all" or logits == "last":
        return int(logits == "last")
    return slice(0) if logits == "none" else list(logits)


def _context_limit(config: PreTrainedConfig, asked: int | None) -> int:
    if asked is not None and asked < 2:
        raise UserError(
            f"pair.max_length: {asked} has no room for a prompt and a response. Raise it, or give"
            " null"
        )
    text = config.get_text_config()
    window = text.sliding_window if _has_sliding_layers(text) else None
    return min(limit for limit in (text.max_position_embeddings, window, asked) if limit)


def _has_sliding_layers(text: PreTrainedConfig) -> bool:
    if getattr(text, "sliding_window", None) is None:
        return False
    layer_types = getattr(text, "layer_types", None)
    return layer_types is None or "sliding_attention" in layer_types
