"""Many sequences advanced together, one token each per call, with which a harvest samples
responses."""

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decoding.interfaces import LMOutput
from decoding.models.cached_lm import CachedLM
from decoding.models.forward import Rows, at_most_float32
from decoding.models.kv_cache import BufferCache
from decoding.models.recurrent import RecurrentLM, StateCache
from runtime.errors import UserError

TOGETHER = 512  # tokens of one forward of the prefill; more are not faster


class BatchedLM:
    """The model of a `CachedLM` with a cache of B sequences, padded on the left so that all end in
    the same column.

    A finished sequence is handed to the `CachedLM`, which goes on from its cached rows. Outputs
    arrive on that `CachedLM`'s `output_device`. Results equal those of one sequence, up to
    rounding (about 1e-6 relative in float32) where no `NativeLlama` computes them."""

    def __init__(
        self,
        lm: CachedLM,
        sequences: Sequence[Tensor],
        more: int,
        target: "BatchedLM | None" = None,
    ) -> None:
        """Run on `sequences` ([n_b] int64 each, n_b = 0 allowed); at most `more` tokens may follow.

        target: the target's batch of the same sequences, which an EAGLE-style draft reads. It is
        advanced first, by the same tokens, and loses the same sequences."""
        self._lm, self._target = lm, target
        self._lengths = torch.tensor([len(sequence) for sequence in sequences])
        self._width = int(self._lengths.max())
        lm.check_context(self._width)
        self._cache = BufferCache(self._width + more)
        columns = torch.arange(self._width + more)
        self._real = columns >= self._width - self._lengths[:, None]  # [B, width + more]
        self._real = self._real.to(lm.device)
        # [B, width + more + 1, L + 1, H], what `lm` records of the token before a column
        self._before = torch.zeros(0)
        if self._width:
            self._prefill(sequences)

    @torch.no_grad()
    def step(self, tokens: Tensor, hidden: Sequence[int] = ()) -> LMOutput:
        """Append tokens [B], one to each sequence. Returns logits [B, V], as narrow as the model
        gives them, and the hidden states [len(hidden), B, H] of the layers asked for."""
        lm = self._lm
        lm.check_context(int(self._lengths.max()) + 1)
        count, last = len(tokens), slice(self._width, self._width + 1)
        added = self._added(range(count), [last] * count)
        self._width += 1
        visible = self._real[:, None, : self._width]
        mask = torch.zeros(visible.shape, dtype=lm.model.dtype, device=visible.device)
        mask = mask.masked_fill_(~visible, torch.finfo(mask.dtype).min)[:, None]
        positions = self._lengths[:, None].to(lm.device)
        rows = Rows(tokens[:, None].to(lm.device), positions, mask, added)
        self._lengths = self._lengths + 1
        logits, states, recorded = lm.compute(rows, self._cache, hidden, "last")
        if recorded is not None:
            self._grown(recorded)[:, self._width] = recorded[:, 0]
        logits = lm.spread(logits[:, -1], at_most_float32(logits.dtype))
        if states is None:
            return LMOutput(logits, None)
        return LMOutput(logits, states[:, 0].transpose(0, 1).to(lm.output_device))

    def keep(self, rows: Tensor) -> None:
        """Go on with these sequences only. rows: int64, indices into the batch."""
        for layer in self._cache.layers:
            layer.reorder_cache(torch.LongTensor(rows))
        self._lengths, self._real = self._lengths[rows], self._real[rows.to(self._real.device)]
        if len(self._before):
            self._before = self._before[rows.to(self._before.device)]

    def hand_over(self, row: int) -> None:
        """Make the `CachedLM` hold the tokens of sequence `row` that were run so far."""
        columns, rows = self._columns(row), slice(row, row + 1)
        cached = [
            (layer.keys[rows, :, columns], layer.values[rows, :, columns])
            for layer in self._cache.layers
        ]
        self._lm.load(cached, self._before[row, 1:][columns] if len(self._before) else None)

    @torch.no_grad()
    def _prefill(self, sequences: Sequence[Tensor]) -> None:
        """Run a few sequences of similar length at a time, padded on the right, so that attention
        is plainly causal. Their rows are then moved so that all sequences end in one column."""
        for group in _groups([len(sequence) for sequence in sequences]):
            cache, columns = BufferCache(), [self._columns(row) for row in group]
            tokens = pad_sequence([sequences[row] for row in group], batch_first=True)
            tokens = tokens.to(self._lm.device)
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
            rows = Rows(tokens, positions, None, self._added(group, columns))
            *_, recorded = self._lm.compute(rows, cache, (), "none")
            for index, layer in enumerate(cache.layers):
                if index == len(self._cache.layers):
                    shape = len(self._lengths), layer.keys.shape[1], self._width
                    keys = layer.keys.new_zeros(*shape, layer.keys.shape[-1])
                    values = layer.values.new_zeros(*shape, layer.values.shape[-1])
                    self._cache.update(keys, values, index)
            for place, (row, taken) in enumerate(zip(group, columns, strict=True)):
                length = taken.stop - taken.start
                for layer, whole in zip(cache.layers, self._cache.layers, strict=True):
                    whole.keys[row, :, taken] = layer.keys[place, :, :length]
                    whole.values[row, :, taken] = layer.values[place, :, :length]
                if recorded is not None:
                    self._grown(recorded)[row, 1:][taken] = recorded[place, :length]

    def _columns(self, row: int) -> slice:
        """Return the columns in which the tokens of a sequence are cached."""
        return slice(self._width - int(self._lengths[row]), self._width)

    def _grown(self, recorded: Tensor) -> Tensor:
        """Return `self._before`, allocated for states like `recorded` [b, n, L + 1, H]."""
        if not len(self._before):
            count, columns = self._real.shape
            self._before = recorded.new_zeros(count, columns + 1, *recorded.shape[2:])
        return self._before

    def _added(self, rows: Sequence[int], columns: Sequence[slice]) -> Tensor | None:
        """Return what an EAGLE-style draft adds to the embeddings of the tokens in these columns of
        each of these sequences, from the target's states at the tokens before: [b, n, H], padded
        on the right."""
        if not self._lm.reads_target:
            return None
        assert self._target is not None, "a draft that reads states needs the batch of its target"
        taken = [self._target._before[row, some] for row, some in zip(rows, columns, strict=True)]
        return self._lm.of_target(pad_sequence(taken, batch_first=True))


