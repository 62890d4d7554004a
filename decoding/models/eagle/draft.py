"""Drafts that read their target's hidden states: each row gets, besides its token, the target's
states of the text before it.

The row of the token at position t gets the target's hidden states at t - 1, which the target
computed when it verified the tokens up to there. Where it has not (from the second token of a draft
on), the draft's own hidden state at t - 1 replaces them. q is the distribution the tokens are drawn
from, so every verification rule is as exact as with any draft. Rows of accepted tokens are
recomputed from the target's states as soon as these exist, as in EAGLE (Li et al. 2024, 2401.15077;
EAGLE-3: 2025, 2503.01840).

Our own kind (`FeatureMaps`) is an ordinary draft with a vector added to each token's embedding: a
linear map of those states. Unlike EAGLE's it may have several layers, and the maps are added to the
embedding instead of joined with it, so that training can start from an ordinary draft (maps of
zeros)."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from decoding.interfaces import LMOutput, RowsWanted
from decoding.models.cached_lm import CachedLM
from decoding.models.draft_model import beside
from decoding.models.kv_cache import written
from decoding.models.native import Linear
from decoding.together import at_once
from runtime.errors import UserError

MAPS = ("from_states", "from_own")
FILE = "target_features.safetensors"  # beside a draft; makes it one that reads the target's states
EPS = 1e-5
Rows = list[int] | slice


class Reader(Protocol):
    """Maps hidden states to the draft's inputs: a `FeatureMaps`, or a `Fusion`.

    layers: the target's hidden states that are read besides the last one (0: embeddings, i: after
        layer i)
    described: the part of a fingerprint besides `tensors`
    tensors: weights that do not belong to the draft model"""

    @property
    def layers(self) -> Sequence[int]: ...

    @property
    def described(self) -> str: ...

    @property
    def tensors(self) -> Sequence[Tensor]: ...

    def of_target(self, states: Tensor) -> Tensor:
        """Return [..., H] from the target's states [..., L + 1, H_target]; zeros for zeros, which
        stand for no state."""
        ...

    def of_own(self, hidden: Tensor) -> Tensor:
        """Return [n, H] from the draft's own last hidden states [n, H]."""
        ...


@dataclass(frozen=True)
class FeatureMaps:
    """A `Reader` whose outputs are added to the embeddings.

    from_states: [H, (L + 1) * H_target], map of the target's states, each divided by its root mean
    square
    from_own: [H, H], map of the draft's last hidden state
    """

    layers: tuple[int, ...]
    from_states: Tensor
    from_own: Tensor

    @property
    def described(self) -> str:
        return json.dumps(self.layers)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.from_states, self.from_own

    @cached_property
    def _products(self) -> list[Linear]:
        return [Linear(tensor) for tensor in self.tensors]

    def of_target(self, states: Tensor) -> Tensor:
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        scaled = F.rms_norm(wide, states.shape[-1:], eps=EPS).to(self.from_states)
        return self._products[0](scaled.flatten(-2))

    def of_own(self, hidden: Tensor) -> Tensor:
        return self._products[1](hidden.to(self.from_own))


class GivenStates:
    """The states of a target that runs in another engine, which hands them over.

    length: tokens it has verified; states: [positions, K, H], as they were given; columns: those
    among the K that a draft has asked for, in the order of `CachedLM.record`; layers: of all but
    the last of these"""

    def __init__(self, columns: Sequence[int] = ()) -> None:
        self.columns, self.layers = list(columns), list[int]()
        self.reset()

    def reset(self) -> None:
        self.length, self.states = 0, torch.zeros(0)

    def record(self, layers: Sequence[int]) -> None:
        self.layers = list(layers)

    def write(self, start: int, states: Tensor) -> None:
        """Keep the states [n, K, H] of the tokens from `start` on. Of those before that were not
        given, zeros stand for them."""
        self.states = written(self.states, start, states)

    def recorded(self, rows: Rows) -> Tensor:
        """Return the states [n, L + 1, H] at these positions."""
        return self.states[rows][:, self.columns]


