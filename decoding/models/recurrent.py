"""A causal model whose layers keep states besides keys and values: `CachedLM` with a snapshot.

States are those of recurrent layers, of linear attention and of short convolutions. A state
summarises a whole text: it cannot be cut back to fewer tokens, and padding would enter it. So
states are copied before a call that may be rolled back. A rollback restores the copy and runs the
kept tokens after it again: within the next call if only that call's last row is wanted, else in a
call of their own."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionLayer

from decoding.interfaces import LMOutput, RowsWanted, Wanted
from decoding.models.cached_lm import CachedLM
from decoding.models.forward import Forward, Result, Rows, TransformersForward
from decoding.models.kv_cache import BufferCache, BufferLayer, written
from runtime.errors import UserError

# Model types whose states lie in the cache of transformers, and whose layers continue from them by
# any number of rows with the same result as row by row. Not Mamba, FalconMamba, Jamba and Zamba,
# which continue by single rows only; Zamba2 and Nemotron-H, which limit time steps except those of
# single rows; RWKV, xLSTM, MiniMax and RecurrentGemma, which keep states elsewhere.
STATEFUL = {
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "mamba2",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "zaya",
}

SINCE = (5, 23)  # transformers whose cache layers keep several states each
ALONE = "Harvest with warp=greedy, and with such a model as pair.target alone"

State = tuple[bool, Tensor | None, Tensor | None]
"""Whether there is one, what a convolution sees of the past, what a recurrence keeps of it."""


def keeps_states(model: PreTrainedModel) -> bool:
    """Return whether the model keeps states that `StateCache` holds."""
    listed = model.config.get_text_config().model_type in STATEFUL
    limits = [getattr(part, "time_step_limit", None) for part in model.modules()]
    limited = any(limit is not None and tuple(limit) != (0.0, math.inf) for limit in limits)
    return listed and not limited and type(model).__module__.startswith("transformers.")


def refuse_old_transformers(key: str, model: PreTrainedModel) -> None:
    """Raise UserError for a model that keeps states if transformers is older than `SINCE`."""
    version = transformers.__version__
    if keeps_states(model) and tuple(map(int, version.split(".")[:2])) < SINCE:
        raise UserError(
            f"{key}: {type(model).__name__} keeps states, which needs transformers"
            f" {'.'.join(map(str, SINCE))} or newer, got {version}. Upgrade it, or choose a"
            " model of attention alone"
        )


def cached(model: PreTrainedModel, **options: Any) -> CachedLM:
    """Return the model with the cache that it needs. options: those of `CachedLM`."""
    return (RecurrentLM if keeps_states(model) else CachedLM)(model, **options)


def refuse_recurrent(key: str, lm: object, got: str) -> None:
    """Raise UserError for a model that keeps states. got: what it would have to run, and a
    remedy."""
    if isinstance(lm, RecurrentLM):
        name = type(lm.model).__name__
        raise UserError(
            f"{key}: expected one path of one text, of which {name} keeps states, got {got}"
        )


class StatesAndRows(LinearAttentionLayer, BufferLayer):  # type: ignore[override]
    """The cache of a layer that keeps both states and rows."""

    def __init__(self, number_of_states: int) -> None:
        BufferLayer.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *rows: Tensor, **states: Any) -> None:  # type: ignore[override]
        if rows:
            BufferLayer.lazy_initialization(self, *rows)
        else:
            LinearAttentionLayer.lazy_initialization(self, **states)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        BufferLayer.reset(self)


class StateCache(BufferCache):
    """The ``past_key_values`` of a model of `STATEFUL`."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        layers: list[Any] = []
        for plain in DynamicCache(config=config).layers:
            if isinstance(plain, LinearAttentionLayer) and isinstance(plain, DynamicLayer):
                layers.append(StatesAndRows(plain.number_of_states))
            else:  # a layer that keeps nothing stays
                layers.append(BufferLayer() if isinstance(plain, DynamicLayer) else plain)
        self.layers = layers

    @property
    def is_linear(self) -> list[bool]:
        """Return for each layer whether it keeps no keys and values."""
        return [
            isinstance(layer, LinearAttentionLayer) and not isinstance(layer, BufferLayer)
            for layer in self.layers
        ]

    def saved(self) -> list[State]:
        """Return copies of all states."""
        copies = list[State]()
        for layer, index in self._states():
            held = layer.conv_states[index], layer.recurrent_states[index]
            conv, recurrent = (None if state is None else state.clone() for state in held)
            copies.append((layer.has_previous_state[index], conv, recurrent))
        return copies

    def restore(self, length: int, saved: list[State]) -> None:
        """Go back to the first `length` rows. saved: the states after them."""
        self.set_length(length)
        for (layer, index), (exists, *copies) in zip(self._states(), saved, strict=True):
            layer.has_previous_state[index] = exists
            held = layer.conv_states[index], layer.recurrent_states[index]
            for state, copy in zip(held, copies, strict=True):
                if state is not None and copy is not None:
                    state.copy_(copy)

    def _states(self) -> Iterator[tuple[LinearAttentionLayer, int]]:
        for layer in self.layers:
            if isinstance(layer, LinearAttentionLayer):
                yield from ((layer, index) for index in range(layer.number_of_states))


