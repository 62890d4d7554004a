"""What decoding asks of a language model: `decoding.models.loading.CachedLM` and
`decoding.models.table_lm.TableLM` provide it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

RowsWanted = Literal["all", "last", "none"] | Sequence[int]
"""The rows of a call that something is wanted for. With a large vocabulary the logits of one row
cost as much as some layers."""


@dataclass(frozen=True)
class LMOutput:
    """logits: [m, V] of the rows asked for; hidden: [len(layers), k, H] of the layers and rows
    asked for, None where no layer was."""

    logits: Tensor
    hidden: Tensor | None


@dataclass(frozen=True)
class Wanted:
    """What a call returns. hidden: layers, indices into the n_layers + 1 hidden states (-1: what
    the output layer reads); hidden_rows: the rows they are wanted for; logits: the rows that logits
    are wanted for."""

    hidden: Sequence[int] = ()
    hidden_rows: RowsWanted = "all"
    logits: RowsWanted = "all"


class LM(Protocol):
    """One sequence and its key/value cache. Row t of the cache is the token at position t."""

    vocab_size: int
    max_length: int
    forwards: int  # calls so far
    seconds: float  # time spent in them
    reads_target: bool  # whether it must be run after the target, whose hidden states it reads

    @property
    def length(self) -> int:
        """Rows in the cache."""
        ...

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
        """Append `tokens` [n] to the cache and return the distribution of what follows each of
        them.

        `hidden`, `hidden_rows`, `logits`: see `Wanted`. Nothing else leaves the model.

        `parents` None: a chain that continues the cache. Otherwise a tree: `parents[i]` is the row
        of the tree that row i follows, or -1 for the last row of the cache before it. The tree
        begins with this call, or, with `extend`, goes on from the previous one."""
        ...

    def crop(self, length: int) -> None:
        """Forget every cached row from `length` on."""
        ...

    def keep_path(self, rows: list[int]) -> None:
        """Of the tree (or chain) of the last call keep only `rows`, a path in order."""
        ...

    def reset(self) -> None:
        """Empty the cache and zero the counters."""
        ...

    def embed(self, token: int) -> Tensor:
        """Input embedding of one token, [H]."""
        ...


class Pair(Protocol):
    """Two models that share a vocabulary; the draft proposes, the target decides."""

    @property
    def target(self) -> LM: ...

    @property
    def draft(self) -> LM: ...
