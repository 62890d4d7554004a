"""How sparse the attention mask of a tree is in the blocks that attention kernels skip (DySpec, Appendix C)."""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from decoding.cached_lm import Tree


def mask_blocks(parents: Sequence[int], order: Sequence[int], prefix: int, block: int = 32) -> int:
    """Non-empty `block` x `block` blocks of the target call's mask: rows of the tree x (prefix and tree).

    parents: of rows 1, 2, ... (row 0 follows the prefix), each before its children; order: the rows as they are sent,
    e.g. `range(n + 1)` or `depth_first(parents)`; prefix: cached tokens, visible to all.
    """
    rows = torch.tensor(order)
    tree = Tree.empty().grown(torch.tensor([-1, *parents])).visible[rows][:, rows]
    mask = torch.cat([torch.ones(len(rows), prefix, dtype=torch.bool), tree], dim=1)
    height, width = ((-size) % block for size in mask.shape)
    return int(pad(mask, (0, width, 0, height)).unfold(0, block, block).unfold(1, block, block).any(-1).any(-1).sum())