class RecurrentLM(CachedLM):
    """A `CachedLM` of one path. A rollback to a position before the snapshot runs the text from its
    beginning.

    The snapshot is taken before a call, unless this call and the one before it have one row each
    and nothing was rolled back between them: a draft's tokens, drawn one by one, share the snapshot
    at the last committed token."""

    _cache: StateCache

    def _begin(self) -> None:
        super()._begin()
        self._text = torch.zeros(0, dtype=torch.long)  # the first `length` are, or will be, cached
        self._held = 0  # rows that are cached
        self._snapshot: list[State] = []
        self._taken = 0  # rows before the snapshot
        self._stepping = False  # the last call was of one row, and all it added is kept

    def _empty_cache(self) -> StateCache:
        return StateCache(self.model.config.get_text_config())

    def _network_of(self, model: PreTrainedModel) -> Forward:
        self._windows = None  # the model's own masks are those of a chain
        return OrdinaryTensors(model)

    def forward(
        self, tokens: Tensor, parents: Tensor | None = None, *, extend: bool = False, **options: Any
    ) -> LMOutput:
        """Run the model as `CachedLM.forward` does. Raises UserError for a tree that branches."""
        wanted = Wanted(**options)
        start = self._block_start if extend else self.length
        rows = self.length - start
        if parents is not None and parents.tolist() != [*range(rows - 1, rows - 1 + len(tokens))]:
            self._refuse("a draft of one path", "a tree. Set structure=chain")
        if wanted.logits in ("last", "none") and not (
            wanted.hidden and wanted.hidden_rows != "last"
        ):
            tokens = torch.cat([self._text[self._held : self.length].to(tokens), tokens])
            self.length = self._held
        output = super().forward(tokens, **options)
        self._block_start = start
        return output

    def forward_masked(self, *rows: Any, **options: Any) -> NoReturn:
        """Raise UserError: rows of one call that see different texts would need separate states."""
        self._refuse("rows of one text", f"drafts from many positions at once. {ALONE}")

    def held(self) -> NoReturn:
        """Raise UserError: labelling starts from many positions, which states do not allow."""
        self.forward_masked()

    def crop(self, length: int) -> None:
        """Forget every cached row from ``length`` on: return to the snapshot, or to the start."""
        assert 0 <= length <= self.length, f"cannot crop {self.length} cached rows to {length}"
        self.length, self._tree, self._stepping = length, None, False
        if length < self._held:
            if 0 < self._taken <= length:
                self._cache.restore(self._taken, self._snapshot)
            else:
                self._cache.reset()
                self._taken = 0
            self._held = self._taken

    def keep(self, start: int, rows: list[int]) -> None:
        """Keep rows as `CachedLM.keep` does; they must be a path."""
        assert rows == list(range(len(rows))), "a chain has one path"
        self.crop(start + len(rows))

    def take_over(self, text: Tensor, cache: StateCache) -> None:
        """Replace the cache by one that holds `text` [n], computed elsewhere."""
        self.crop(0)
        self._text, self._cache = text.clone(), cache
        self.length = self._held = len(text)

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor | None,
        wanted: Wanted,
        narrow: bool = False,
        chain: bool = True,
    ) -> LMOutput:
        """Run n rows of a chain; `visible` is ignored."""
        with self._clock, torch.no_grad():
            if self._held < self.length:  # kept text after the snapshot runs again
                missing = slice(self._held, self.length)
                text = self._text[missing].to(self.device)[None]
                rows = Rows(text, self._positions[None, missing])
                self.compute(rows, self._cache, (), "none")
                self._held = self.length
                self.forwards += 1
            if self._taken < self._held and not (self._stepping and len(tokens) == 1):
                self._snapshot, self._taken = self._cache.saved(), self._held
        self._text = written(self._text, self.length, tokens.cpu())
        output = super()._run(tokens, positions, None, wanted, narrow)
        self._held, self._stepping = self.length, len(tokens) == 1
        return output

    def _refuse(self, expected: str, got: str) -> NoReturn:
        raise UserError(
            f"pair: expected {expected}, for {type(self.model).__name__} keeps states of one text,"
            f" got {got}"
        )


class OrdinaryTensors(TransformersForward):
    """A `Forward` whose states are ordinary tensors: they are written in place, also outside of
    inference mode if the first call was inside."""

    def __call__(
        self, rows: Rows, cache: BufferCache, hidden: Sequence[int] = (), logits: RowsWanted = "all"
    ) -> Result:
        """See `Forward`."""
        with torch.inference_mode(False), torch.no_grad():
            return super().__call__(rows, cache, hidden, logits)
