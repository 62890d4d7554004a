"""The tree that the rows of one or more calls form behind a cache."""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class RowTree:
    """Rows after a cache. parents: an earlier row of the tree, or -1, of each; depth: 0 for a row
    that follows the cache."""

    parents: list[int]
    depth: list[int]

    @classmethod
    def empty(cls) -> "RowTree":
        return cls([], [])

    def grown(self, parents: torch.Tensor) -> "RowTree":
        """With one more row for each of ``parents`` [n], indices of earlier rows (-1 = none)."""
        more: list[int] = parents.tolist()
        depth = self.depth.copy()
        for parent in more:
            depth.append(depth[parent] + 1 if parent >= 0 else 0)
        return RowTree(self.parents + more, depth)

    def visible(self, first: int = 0) -> torch.Tensor:
        """[m - first, m] bool: which rows each one from `first` on sees, its ancestors and
        itself."""
        seen = np.zeros((len(self.parents) - first, len(self.parents)), dtype=np.bool_)
        for row, sees in enumerate(seen, first):
            while row >= 0:
                sees[row] = True
                row = self.parents[row]
        return torch.from_numpy(seen)
