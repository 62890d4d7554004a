"""An EAGLE-style draft that reads its target's hidden states: besides its token, each row gets what
the target made of the text before.

After Li et al. 2024 (EAGLE, 2401.15077) and 2025 (EAGLE-3, 2503.01840). The row of the token at
position t gets that token's embedding plus a linear map of the target's hidden states at t - 1,
which the target computed when it verified the tokens up to there. Where it has not (from the second
token of a draft on), another map of the draft's own last hidden state at t - 1 stands in for them.
Everything after that is an ordinary draft: its layers, the target's output layer. q is the
distribution the tokens are drawn from, so every verification rule is as exact as with any draft.

How we differ: the draft need not have a single layer; the maps are added to the embedding instead
of joined with it, so that training can start from an ordinary draft (maps of zeros); rows of
accepted tokens are computed anew from the target's states as soon as there are some, as in EAGLE.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from decoding.interfaces import LMOutput, RowsWanted
from decoding.models.cached_lm import CachedLM
from runtime.errors import UserError

MAPS = ("from_states", "from_own")
FILE = (  # beside the draft's weights: what makes it a draft that reads along
    "target_features.safetensors"
)


@dataclass(frozen=True)
class FeatureMaps:
    """What is added to the embeddings.

    layers: the target's hidden states that are read besides the last one (0: embeddings, i: after
    layer i)
    from_states: [H, (L + 1) * H_target], of the target's states, each divided by its root mean
    square
    from_own: [H, H], of the draft's last hidden state
    """

    layers: tuple[int, ...]
    from_states: Tensor
    from_own: Tensor

    def of_target(self, states: Tensor) -> Tensor:
        """[..., H] from the target's states [..., L + 1, H_target]; zeros for zeros, which stand
        for no state."""
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        scaled = F.rms_norm(wide, states.shape[-1:], eps=EPS).to(self.from_states)
        return F.linear(scaled.flatten(-2), self.from_states)

    def of_own(self, hidden: Tensor) -> Tensor:
        """[n, H] from the draft's last hidden states [n, H]."""
        return F.linear(hidden.to(self.from_own), self.from_own)


EPS = 1e-5


def read_maps(folder: Path, like: PreTrainedModel, target: PreTrainedModel) -> FeatureMaps | None:
    """The maps in the folder of a draft, in its dtype and on its device; None for an ordinary
    draft.

    Raises UserError where the file is damaged or does not fit these models.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            layers = tuple(json.loads(file.metadata()["layers"]))
            from_states, from_own = file.get_tensor("from_states"), file.get_tensor("from_own")
    except (SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"pair.draft: {path} is damaged ({error}). Train it: python scripts/distill_draft.py"
            " draft=eagle"
        ) from error
    width, source = like.config.hidden_size, target.config.hidden_size
    wanted = {(width, (len(layers) + 1) * source), (width, width)}
    known = range(target.config.num_hidden_layers + 1)
    if {tuple(from_states.shape), tuple(from_own.shape)} != wanted or not all(
        layer in known for layer in layers
    ):
        raise UserError(
            f"pair.draft: {path} reads states of another target than pair.target. Train one for it:"
            " python scripts/distill_draft.py draft=eagle"
        )
    return FeatureMaps(
        layers, from_states.to(like.device, like.dtype), from_own.to(like.device, like.dtype)
    )


class EagleDraft(CachedLM):
    """A `CachedLM` that must be run after its target: see `forward`."""

    reads_target = True

    def __init__(
        self,
        model: PreTrainedModel,
        target: CachedLM,
        maps: FeatureMaps,
        *,
        vocab_size: int | None = None,
        max_length: int | None = None,
        vocabulary: Tensor | None = None,
    ) -> None:
        """target: records the states the maps read from now on (`CachedLM.record`)."""
        super().__init__(model, vocab_size=vocab_size, max_length=max_length, vocabulary=vocabulary)
        self.maps = maps
        self._target = target
        target.record(maps.layers)
        self.record([])  # its own last hidden states

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
        """As `CachedLM.forward`. A row whose predecessor is in the target's cache reads the
        target's states there; the predecessor of any other row must have been run in an earlier
        call."""
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
        """As `CachedLM.forward_masked`, of drafted tokens: each row reads the draft's own state at
        the last cached row that it sees, whatever the target has seen by now. Of the rows of the
        call it sees only itself."""
        assert torch.equal(visible[:, self.length :], torch.eye(len(tokens)).bool()), (
            "drafted tokens come one by one"
        )
        before = torch.where(visible[:, : self.length], torch.arange(self.length), -1).amax(1)
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
            return self.maps.from_own.new_zeros(1, len(before), len(self.maps.from_own))
        if all(row < verified for row in before):
            return self.maps.of_target(self._target.states[before])[None]
        assert all(verified <= row < self.length for row in before), (
            "drafted rows come after those before them"
        )
        return self.maps.of_own(self.states[before, 0])[None]
