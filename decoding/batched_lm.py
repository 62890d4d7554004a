"""Many sequences advanced together, one token each per call: how a harvest lets the models answer its prompts."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decoding.cached_lm import CachedLM, at_most_float32
from decoding.kv_cache import BufferCache, BufferLayer
from decoding.lm import LMOutput
from predictors.errors import UserError

TOGETHER = 512  # tokens of one forward of the prefill: more are no faster


class BatchedLM:
    """The model of a `CachedLM` with a cache of B sequences, padded on the left so that all end in the same column.

    A finished sequence is handed to the `CachedLM`, which goes on from its cached rows. Outputs arrive on that
    `CachedLM`'s `output_device`. Results equal those of one sequence up to rounding (about 1e-6 relative in float32).
    """

    def __init__(self, lm: CachedLM, sequences: Sequence[Tensor], room: int) -> None:
        """Run on `sequences` ([n_b] int64 each, n_b = 0 allowed); at most `room` tokens may follow."""
        if lm.reads_target:
            raise UserError(
                "pair.draft: a draft that reads its target's hidden states cannot be harvested yet. Use an ordinary one"
            )
        self._lm = lm
        self._cache = BufferCache()
        self._lengths = torch.tensor([len(sequence) for sequence in sequences])
        self._width = int(self._lengths.max())
        columns = torch.arange(self._width + room)
        self._real = (columns >= self._width - self._lengths[:, None]).to(lm.device)  # [B, width + room]
        if self._width:
            self._prefill(sequences)

    @torch.no_grad()
    def step(self, tokens: Tensor, hidden: bool = False) -> LMOutput:
        """Append tokens [B], one to each sequence. Returns logits [B, V], as narrow as the model gives them,
        and, if asked, hidden [n_layers + 1, B, H]."""
        positions = self._lengths[:, None]
        self._width += 1
        self._lengths = self._lengths + 1
        found, states = self._run(tokens[:, None], positions, self._real[:, None, : self._width], hidden)
        logits = self._lm.spread(found[:, -1], at_most_float32(found.dtype))
        if states is None:
            return LMOutput(logits, None)
        return LMOutput(logits, torch.stack([layer[:, 0] for layer in states]).to(self._lm.output_device))

    def keep(self, rows: Tensor) -> None:
        """Go on with these sequences only. rows: int64, indices into the batch."""
        for layer in self._cache.layers:
            layer.reorder_cache(torch.LongTensor(rows))
        self._lengths, self._real = self._lengths[rows], self._real[rows.to(self._real.device)]

    def hand_over(self, row: int) -> None:
        """Make the `CachedLM` hold the tokens of sequence `row` that were run so far."""
        columns = slice(self._width - int(self._lengths[row]), self._width)
        one = slice(row, row + 1)
        layers = self._cache.layers
        self._lm.load([(layer.keys[one, :, columns], layer.values[one, :, columns]) for layer in layers])

    @torch.no_grad()
    def _prefill(self, sequences: Sequence[Tensor]) -> None:
        """A few sequences of similar length at a time, padded on the right: that leaves attention plainly causal."""
        for rows in _groups([len(sequence) for sequence in sequences]):
            cache = BufferCache()
            tokens = pad_sequence([sequences[row] for row in rows], batch_first=True).to(self._lm.device)
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
            self._lm.network(tokens, positions, None, cache, logits="none")
            for index, layer in enumerate(cache.layers):
                self._take_over(rows, index, layer)

    def _take_over(self, rows: Sequence[int], index: int, layer: BufferLayer) -> None:
        """Copy the cached rows of some sequences into the batch, where all end in the same column."""
        if index == len(self._cache.layers):
            shape = len(self._lengths), layer.keys.shape[1], self._width
            keys, values = (states.new_zeros(*shape, states.shape[-1]) for states in (layer.keys, layer.values))
            self._cache.update(keys, values, index)
        ours = self._cache.layers[index]
        for place, row in enumerate(rows):
            length = int(self._lengths[row])
            columns = slice(self._width - length, self._width)
            ours.keys[row, :, columns] = layer.keys[place, :, :length]
            ours.values[row, :, columns] = layer.values[place, :, :length]

    def _run(
        self, tokens: Tensor, positions: Tensor, visible: Tensor, hidden: bool
    ) -> tuple[Tensor, Sequence[Tensor] | None]:
        mask = torch.zeros(visible.shape, dtype=self._lm.model.dtype, device=visible.device)
        mask = mask.masked_fill_(~visible, torch.finfo(mask.dtype).min)[:, None]
        tokens, positions = tokens.to(self._lm.device), positions.to(self._lm.device)
        return self._lm.network(tokens, positions, mask, self._cache, hidden, "last")


def _groups(lengths: Sequence[int]) -> list[list[int]]:
    """Which sequences to run together, shortest first: with padding at most `TOGETHER` tokens, unless one is longer."""
    groups: list[list[int]] = [[]]
    for row in sorted((row for row, length in enumerate(lengths) if length), key=lambda row: lengths[row]):
        if groups[-1] and lengths[row] * (len(groups[-1]) + 1) > TOGETHER:
            groups.append([])
        groups[-1].append(row)
    return groups
