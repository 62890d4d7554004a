"""A causal model whose layers keep states besides keys and values: `CachedLM` with a snapshot.

The states after a text cannot be cut back to fewer tokens. So they are copied before a call that
may be rolled back; a rollback takes the copy, and the tokens between it and the end of what is kept
run again, in the next call where only its last row is wanted, in one of their own otherwise."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoding.interfaces import LMOutput, RowsWanted, Wanted
from decoding.models.cached_lm import CachedLM
from decoding.models.forward import Forward, Rows, TransformersForward
from decoding.models.kv_cache import BufferCache, BufferLayer, written
from decoding.models.layers.states import State, StateCache, keeps_states
from runtime.errors import UserError


def cached(model: PreTrainedModel, **options: Any) -> CachedLM:
    """The model with the cache it needs. options: of `CachedLM`."""
    return (RecurrentLM if keeps_states(model) else CachedLM)(model, **options)


def refuse_recurrent(key: str, lm: object, got: str) -> None:
    """Raises UserError for a model that keeps states. got: what it would have to run, and a
    remedy."""
    if isinstance(lm, RecurrentLM):
        name = type(lm.model).__name__
        raise UserError(
            f"{key}: expected one path of one text, of which {name} keeps states, got {got}"
        )


ALONE = "Harvest with warp=greedy, and with such a model as pair.target alone"


class RecurrentLM(CachedLM):
    """One text, one path. A rollback to a place before the snapshot runs the text from its
    beginning.

    The snapshot is taken before a call, unless the call and the one before it are of one row and
    nothing was rolled back between them: a draft's tokens, drawn one by one, share the snapshot at
    the last committed one."""

    _cache: StateCache

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        super().__init__(model, **options)
        self._begin()

    def _begin(self) -> None:
        self._text = torch.zeros(0, dtype=torch.long)  # the first `length` are cached or to be so
        self._held = 0  # rows that are cached
        self._snapshot: list[State] = []
        self._taken = 0  # after so many rows
        self._stepping = False  # the last call was of one row, and all it added is kept

    def fresh(self, target: CachedLM | None = None) -> "RecurrentLM":
        """See `CachedLM.fresh`."""
        found = super().fresh(target)
        found._begin()
        return found

    def _empty_cache(self) -> StateCache:
        return StateCache(self.model.config.get_text_config())

    def _network_of(self, model: PreTrainedModel) -> Forward:
        self._windows = None  # the model's own masks are those of a chain
        return OrdinaryTensors(model)

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
        """Run the model as `CachedLM.forward` does. Raises UserError for a tree that branches."""
        start = self._block_start if extend else self.length
        known = self.length - start
        if parents is not None and parents.tolist() != [*range(known - 1, known - 1 + len(tokens))]:
            self._refuse("a draft of one path", "a tree. Set structure=chain")
        if logits in ("last", "none") and (not hidden or hidden_rows == "last"):
            tokens = torch.cat([self._text[self._held : self.length].to(tokens), tokens])
            self.length = self._held
        output = super().forward(tokens, hidden=hidden, hidden_rows=hidden_rows, logits=logits)
        self._block_start = start
        return output

    def forward_masked(self, *rows: Any, **wanted: Any) -> NoReturn:
        """Raises UserError: rows of one call that see different texts need states of their own."""
        self._refuse("rows of one text", f"drafts from many positions at once. {ALONE}")

    def held(self) -> NoReturn:
        """Raises UserError: what is held to be labelled is labelled from many positions."""
        self._refuse("rows of one text", f"drafts from many positions at once. {ALONE}")

    def crop(self, length: int) -> None:
        """Forget every cached row from ``length`` on."""
        assert 0 <= length <= self.length, f"cannot crop {self.length} cached rows to {length}"
        self.length, self._tree, self._stepping = length, None, False
        if length < self._held:
            self._go_back()

    def keep(self, start: int, rows: list[int]) -> None:
        """Keep rows as `CachedLM.keep` does, of a path that is all there is."""
        assert rows == list(range(len(rows))), "a chain has one path"
        self.crop(start + len(rows))

    @property
    def row_bytes(self) -> int:
        """Keys and values of one cached row, all layers."""
        return sum(
            part[:, :, 0].nbytes
            for layer in self._cache.layers
            if isinstance(layer, BufferLayer)
            for part in (layer.keys, layer.values)
        )

    def take_over(self, text: Tensor, cache: StateCache) -> None:
        """Replace the cache by one that holds `text` [n], computed elsewhere."""
        self.crop(0)
        self._text, self._cache = text.clone(), cache
        self.length = self._held = len(text)

    def _go_back(self) -> None:
        """To the snapshot, or to the beginning."""
        if 0 < self._taken <= self.length:
            self._cache.restore(self._taken, self._snapshot)
        else:
            self._cache.reset()
            self._taken = 0
        self._held = self._taken

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor | None,
        wanted: Wanted,
        narrow: bool = False,
    ) -> LMOutput:
        """visible: of no account, a chain is what the model sees by itself."""
        with self._clock:
            if self._held < self.length:
                self._catch_up()
            if self._taken < self._held and not (self._stepping and len(tokens) == 1):
                self._snapshot, self._taken = self._cache.saved(), self._held
        self._text = written(self._text, self.length, tokens.cpu())
        output = super()._run(tokens, positions, None, wanted, narrow)
        self._held, self._stepping = self.length, len(tokens) == 1
        return output

    @torch.no_grad()
    def _catch_up(self) -> None:
        """Run what is kept of the text behind the snapshot again."""
        missing = slice(self._held, self.length)
        rows = Rows(self._text[missing].to(self.device)[None], self._positions[None, missing])
        self.compute(rows, self._cache, (), "none")
        self._held = self.length
        self.forwards += 1

    def _refuse(self, expected: str, got: str) -> NoReturn:
        raise UserError(
            f"pair: expected {expected}, for {type(self.model).__name__} keeps states of one text,"
            f" got {got}"
        )


class OrdinaryTensors(TransformersForward):
    """The model's states are written in place: also outside of inference mode, should the first
    call be inside."""

    def __call__(
        self, rows: Rows, cache: BufferCache, hidden: Sequence[int] = (), logits: RowsWanted = "all"
    ) -> tuple[Tensor, list[Tensor]]:
        """See `Forward`."""
        with torch.inference_mode(False), torch.no_grad():
            return super().__call__(rows, cache, hidden, logits)
