"""How sparse the attention mask of a tree is in the blocks that attention kernels skip (DySpec,
Appendix C)."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from decoding.models.forward import RowTree


def mask_blocks(parents: Sequence[int], order: Sequence[int], prefix: int, block: int = 32) -> int:
    """Non-empty `block` x `block` blocks of `tree_mask`."""
    return int(filled(tree_mask(parents, order, prefix), block).sum())


def tree_mask(parents: Sequence[int], order: Sequence[int], prefix: int) -> Tensor:
    """Which the target's call sees: bool [rows of the tree, prefix and tree].

    parents: of rows 1, 2, ... (row 0 follows the prefix), each before its children; order: the rows
    as they are sent, e.g. `range(n + 1)` or `depth_first(parents)`; prefix: cached tokens, visible
    to all."""
    rows = torch.tensor(order)
    tree = RowTree().grown(torch.tensor([-1, *parents])).visible()[rows][:, rows]
    return torch.cat([torch.ones(len(rows), prefix, dtype=torch.bool), tree], dim=1)


def breadth_first(parents: Sequence[int]) -> list[int]:
    """Rows of a tree level by level, each level as they were added; row 0 first. parents: of rows
    1, 2, ..."""
    depth = [0]
    for parent in parents:
        depth.append(depth[parent] + 1)
    return sorted(range(len(depth)), key=depth.__getitem__)


def heavy_path(parents: Sequence[int]) -> list[int]:
    """Rows of a tree in pre-order, of each row's children the one with the largest subtree first
    (of equal ones the first that was added); row 0 comes first. parents: of rows 1, 2, ..., each
    before its children."""
    size = [1] * (len(parents) + 1)
    for row in range(len(parents), 0, -1):
        size[parents[row - 1]] += size[row]
    children: list[list[int]] = [[] for _ in size]
    for row, parent in enumerate(parents, 1):
        children[parent].append(row)
    order, waiting = list[int](), [0]
    while waiting:
        row = waiting.pop()
        order.append(row)
        waiting += sorted(children[row], key=lambda child: (size[child], -child))
    return order


def filled(mask: Tensor, block: int) -> Tensor:
    """bool [block rows, block columns]: in which blocks anything is visible; those at the edges may
    be smaller."""
    height, width = ((-size) % block for size in mask.shape)
    return (
        pad(mask, (0, width, 0, height))
        .unfold(0, block, block)
        .unfold(1, block, block)
        .any(-1)
        .any(-1)
    )
