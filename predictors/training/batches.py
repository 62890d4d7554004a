"""What a micro-batch is made of, and what each of several processes (`accelerate launch`) gets of
it.

Micro-batches are the same for any number of processes, and so are the gradients of their losses, up
to rounding."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.data import Dataset


class Items(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows x [n, D] (served as float32) and y [n], in items: one row each, or with `group` [n] all
    rows of a prompt."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, group: torch.Tensor | None = None) -> None:
        self.x, self.y = x, y
        self.rows = (
            None
            if group is None
            else [torch.nonzero(group == g).flatten() for g in torch.unique(group)]
        )

    def __len__(self) -> int:
        return len(self.x) if self.rows is None else len(self.rows)

    def __getitems__(self, items: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        if self.rows is None or not items:
            rows = torch.tensor(items, dtype=torch.int64)
        else:
            rows = torch.cat([self.rows[item] for item in items])
        return self.x[rows].float(), self.y[rows]

    def count(self, items: Sequence[int]) -> int:
        """Return the rows of `items`."""
        return len(items) if self.rows is None else sum(len(self.rows[item]) for item in items)


class Part(Dataset[tuple[torch.Tensor, torch.Tensor, int, int]]):
    """Share of process `rank` of `processes` in a micro-batch of items: x, y of the next items in
    order, which may be none, then the number of rows before them and of all rows."""

    def __init__(self, items: Items, rank: int, processes: int) -> None:
        self.items, self.rank, self.processes = items, rank, processes

    def __len__(self) -> int:
        return len(self.items)

    def __getitems__(self, batch: list[int]) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        part = part_of(len(batch), self.rank, self.processes)
        return (
            *self.items.__getitems__(batch[part]),
            self.items.count(batch[: part.start]),
            self.items.count(batch),
        )


def part_of(size: int, rank: int, processes: int) -> slice:
    """Return the share of process `rank` in `size` things: consecutive, sizes differ by one."""
    return slice(size * rank // processes, size * (rank + 1) // processes)


class RowDropout(nn.Dropout):
    """Dropout that does not depend on how the rows of a micro-batch are divided among processes.

    part: (rows before these, all rows) of the micro-batch. Each process draws the mask of all rows,
    from generators in the same state, and uses that of its own. Without `part` it is ordinary
    dropout, which on a CPU is the same."""

    part: tuple[int, int] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.part is None or not self.training:
            return super().forward(x)
        before, rows = self.part
        mask = x.new_empty(rows, *x.shape[1:]).bernoulli_(1 - self.p).div_(1 - self.p)
        return x * mask[before : before + len(x)]
