"""A draft that reads its target's hidden states: besides its token, each row gets what the target
made of the text before.

The row of the token at position t gets the target's hidden states at t - 1, which the target
computed when it verified the tokens up to there. Where it has not (from the second token of a draft
on), the draft's own hidden state at t - 1 stands in for them. q is the distribution the tokens are
drawn from, so every verification rule is as exact as with any draft. Rows of accepted tokens are
computed anew from the target's states as soon as there are some, as in EAGLE (2401.15077)."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from decoding.interfaces import LMOutput, RowsWanted
from decoding.models.cached_lm import CachedLM


class Reader(Protocol):
    """What a draft makes of hidden states before it reads them: a `FeatureMaps`, or a `Fusion`."""

    @property
    def layers(self) -> Sequence[int]:
        """The target's hidden states that are read besides the last one (0: embeddings, i: after
        layer i)."""
        ...

    @property
    def described(self) -> str:
        """What a fingerprint says besides `tensors`."""
        ...

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Weights that are not the draft model's own."""
        ...

    def of_target(self, states: Tensor) -> Tensor:
        """[..., H] from the target's states [..., L + 1, H_target]; zeros for zeros, which stand
        for no state."""
        ...

    def of_own(self, hidden: Tensor) -> Tensor:
        """[n, H] from the draft's own states [n, H]."""
        ...


class EagleDraft(CachedLM):
    """A `CachedLM` that must be run after its target: see `forward`."""

    reads_target = True

    def __init__(
        self,
        model: PreTrainedModel,
        target: CachedLM,
        maps: Reader,
        *,
        vocab_size: int | None = None,
        max_length: int | None = None,
        vocabulary: Tensor | None = None,
        joins: bool = True,
    ) -> None:
        """target: records the states the maps read from now on (`CachedLM.record`)."""
        super().__init__(
            model, vocab_size=vocab_size, max_length=max_length, vocabulary=vocabulary, joins=joins
        )
        self.maps = maps
        self._target = target
        target.record(maps.layers)
        self.record([])  # its own last hidden states
        self._width: int = model.config.get_text_config().hidden_size

    def fresh(self, target: CachedLM | None = None) -> "EagleDraft":
        """See `CachedLM.fresh`."""
        found = super().fresh(target)
        found._target = target or self._target
        found._target.record(self.maps.layers)
        return found

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
        """Run the draft as `CachedLM.forward` does. A row whose predecessor is in the target's
        cache reads the target's states there; the predecessor of any other row must have been run
        in an earlier call."""
        if parents is None:
            before = list(range(self.length - 1, self.length + len(tokens) - 1))
        else:
            start = self._block_start if extend else self.length
            before = [start + parent for parent in parents.tolist()]
        self._added = self._after(before)
        return super().forward(
            tokens, parents, extend=extend, hidden=hidden, hidden_rows=hidden_rows, logits=logits
        )

    def forward_masked(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor,
        *,
        hidden: Sequence[int] = (),
        logits: RowsWanted = "all",
    ) -> LMOutput:
        """Run drafted tokens as `CachedLM.forward_masked` does: each row reads the draft's own
        state at the last cached row that it sees, whatever the target has seen by now. Of the rows
        of the call it sees only itself."""
        here = visible[:, self.length :]
        assert here.device.type != "cpu" or torch.equal(here, torch.eye(len(tokens)).bool()), (
            "drafted tokens come one by one"
        )
        rows = torch.arange(self.length, device=here.device)
        before = torch.where(visible[:, : self.length], rows, -1).amax(1)
        self._added = self.maps.of_own(self.states[before, 0])[None]
        return super().forward_masked(tokens, positions, visible, hidden=hidden, logits=logits)

    def of_target(self, states: Tensor) -> Tensor:
        """See `CachedLM.of_target`."""
        return self.maps.of_target(states)

    def keep(self, start: int, rows: list[int]) -> None:
        """Drop every row from `start` on: those of accepted tokens are run again, with what the
        target says there."""
        self.crop(start)

    def _after(self, before: list[int]) -> Tensor:
        """[1, n, H] for rows that come after the cached rows `before` [n]; -1: it is the first of
        all."""
        verified, first = self._target.length, before[0]
        chain = len(before) > 1 and before == list(range(first, first + len(before)))
        if chain and before[-1] < verified:  # tokens the target has seen, one after another
            states = self._target.states[max(first, 0) : first + len(before)]
            added = self.maps.of_target(states)
            return F.pad(added, (0, 0, len(before) - len(added), 0))[None]
        if first < 0:
            return self._nothing(len(before))
        if all(row < verified for row in before):
            return self.maps.of_target(self._target.states[before])[None]
        assert all(verified <= row < self.length for row in before), (
            "drafted rows come after those before them"
        )
        return self.maps.of_own(self.states[before, 0])[None]

    def _nothing(self, rows: int) -> Tensor:
        """[1, rows, H] for rows before which there is no state."""
        return torch.zeros(1, rows, self._width, dtype=self.model.dtype, device=self.device)
