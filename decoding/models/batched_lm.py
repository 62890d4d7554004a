"""Many sequences advanced together, one token each per call: how a harvest lets the models answer
its prompts."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decoding.interfaces import LMOutput
from decoding.models.cached_lm import CachedLM
from decoding.models.forward import Rows, at_most_float32
from decoding.models.kv_cache import BufferCache, BufferLayer

TOGETHER = 512  # tokens of one forward of the prefill: more are no faster


class BatchedLM:
    """The model of a `CachedLM` with a cache of B sequences, padded on the left so that all end in
    the same column.

    A finished sequence is handed to the `CachedLM`, which goes on from its cached rows. Outputs
    arrive on that `CachedLM`'s `output_device`. Results equal those of one sequence up to rounding
    (about 1e-6 relative in float32)."""

    def __init__(
        self,
        lm: CachedLM,
        sequences: Sequence[Tensor],
        room: int,
        target: "BatchedLM | None" = None,
    ) -> None:
        """Run on `sequences` ([n_b] int64 each, n_b = 0 allowed); at most `room` tokens may follow.

        target: the target's batch of the same sequences, which an EAGLE-style draft reads. It is
        advanced first, by the same tokens, and loses the same sequences."""
        self._lm = lm
        self._lengths = torch.tensor([len(sequence) for sequence in sequences])
        self._width = int(self._lengths.max())
        lm.check_context(self._width)
        self._cache = BufferCache(self._width + room)
        columns = torch.arange(self._width + room)
        self._real = (columns >= self._width - self._lengths[:, None]).to(
            lm.device
        )  # [B, width + room]
        self._target = target
        self._before = torch.zeros(
            0
        )  # [B, width + room + 1, L + 1, H], what `lm` records of the token before a column
        if self._width:
            self._prefill(sequences)

    @torch.no_grad()
    def step(self, tokens: Tensor, hidden: Sequence[int] = ()) -> LMOutput:
        """Append tokens [B], one to each sequence. Returns logits [B, V], as narrow as the model
        gives them, and the hidden states [len(hidden), B, H] of the layers asked for."""
        self._lm.check_context(int(self._lengths.max()) + 1)
        count, last = len(tokens), slice(self._width, self._width + 1)
        positions, added = self._lengths[:, None], self._added(range(count), [last] * count)
        self._width += 1
        self._lengths = self._lengths + 1
        found, states, recorded = self._run(
            tokens[:, None], positions, self._real[:, None, : self._width], hidden, added
        )
        if recorded is not None:
            self._grown(recorded)[:, self._width] = recorded[:, 0]
        logits = self._lm.spread(found[:, -1], at_most_float32(found.dtype))
        if not states:
            return LMOutput(logits, None)
        return LMOutput(
            logits, torch.stack([layer[:, 0] for layer in states]).to(self._lm.output_device)
        )

    def keep(self, rows: Tensor) -> None:
        """Go on with these sequences only. rows: int64, indices into the batch."""
        for layer in self._cache.layers:
            layer.reorder_cache(torch.LongTensor(rows))
        self._lengths, self._real = self._lengths[rows], self._real[rows.to(self._real.device)]
        if len(self._before):
            self._before = self._before[rows.to(self._before.device)]

    def hand_over(self, row: int) -> None:
        """Make the `CachedLM` hold the tokens of sequence `row` that were run so far."""
        columns, one = self._columns(row), slice(row, row + 1)
        cached = [
            (layer.keys[one, :, columns], layer.values[one, :, columns])
            for layer in self._cache.layers
        ]
        self._lm.load(cached, self._before[row, 1:][columns] if len(self._before) else None)

    @torch.no_grad()
    def _prefill(self, sequences: Sequence[Tensor]) -> None:
        """A few sequences of similar length at a time, padded on the right: that leaves attention
        plainly causal."""
        for rows in _groups([len(sequence) for sequence in sequences]):
            cache = BufferCache()
            tokens = pad_sequence([sequences[row] for row in rows], batch_first=True).to(
                self._lm.device
            )
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
            added = self._added(rows, [self._columns(row) for row in rows])
            rows_run = Rows(tokens, positions, None, added)
            *_, recorded = self._lm.compute(rows_run, cache, (), "none")
            for index, layer in enumerate(cache.layers):
                self._take_over(rows, index, layer)
            if recorded is not None:
                for place, row in enumerate(rows):
                    columns = self._columns(row)
                    self._grown(recorded)[row, 1:][columns] = recorded[
                        place, : columns.stop - columns.start
                    ]

    def _take_over(self, rows: Sequence[int], index: int, layer: BufferLayer) -> None:
        """Copy the cached rows of some sequences into the batch, where all end in the same
        column."""
        if index == len(self._cache.layers):
            shape = len(self._lengths), layer.keys.shape[1], self._width
            keys, values = (
                states.new_zeros(*shape, states.shape[-1]) for states in (layer.keys, layer.values)
            )
            self._cache.update(keys, values, index)
        ours = self._cache.layers[index]
        for place, row in enumerate(rows):
            length, columns = int(self._lengths[row]), self._columns(row)
            ours.keys[row, :, columns] = layer.keys[place, :, :length]
            ours.values[row, :, columns] = layer.values[place, :, :length]

    def _columns(self, row: int) -> slice:
        """Where the tokens of a sequence are cached."""
        return slice(self._width - int(self._lengths[row]), self._width)

    def _grown(self, recorded: Tensor) -> Tensor:
        """`self._before`, allocated to hold what looks like `recorded` [b, n, L + 1, H]."""
        if not len(self._before):
            self._before = recorded.new_zeros(
                len(self._real), self._real.shape[1] + 1, *recorded.shape[2:]
            )
        return self._before

    def _added(self, rows: Sequence[int], columns: Sequence[slice]) -> Tensor | None:
        """[b, n, H], padded on the right, for the tokens in these columns of each of these
        sequences: what a draft adds that reads the target's states of the tokens before."""
        if not self._lm.reads_target:
            return None
        assert self._target is not None, "a draft that reads states needs the batch of its target"
        taken = [self._target._before[row, some] for row, some in zip(rows, columns, strict=True)]
        return self._lm.of_target(pad_sequence(taken, batch_first=True))

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor,
        hidden: Sequence[int],
        added: Tensor | None,
    ) -> tuple[Tensor, Sequence[Tensor], Tensor | None]:
        mask = torch.zeros(visible.shape, dtype=self._lm.model.dtype, device=visible.device)
        mask = mask.masked_fill_(~visible, torch.finfo(mask.dtype).min)[:, None]
        tokens, positions = tokens.to(self._lm.device), positions.to(self._lm.device)
        return self._lm.compute(Rows(tokens, positions, mask, added), self._cache, hidden, "last")


def _groups(lengths: Sequence[int]) -> list[list[int]]:
    """Which sequences to run together, shortest first: with padding at most `TOGETHER` tokens,
    unless one is longer."""
    groups: list[list[int]] = [[]]
    for row in sorted(
        (row for row, length in enumerate(lengths) if length), key=lambda row: lengths[row]
    ):
        if groups[-1] and lengths[row] * (len(groups[-1]) + 1) > TOGETHER:
            groups.append([])
        groups[-1].append(row)
    return groups
