"""Rows that a head is trained on: held-out prompts, rebalanced classes (in the training fold
alone), micro-batches, and their division among processes (`accelerate launch`).

Micro-batches are the same for any number of processes, and so are the gradients of their losses, up
to rounding."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, Sampler

from runtime.errors import UserError

CHUNK = 1024  # rows that are worked on at once
TOGETHER, BLOCKS = 2**28, 64  # bytes of rows that are shuffled together, of so many blocks
SMOTE_BYTES = 2**27


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


def standardisation(
    x: torch.Tensor,
    kept: torch.Tensor | None = None,
    spread: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and scale of the columns of spread(rows), of the rows x [n, D] that are `kept`
    [n] bool; scale is 1 where a column is constant. Worked out from `CHUNK` rows at a time."""
    n, mean, squares = 0, torch.zeros(()), torch.zeros(())
    for some in _numbers(x, kept).split(CHUNK):
        variance, middle = torch.var_mean(spread(x[some].float()).double(), 0, correction=0)
        gap, share = middle - mean, len(some) / (n + len(some))
        squares = squares + len(some) * variance + n * share * gap.square()
        mean, n = mean + share * gap, n + len(some)
    scale = (squares / n).sqrt()
    return mean.float(), torch.where(scale > 0, scale, torch.ones_like(scale)).float()


def _numbers(x: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """Return the numbers of the rows that are kept, or of all."""
    return torch.arange(len(x)) if kept is None else torch.nonzero(kept).flatten()


def smote(
    x: torch.Tensor, label: torch.Tensor, kept: torch.Tensor, neighbours: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return synthetic rows [m, D] and their labels [m] that raise every minority class to the
    majority count with SMOTE (Chawla et al. 2002; SpecBranch, arXiv 2506.01979).

    Neighbours are found, and rows interpolated, on standardised columns; the synthetic rows are
    mapped back. A class too small for `neighbours` uses fewer and a class of one row is skipped;
    both are printed. Of more rows than `SMOTE_BYTES` hold as float32, evenly spaced ones are looked
    at: synthetic rows lie between those and raise classes to the majority count among those; for
    the rest a sampler draws classes equally often. x: [n, D]; label: [n]; kept: [n] bool, the rows
    of the training fold; neighbours: 0 for no synthetic rows."""
    some = torch.nonzero(kept).flatten()
    if not neighbours:
        return x[:0].float(), label[:0]
    from imblearn.over_sampling import SMOTE

    most = max(1000, SMOTE_BYTES // (4 * x.shape[1]))
    if len(some) > most:
        print(f"SMOTE: looks at {most:,} of {len(some):,} training rows, as many as memory is for")
        some = some[torch.linspace(0, len(some) - 1, most, dtype=torch.float64).long()]
    x, label = x[some].float(), label[some]
    counts = torch.bincount(label)
    mean, scale = standardisation(x)
    scaled, labels = ((x - mean) / scale).numpy(), label.numpy()
    rows, classes = [x[:0]], [label[:0]]
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
    return torch.cat(rows), torch.cat(classes)


def balancing_weights(label: torch.Tensor) -> torch.Tensor:
    """Return weights 1 / (rows of the same class), [n], which draw classes equally often."""
    return 1.0 / torch.bincount(label)[label].double()


class EpochSampler(Sampler[int]):
    """Samples the item order of one epoch as a function of (seed, epoch) alone, so that a resumed
    run continues the same stream.

    Without weights it is a permutation; with weights [n], n draws with replacement. Of more than
    `together` items, blocks of consecutive ones are shuffled, and items in so many blocks as have
    `together` items: rows are then read from few places at a time, and few orders are held."""

    def __init__(
        self, size: int, seed: int, weights: torch.Tensor | None = None, together: int | None = None
    ) -> None:
        self.size, self.seed, self.weights = size, seed, weights
        self.together, self.epoch = together or size, 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        if self.size <= self.together:
            yield from self._order(torch.arange(self.size), self.size, generator)
            return
        blocks = torch.arange(self.size).split(max(1, self.together // BLOCKS))
        shuffled = torch.randperm(len(blocks), generator=generator)
        heavy, drawn, total = (
            0.0,
            0,
            float(self.size if self.weights is None else self.weights.sum()),
        )
        for some in shuffled.split(BLOCKS):
            items = torch.cat([blocks[i] for i in some.tolist()])
            heavy += float(len(items) if self.weights is None else self.weights[items].sum())
            upto = min(self.size, round(self.size * heavy / total))  # draws fall by weight
            yield from self._order(items, upto - drawn, generator)
            drawn = upto

    def _order(self, items: torch.Tensor, draws: int, generator: torch.Generator) -> list[int]:
        if self.weights is None:
            chosen = torch.randperm(len(items), generator=generator)
        elif not draws:
            return []
        else:
            weights = self.weights[items]
            chosen = torch.multinomial(weights, draws, replacement=True, generator=generator)
        order: list[int] = items[chosen].tolist()
        return order


class Items(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A dataset of rows x [n, D] (served as float32) and y [n]. An item is one row, or with `group`
    [n] all rows of a prompt.

    kept: [n] bool, the rows that it is made of; None: all. more: further rows [m, D] behind these,
    and their y."""

    def __init__(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        group: torch.Tensor | None = None,
        kept: torch.Tensor | None = None,
        more: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        rows = _numbers(x, kept)  # x is not copied: it may be larger than the memory
        self.x, self.more = x, x[:0] if more is None else more[0]
        self.rows, self.y = rows, y[rows] if more is None else torch.cat([y[rows], more[1]])
        self.prompts: tuple[torch.Tensor, ...] | None = None
        if group is not None:
            _, prompt, sizes = group[rows].unique(return_inverse=True, return_counts=True)
            self.prompts = prompt.argsort(stable=True).split(sizes.tolist())

    def __len__(self) -> int:
        return len(self.y) if self.prompts is None else len(self.prompts)

    @property
    def together(self) -> int:
        """How many items have rows of `TOGETHER` bytes."""
        bytes_of_rows = self.x.shape[1] * self.x.element_size() * max(1, len(self.y))
        return max(1, int(len(self) * TOGETHER / bytes_of_rows))

    def __getitems__(self, items: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        if self.prompts is None or not items:
            numbers = torch.tensor(items, dtype=torch.int64)
        else:
            numbers = torch.cat([self.prompts[item] for item in items])
        return self.inputs(numbers), self.y[numbers]

    def inputs(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the inputs of some rows, float32 [m, D]."""
        if not len(self.more):
            return self.x[self.rows[numbers]].float()
        own = numbers < len(self.rows)
        x = self.more.new_empty(len(numbers), self.x.shape[1])
        x[own] = self.x[self.rows[numbers[own]]].to(x)
        x[~own] = self.more[numbers[~own] - len(self.rows)]
        return x

    def count(self, items: Sequence[int]) -> int:
        """Return the number of rows of `items`."""
        if self.prompts is None:
            return len(items)
        return sum(len(self.prompts[item]) for item in items)


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
