"""Rows that a head is trained on: held-out prompts, rebalanced classes (in the training fold
alone), micro-batches, and their division among processes (`accelerate launch`).

Micro-batches are the same for any number of processes, and so are the gradients of their losses, up
to rounding."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, Sampler

from runtime.errors import UserError

SYNTHETIC = -1
"""`group` of a row that belongs to no prompt."""


def hold_out_prompts(group: torch.Tensor, fraction: float, seed: int) -> torch.Tensor:
    """Return the mask [n] of the rows held out for early stopping: all rows of `fraction` of the
    prompts, of one at least."""
    prompts = torch.unique(group)
    if len(prompts) < 2:
        raise UserError(
            "data: the training split has fewer than 2 prompts. Harvest more: python"
            " scripts/gen_data.py"
        )
    count = min(max(1, round(fraction * len(prompts))), len(prompts) - 1)
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed))
    return torch.isin(group, prompts[order[:count]])


def standardisation(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and scale of the columns of x [n, D]; scale is 1 where a column is constant."""
    scale, mean = torch.std_mean(x, dim=0, correction=0)
    return mean, torch.where(scale > 0, scale, torch.ones_like(scale))


def smote(
    x: torch.Tensor, label: torch.Tensor, group: torch.Tensor, neighbours: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Raise every minority class to the majority count with SMOTE (Chawla et al. 2002; SpecBranch,
    arXiv 2506.01979).

    Neighbours are found, and rows interpolated, on standardised columns; only the synthetic rows
    are mapped back, so the real rows stay bit for bit. A class too small for `neighbours` uses
    fewer and a class of one row is skipped; both are printed. x: [n, D], label: [n], group: [n].
    Returns the same three; synthetic rows come last, with group `SYNTHETIC`."""
    from imblearn.over_sampling import SMOTE

    counts = torch.bincount(label)
    mean, scale = standardisation(x)
    scaled, labels = ((x - mean) / scale).numpy(), label.numpy()
    rows, classes = [x], [label]
    for name, count in enumerate(counts.tolist()):
        usable, missing = min(neighbours, count - 1), int(counts.max()) - count
        if usable < 1:
            print(
                f"SMOTE: class {name} skipped, {count} training rows have no neighbours to"
                " interpolate with"
            )
        elif usable < neighbours:
            print(
                f"SMOTE: class {name} has {count} training rows, k reduced from {neighbours} to"
                f" {usable}"
            )
        if usable > 0 and missing:
            target = {name: count + missing}
            sampler = SMOTE(sampling_strategy=target, k_neighbors=usable, random_state=seed)
            resampled, _ = sampler.fit_resample(scaled, labels)
            synthetic = torch.from_numpy(np.ascontiguousarray(resampled[len(x) :]))
            rows.append(synthetic * scale + mean)
            classes.append(torch.full((missing,), name))
    added = sum(map(len, rows)) - len(x)
    return torch.cat(rows), torch.cat(classes), torch.cat([group, torch.full((added,), SYNTHETIC)])


def balancing_weights(label: torch.Tensor) -> torch.Tensor:
    """Return weights 1 / (rows of the same class), [n], which draw classes equally often."""
    return 1.0 / torch.bincount(label)[label].double()


class EpochSampler(Sampler[int]):
    """Samples the item order of one epoch as a function of (seed, epoch) alone, so that a resumed
    run continues the same stream.

    Without weights it is a permutation; with weights [n], n draws with replacement."""

    def __init__(self, size: int, seed: int, weights: torch.Tensor | None = None) -> None:
        self.size, self.seed, self.weights = size, seed, weights
        self.epoch = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        if self.weights is None:
            return iter(torch.randperm(self.size, generator=generator).tolist())
        draws = torch.multinomial(self.weights, self.size, replacement=True, generator=generator)
        return iter(draws.tolist())


class Items(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A dataset of rows x [n, D] (served as float32) and y [n]. An item is one row, or with `group`
    [n] all rows of a prompt."""

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
        """Return the number of rows of `items`."""
        return len(items) if self.rows is None else sum(len(self.rows[item]) for item in items)


class Part(Dataset[tuple[torch.Tensor, torch.Tensor, int, int]]):
    """The share of process `rank` of `processes` in a micro-batch of items: x, y of its consecutive
    items (possibly none), the number of rows before them, and that of all rows."""

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
