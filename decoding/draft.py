"""Data of a round: the draft, its verdict, and the facts known before drafting."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from decoding.picking import point_mass

HOST = torch.device("cpu")
Shape = Literal["chain", "branch_point", "paths", "tree"]
"""What a structure builds. chain: one path. branch_point: a chain whose last node has open leaves.
paths: chains that only share the root. tree: anything else without open leaves."""


@dataclass(frozen=True)
class Draft:
    """A tree of drafted tokens. Row 0 is the last committed token; node i is row i + 1.

    parent: [n], row of each node's parent (parents precede children)
    token:  [n], siblings in draw order
    q:      n + 1 rows of [V], row r = the distribution the children of row r were drawn from (zeros
    where there are none)
    open:   number of last nodes that are open leaves: candidates the target is not run on
    drawn_q: [n], q of each node's token under the distribution it was drawn from, noted with the
    draw; () if it has to be read from `q`
    """

    parent: list[int]
    token: list[int]
    q: Sequence[Tensor]
    open: int = 0
    drawn_q: Sequence[float] = ()

    def on(self, device: torch.device) -> "Draft":
        """Return the draft for a target on `device`, to which rows of q move when they are read."""
        rows = self.q.rows if isinstance(self.q, Placed) else self.q
        if all(row.device == device for row in rows):
            return self
        return replace(self, q=Placed(rows, device))

    def __len__(self) -> int:
        return len(self.token)

    @property
    def closed(self) -> int:
        """Count the nodes the target is run on, besides row 0."""
        return len(self) - self.open

    @property
    def is_chain(self) -> bool:
        return not self.open and self.parent == list(range(len(self)))

    def children(self) -> list[list[int]]:
        """Return for each row the rows of its children in draw order."""
        return children_of(self.parent)

    def rows_to(self, row: int, kept: int | None = None) -> list[int]:
        """Return the rows from the root's child to `row`; none for the root. kept: at most so many,
        if the response has ended before `row`."""
        return path_to(self.parent, row)[:kept]

    def path(self, row: int) -> list[int]:
        """Return the drafted tokens below the root up to `row`, included."""
        return [self.token[step - 1] for step in self.rows_to(row)]

    def text(self, committed: Tensor, row: int) -> Tensor:
        """Return the text [n] that ends at `row`."""
        return torch.cat([committed, torch.tensor(self.path(row), dtype=torch.long)])


@dataclass(frozen=True)
class PointMass:
    """The one-hot distribution [V] of a token that was not drawn, made when and where it is read.
    like: a tensor of its size and dtype; device: where it is read first"""

    token: int
    like: Tensor

    @property
    def device(self) -> torch.device:
        return self.like.device

    def to(self, device: torch.device) -> Tensor:
        if device.type == "cpu":
            return point_mass(self.token, len(self.like), self.like.dtype)
        mass = torch.zeros(len(self.like), dtype=self.like.dtype, device=device)
        mass[self.token] = 1
        return mass


class Placed(Sequence[Tensor]):
    """Rows on `device`, each moved or made there when it is first read."""

    def __init__(self, rows: Sequence[Tensor | PointMass], device: torch.device) -> None:
        self.rows, self._device = rows, device
        self._there: dict[int, Tensor] = {}

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        if row not in self._there:
            self._there[row] = self.rows[row].to(self._device)
        return self._there[row]

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Verdict:
    """The verdict on a draft. row: last accepted row; path: the accepted draft tokens; token: the
    residual or bonus token after them, None if the path ends at an open leaf; drafted: verified
    draft tokens, with open leaves (of which one at most can be accepted) counted as one."""

    row: int
    path: list[int]
    token: int | None
    drafted: int

    @property
    def accepted(self) -> int:
        return len(self.path)

    @property
    def emitted(self) -> list[int]:
        return self.path if self.token is None else [*self.path, self.token]


def no_embedding(token: int) -> Tensor:
    raise AssertionError("this context comes without a target's embeddings")


@dataclass(frozen=True)
class RoundContext:
    """Facts verified before the round starts.

    committed: [n] int64, prompt and output so far
    target_hidden: [len(target_layers), H], the target at the last verified position (that of
        committed[-2]), in the layers the stop rule reads; None when it reads none or nothing has
        been verified yet
    embed: the target's input embedding [E] of a token
    verdicts: whether each of the request's draft tokens so far was accepted, oldest first; tokens
        after the first rejected one of a round have none
    max_new: tokens that may still be committed
    round: 0 for the first round of a request (adaptive rules start afresh there)
    eos_ids: tokens that end the output
    device: that of the draft's outputs, on which predictors that read states run
    draft_context: tokens that the draft model holds; None: any number
    prompt: tokens of `committed` that were given
    """

    committed: Tensor
    max_new: int
    round: int = 0
    target_hidden: Tensor | None = None
    embed: Callable[[int], Tensor] = no_embedding
    eos_ids: frozenset[int] = frozenset()
    verdicts: Sequence[bool] = ()
    device: torch.device = HOST
    draft_context: int | None = None
    prompt: int = 0

    @property
    def max_copied(self) -> int:
        """Longest path a draft may have: one of the `max_new` tokens is left for the residual or
        bonus token."""
        return self.max_new - 1

    @property
    def max_depth(self) -> int:
        """Longest path that may be drawn from the draft model, whose context has to hold it; 0 if
        the committed text alone fills that context."""
        if self.draft_context is None:
            return self.max_copied
        return max(0, min(self.max_copied, self.draft_context - len(self.committed)))

    @property
    def beyond_draft(self) -> bool:
        """Return whether the committed text fills the draft's context, so nothing can be drawn."""
        return self.draft_context is not None and self.draft_context <= len(self.committed)


@cache
def zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [count] zeros, a view that expands one number: the same for all, to be read only."""
    with torch.inference_mode(False):
        return torch.zeros(1, dtype=dtype, device=device).expand(count)


def path_to(parents: Sequence[int], row: int) -> list[int]:
    """Return the rows of a tree from the root's child to `row`. parents: of rows 1, 2, ..."""
    rows = list[int]()
    while row > 0:
        rows.append(row)
        row = parents[row - 1]
    return rows[::-1]


def children_of(parents: Sequence[int]) -> list[list[int]]:
    """Return for each row of a tree the rows of its children. parents: of rows 1, 2, ..."""
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for row, parent in enumerate(parents, 1):
        children[parent].append(row)
    return children


def depth_first(parents: Sequence[int]) -> list[int]:
    """Return the rows of a tree in pre-order, children as they were added. parents: of rows 1, 2,
    ...; row 0 comes first.

    Close to the heavy-path order of DySpec, Appendix C: the accepted path and every subtree are
    contiguous, which keeps the attention mask of the target call in few blocks."""
    children, order, waiting = children_of(parents), list[int](), [0]
    while waiting:
        row = waiting.pop()
        order.append(row)
        waiting += reversed(children[row])
    return order