class OneByOneLM:
    """The interface of `BatchedLM` with one call for each sequence, for a model with recurrent
    states, which padding would enter."""

    def __init__(self, lm: RecurrentLM, sequences: Sequence[Tensor]) -> None:
        self._lm = lm
        self._texts = [sequence[:0] for sequence in sequences]
        self._caches = [StateCache(lm.model.config.get_text_config()) for _ in sequences]
        for row, sequence in enumerate(sequences):
            if len(sequence):
                self._run(row, sequence, ())

    def step(self, tokens: Tensor, hidden: Sequence[int] = ()) -> LMOutput:
        """See `BatchedLM.step`."""
        outputs = [self._run(row, token, hidden) for row, token in enumerate(tokens.split(1))]
        logits = torch.cat([row for row, _ in outputs])
        states = torch.cat([state for _, state in outputs], 1) if hidden else None
        return LMOutput(
            self._lm.spread(logits, at_most_float32(logits.dtype)),
            None if states is None else states.to(self._lm.output_device),
        )

    def keep(self, rows: Tensor) -> None:
        """See `BatchedLM.keep`."""
        self._texts = [self._texts[row] for row in rows.tolist()]
        self._caches = [self._caches[row] for row in rows.tolist()]

    def hand_over(self, row: int) -> None:
        """See `BatchedLM.hand_over`."""
        with torch.inference_mode(False):
            self._lm.take_over(self._texts[row], deepcopy(self._caches[row]))

    @torch.no_grad()
    def _run(self, row: int, tokens: Tensor, hidden: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Append tokens [n] to a sequence. Returns logits [1, V] of the last, and [L, 1, H]."""
        text = torch.cat([self._texts[row], tokens.cpu()])
        positions = torch.arange(len(text) - len(tokens), len(text), device=self._lm.device)
        rows = Rows(tokens.to(self._lm.device)[None], positions[None])
        logits, states, _ = self._lm.compute(rows, self._caches[row], hidden, "last")
        self._texts[row] = text
        return logits[:, -1], logits[:0] if states is None else states[:, -1].transpose(0, 1)


Batch = BatchedLM | OneByOneLM


def batch_of(
    lm: CachedLM, sequences: Sequence[Tensor], more: int, target: Batch | None = None
) -> Batch:
    """Return a `BatchedLM`, which runs all sequences in one call, if the model allows it, else a
    `OneByOneLM`.

    Raises UserError for a draft that reads states of a target without batches."""
    if isinstance(lm, RecurrentLM):
        return OneByOneLM(lm, sequences)
    if isinstance(target, BatchedLM) or not lm.reads_target:
        return BatchedLM(lm, sequences, more, target if isinstance(target, BatchedLM) else None)
    raise UserError(
        "pair.draft: expected one that reads no states of its target, for a harvest from a target"
        " with recurrent layers, got one that does. Choose another draft"
    )


def _groups(lengths: Sequence[int]) -> list[list[int]]:
    """Return groups of sequences to run together, shortest first: with padding at most `TOGETHER`
    tokens, unless one sequence is longer."""
    groups: list[list[int]] = [[]]
    for row in sorted((row for row, n in enumerate(lengths) if n), key=lambda row: lengths[row]):
        if groups[-1] and lengths[row] * (len(groups[-1]) + 1) > TOGETHER:
            groups.append([])
        groups[-1].append(row)
    return groups
