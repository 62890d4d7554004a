"""Tables of tensors whose rows are positions, and how they are worked out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import torch
from torch import Tensor

# Numbers worked on at once on a CPU: so many fit a core's cache, a whole batch takes three times as
# long.
AT_ONCE = 200_000


@dataclass(frozen=True)
class Columns:
    """A dataclass of tensors with the same rows, [n, ...] each."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(**{name: change(column) for name, column in vars(self).items()})

    def take(self, rows: Tensor | slice) -> Self:
        if isinstance(rows, Tensor):
            rows = rows.to(next(iter(vars(self).values())).device)  # once for all columns
        return self.map(lambda column: column[rows])

    @classmethod
    def join(
        cls,
        parts: Sequence[Self],
        how: Callable[[list[Tensor], int], Tensor] = torch.cat,
        dim: int = 0,
    ) -> Self:
        names = vars(parts[0])
        return cls(**{name: how([getattr(part, name) for part in parts], dim) for name in names})


ColumnsT = TypeVar("ColumnsT", bound=Columns)


def blockwise(distribution: Callable[..., ColumnsT], *rows: Tensor) -> ColumnsT:
    """`distribution(*rows)` of rows [n, ...], worked out a few rows at a time on a CPU."""
    parts = [distribution(*block) for block in blocks(*rows)]
    return type(parts[0]).join(parts)


def blocks(*rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same few rows of each at a time. rows: [n, ...] each."""
    size = count = max(1, len(rows[0]))
    if rows[0].device.type == "cpu":
        size = max(1, AT_ONCE * count // max(1, *(each.numel() for each in rows)))
    return zip(*(each.split(size) for each in rows), strict=True)


def at(probs: Tensor, tokens: Tensor) -> Tensor:
    """probs [..., V] at tokens [...]."""
    return probs.gather(-1, tokens[..., None]).squeeze(-1)
