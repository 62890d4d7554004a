"""A toy language model whose conditional distributions are known exactly; it stands in for
`CachedLM` in tests."""

import zlib
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache
from time import perf_counter

import torch
from torch import Tensor

from decoding.draft import HOST
from decoding.interfaces import LMOutput, RowsWanted, Wanted

Context = tuple[int, ...]
Table = Callable[[Context], Tensor]
"""The last tokens of a context -> distribution of the next one, [V] float64."""


def random_table(vocab_size: int, seed: int, concentration: float = 1.0) -> Table:
    """Return a table with a Dirichlet draw per context: concentration 1 is uniform on the simplex,
    below 1 peaky."""

    def distribution(context: Context) -> Tensor:
        weights = torch.full((vocab_size,), concentration, dtype=torch.float64)
        return torch._sample_dirichlet(weights, _generator(seed, "law", context))

    return distribution


def mixed_table(first: Table, second: Table, weight: float) -> Table:
    """Return the mixture with `weight` of the first distribution and the rest of the second: a
    draft aligned with its target."""
    return lambda context: weight * first(context) + (1 - weight) * second(context)


class TableLM:
    """A `decoding.interfaces.LM` over a table keyed by the last `order` tokens. Logits are float64
    log-distributions.

    Hidden states [n_layers + 1, n, width] are fake but deterministic functions of the same context,
    so rules driven by a predictor can be tested too."""

    reads_target = False

    def __init__(
        self,
        table: Table,
        order: int = 2,
        max_length: int = 1 << 20,
        n_layers: int = 2,
        width: int = 4,
    ) -> None:
        self.table, self.order, self.max_length = table, order, max_length
        self.shape = n_layers + 1, width
        self.vocab_size = len(table(()))
        self.device = self.output_device = HOST
        self.user: int | None = None
        self.network: Callable[..., LMOutput] = _done  # what `forward` computes goes through it
        self.forwards, self.seconds = 0, 0.0
        self._contexts: list[Context] = []  # of each cached row, itself included
        self._block_start = 0
        self._logits = cache(lambda context: self.table(context).log())
        self._hidden = cache(
            lambda context: torch.rand(self.shape, generator=_generator(0, "hidden", context))
        )

    def fresh(self, target: object = None) -> "TableLM":
        """Return the same model with rows of its own."""
        other = copy(self)
        other._contexts, other.user, other.network = [], None, _done
        return other

    @property
    def length(self) -> int:
        return len(self._contexts)

    def distribution(self, context: Context) -> Tensor:
        """Return the exact distribution after `context` (any length), [V] float64."""
        logits: Tensor = self._logits(context[-self.order :])
        return logits.exp()

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
        start, first_row = perf_counter(), self.length
        self._block_start = self._block_start if extend else first_row
        links = range(-1, len(tokens) - 1) if parents is None else parents.tolist()
        for token, link in zip(tokens.tolist(), links, strict=True):
            parent = self._block_start + link
            before = self._contexts[parent] if parent >= 0 else ()
            self._contexts.append((*before, token)[-self.order :])
        contexts, wanted = self._contexts[first_row:], Wanted(hidden, hidden_rows, logits)
        output = self.network(self._output, contexts, wanted)
        self.forwards += 1
        self.seconds += perf_counter() - start
        return output

    def _output(self, contexts: Sequence[Context], wanted: Wanted) -> LMOutput:
        hidden = wanted.hidden
        rows = [self._logits(each) for each in _wanted(contexts, wanted.logits)]
        states = [self._hidden(each) for each in _wanted(contexts, wanted.hidden_rows) if hidden]
        return LMOutput(
            torch.stack(rows) if rows else torch.zeros(0, self.vocab_size, dtype=torch.float64),
            torch.stack(states, 1)[list(hidden)] if hidden else None,
        )

    def crop(self, length: int) -> None:
        assert 0 <= length <= self.length, f"cannot crop {self.length} cached rows to {length}"
        del self._contexts[length:]

    def keep_path(self, rows: list[int]) -> None:
        block = self._contexts[self._block_start :]
        self._contexts[self._block_start :] = [block[row] for row in rows]

    def reset(self) -> None:
        self._contexts.clear()
        self.forwards, self.seconds = 0, 0.0

    def embed(self, token: int) -> Tensor:
        return torch.rand(self.shape[1], generator=_generator(0, "embedding", (token,)))


def _done(work: Callable[..., LMOutput], *arguments: object) -> LMOutput:
    return work(*arguments)


def _wanted(contexts: Sequence[Context], rows: RowsWanted) -> Sequence[Context]:
    if not isinstance(rows, str):
        return [contexts[row] for row in rows]
    return {"all": contexts, "last": contexts[-1:], "none": contexts[:0]}[rows]


def _generator(seed: int, name: str, context: Context) -> torch.Generator:
    """Return a generator for a context. name: purpose of the numbers, part of the seed: renaming
    one changes every table."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {name} {context}".encode()))
