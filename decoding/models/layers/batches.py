"""Many texts advanced together by a model that keeps states, for which padding is text: one after
another."""

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor

from decoding.interfaces import LMOutput
from decoding.models.batched_lm import BatchedLM
from decoding.models.cached_lm import CachedLM
from decoding.models.forward import Rows, at_most_float32
from decoding.models.layers.recurrent import RecurrentLM
from decoding.models.layers.states import StateCache
from runtime.errors import UserError


def batch_of(
    lm: CachedLM, sequences: Sequence[Tensor], room: int, target: "Batch | None" = None
) -> "Batch":
    """Return a `BatchedLM`, with one call for all sequences where the model allows it.

    Raises UserError for a draft that reads states of a target that does not."""
    if isinstance(lm, RecurrentLM):
        return OneByOneLM(lm, sequences)
    if isinstance(target, BatchedLM) or not lm.reads_target:
        return BatchedLM(lm, sequences, room, target if isinstance(target, BatchedLM) else None)
    raise UserError(
        "pair.draft: expected one that reads no states of its target, for a harvest from a target"
        " with recurrent layers, got one that does. Choose another draft"
    )


class OneByOneLM:
    """What a `BatchedLM` offers, with one call for each sequence."""

    def __init__(self, lm: RecurrentLM, sequences: Sequence[Tensor]) -> None:
        self._lm = lm
        self._texts = [sequence[:0] for sequence in sequences]
        self._caches = [StateCache(lm.model.config.get_text_config()) for _ in sequences]
        for row, sequence in enumerate(sequences):
            if len(sequence):
                self._run(row, sequence, ())

    def step(self, tokens: Tensor, hidden: Sequence[int] = ()) -> LMOutput:
        """See `BatchedLM.step`."""
        logits, states = zip(
            *(self._run(row, token, hidden) for row, token in enumerate(tokens.split(1))),
            strict=True,
        )
        found = torch.cat(logits)
        return LMOutput(
            self._lm.spread(found, at_most_float32(found.dtype)),
            torch.cat(states, 1).to(self._lm.output_device) if hidden else None,
        )

    def keep(self, rows: Tensor) -> None:
        """Go on with these sequences only. rows: int64, indices into the batch."""
        self._texts = [self._texts[row] for row in rows.tolist()]
        self._caches = [self._caches[row] for row in rows.tolist()]

    def hand_over(self, row: int) -> None:
        """Make the `RecurrentLM` hold the tokens of sequence `row` that were run so far."""
        with torch.inference_mode(False):
            self._lm.take_over(self._texts[row], deepcopy(self._caches[row]))

    @torch.no_grad()
    def _run(self, row: int, tokens: Tensor, hidden: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Append tokens [n] to a sequence. Returns logits [1, V] of the last, and [L, 1, H]."""
        text = torch.cat([self._texts[row], tokens.cpu()])
        positions = torch.arange(len(text) - len(tokens), len(text), device=self._lm.device)
        rows = Rows(tokens.to(self._lm.device)[None], positions[None])
        found, states, _ = self._lm.compute(rows, self._caches[row], hidden, "last")
        self._texts[row] = text
        last = [state[:, -1] for state in states]
        return found[:, -1], torch.stack(last) if last else found[:0]


Batch = BatchedLM | OneByOneLM