def read_maps(folder: Path, like: PreTrainedModel, target: PreTrainedConfig) -> FeatureMaps | None:
    """Return the maps in the folder of a draft, in its dtype and on its device; None for an
    ordinary draft. target: the configuration of its target.

    Raises UserError if the file is damaged or does not fit these models.
    """
    path = beside(folder, FILE)
    if path is None:
        return None
    try:
        with safe_open(path, "pt") as file:
            layers = tuple(json.loads(file.metadata()["layers"]))
            maps = [file.get_tensor(name) for name in MAPS]
    except (SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"pair.draft: {path} is damaged ({error}). Train it: python pairs/distill_draft.py"
            " draft=eagle"
        ) from error
    width, source = like.config.hidden_size, target.hidden_size
    wanted = {(width, (len(layers) + 1) * source), (width, width)}
    fitting = set(layers) <= set(range(target.num_hidden_layers + 1))
    if {tuple(x.shape) for x in maps} != wanted or not fitting:
        raise UserError(
            f"pair.draft: {path} reads states of another target than pair.target. Train one for it:"
            " python pairs/distill_draft.py draft=eagle"
        )
    return FeatureMaps(layers, *(x.to(like.device, like.dtype) for x in maps))


class EagleDraft(CachedLM):
    """A `CachedLM` that must be run after its target: see `forward`."""

    reads_target = True

    def __init__(
        self, model: PreTrainedModel, target: CachedLM | GivenStates, maps: Reader, **options: Any
    ) -> None:
        """target: made to record the states that the maps read (`CachedLM.record`); options: those
        of `CachedLM`."""
        super().__init__(model, **options)
        self.maps, self._target = maps, target
        target.record(maps.layers)
        self.record([])  # its own last hidden states

    def fresh(self, target: Any = None) -> Self:
        """See `CachedLM.fresh`."""
        other = super().fresh(target)
        other._target = target or self._target
        other._target.record(self.maps.layers)
        return other

    def forward(
        self, tokens: Tensor, parents: Tensor | None = None, *, extend: bool = False, **wanted: Any
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
        return super().forward(tokens, parents, extend=extend, **wanted)

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
        state at the last cached row that it sees, whatever the target has verified by now. Among
        the rows of the call it sees only itself."""
        itself = visible[:, self.length :]
        assert itself.device.type != "cpu" or torch.equal(itself, torch.eye(len(tokens)).bool()), (
            "drafted tokens come one by one"
        )
        rows = torch.arange(self.length, device=itself.device)
        before = torch.where(visible[:, : self.length], rows, -1).amax(1)
        self._added = self._of_own(before)
        return super().forward_masked(tokens, positions, visible, hidden=hidden, logits=logits)

    def of_target(self, states: Tensor) -> Tensor:
        """See `CachedLM.of_target`."""
        return self._joined(states, self.maps.of_target)

    def _of_own(self, rows: Any) -> Tensor:
        """Return [1, n, H] from its own states at n cached rows."""
        return self._joined(self.states[rows, 0], self.maps.of_own)[None]

    def _joined(self, states: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what `run` makes of states, together with those of other requests where that
        changes no bit."""
        return at_once(states, (run.__name__, id(self.maps)), run) if self.exact else run(states)

    def keep(self, start: int, rows: list[int]) -> None:
        """Drop every row from `start` on: those of accepted tokens are run again, with the target's
        states."""
        self.crop(start)

    def _after(self, before: list[int]) -> Tensor:
        """Return the added vectors [1, n, H] of rows that follow the cached rows `before` [n]; -1:
        the first row of the text."""
        verified, first = self._target.length, before[0]
        chain = len(before) > 1 and before == list(range(first, first + len(before)))
        if chain and before[-1] < verified:  # tokens the target has seen, one after another
            states = self._target.recorded(slice(max(first, 0), first + len(before)))
            added = self.of_target(states)
            return F.pad(added, (0, 0, len(before) - len(added), 0))[None]
        if first < 0:
            width = self.model.config.get_text_config().hidden_size
            return torch.zeros(1, len(before), width, dtype=self.model.dtype, device=self.device)
        if all(row < verified for row in before):
            return self.of_target(self._target.recorded(before))[None]
        assert all(verified <= row < self.length for row in before), (
            "drafted rows come after those before them"
        )
        return self._of_own(before)
