"""A toy language model whose conditional distributions are known exactly; it stands in for
`CachedLM` in tests."""

import zlib
from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor

from decoding.draft import HOST
from decoding.interfaces import LMOutput, RowsWanted

Context = tuple[int, ...]
Table = Callable[[Context], Tensor]
"""The last tokens of a context -> distribution of the next one, [V] float64."""


def random_table(vocab_size: int, seed: int, concentration: float = 1.0) -> Table:
    """A Dirichlet distribution per context: concentration 1 is uniform on the simplex, below 1
    peaky."""

    def distribution(context: Context) -> Tensor:
        weights = torch.full((vocab_size,), concentration, dtype=torch.float64)
        return torch._sample_dirichlet(weights, _generator(seed, "law", context))

    return distribution


def mixed_table(first: Table, second: Table, weight: float) -> Table:
    """`weight` of the first distribution and the rest of the second: a draft aligned with its
    target."""
    return lambda context: weight * first(context) + (1 - weight) * second(context)


class TableLM:
    """The verbs of `decoding.interfaces.LM` over a table keyed by the last `order` tokens. Logits
    are float64 log-distributions.

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
        self.table = table
        self.order = order
        self.max_length = max_length
        self.shape = (n_layers + 1, width)
        self.vocab_size = len(table(()))
        self.device = self.output_device = HOST
        self.user: int | None = None
        self.forwards = 0
        self.seconds = 0.0
        self._contexts: list[Context] = []  # of each cached row, itself included
        self._block_start = 0
        self._logits: dict[Context, Tensor] = {}
        self._hidden: dict[Context, Tensor] = {}

    @property
    def length(self) -> int:
        return len(self._contexts)

    def distribution(self, context: Context) -> Tensor:
        """[V] float64, the exact distribution after `context` (any length)."""
        return self._logits_after(context[-self.order :]).exp()

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
        contexts = self._contexts[first_row:]
        rows = [self._logits_after(contexts[row]) for row in _wanted(logits, len(contexts))]
        output = LMOutput(
            torch.stack(rows) if rows else torch.zeros(0, self.vocab_size, dtype=torch.float64),
            self._hidden_of(contexts, hidden, hidden_rows) if hidden else None,
        )
        self.forwards += 1
        self.seconds += perf_counter() - start
        return output

    def crop(self, length: int) -> None:
        assert 0 <= length <= self.length, f"cannot crop {self.length} cached rows to {length}"
        del self._contexts[length:]

    def keep_path(self, rows: list[int]) -> None:
        self._contexts[self._block_start :] = [
            self._contexts[self._block_start + row] for row in rows
        ]

    def reset(self) -> None:
        self._contexts.clear()
        self.forwards = 0
        self.seconds = 0.0

    def embed(self, token: int) -> Tensor:
        return torch.rand(self.shape[1], generator=_generator(0, "embedding", (token,)))

    def _logits_after(self, context: Context) -> Tensor:
        if context not in self._logits:
            self._logits[context] = self.table(context).log()
        return self._logits[context]

    def _hidden_of(
        self, contexts: Sequence[Context], layers: Sequence[int], rows: RowsWanted
    ) -> Tensor:
        """[len(layers), k, width]."""
        wanted = [contexts[row] for row in _wanted(rows, len(contexts))]
        return torch.stack([self._hidden_after(context) for context in wanted], 1)[list(layers)]

    def _hidden_after(self, context: Context) -> Tensor:
        if context not in self._hidden:
            self._hidden[context] = torch.rand(
                self.shape, generator=_generator(0, "hidden", context)
            )
        return self._hidden[context]


def _wanted(rows: RowsWanted, n: int) -> Sequence[int]:
    if not isinstance(rows, str):
        return rows
    return {"all": range(n), "last": range(n - 1, n), "none": range(0)}[rows]


def _generator(seed: int, name: str, context: Context) -> torch.Generator:
    """name: what the numbers are for. It is part of the seed: renaming one changes every table."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {name} {context}".encode()))
