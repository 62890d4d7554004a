"""The attention mask of a tree by the order of its rows, and the blocks a kernel has to visit."""

from collections.abc import Mapping, Sequence
from functools import partial
from random import Random

import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure as Canvas
from torch import Tensor
from torch.nn.functional import pad

from decoding.draft import RoundContext, children_of, depth_first
from decoding.draft_tree import DraftTree
from decoding.models.forward import RowTree
from decoding.models.table_lm import TableLM, random_table
from decoding.sampling import Warp, without_replacement
from decoding.structures.dyspec import DySpecHeap
from decoding.trace import Stopwatch
from reports.figure import Entry, Figure, Record

NODES, FEWER, PREFIX, BLOCK = 768, 64, 128, 32
FILLED = f"non-empty {BLOCK} x {BLOCK} blocks"
SHADE = ListedColormap(["white", "peachpuff"])
SIZES, PREFIXES = (64, 128, 256, 512, NODES), (0, PREFIX, 512, 2048)
Trees = Mapping[str, Sequence[int]]
"""Name -> parent rows of rows 1, 2, ... as they were drawn."""


def trees() -> Trees:
    """Return trees as large as the paper's: those that DySpec grows over a peaky toy distribution,
    and one whose parents are random."""
    random = Random(0)
    return {
        "DySpec": dyspec_parents(NODES),
        "random": [random.randrange(row) for row in range(1, NODES + 1)],
        f"DySpec, {FEWER} nodes": dyspec_parents(FEWER),
    }


def dyspec_parents(nodes: int) -> list[int]:
    committed = torch.tensor([0, 1])
    lm = TableLM(random_table(30, seed=0, concentration=0.1))
    lm.forward(committed[:-1])
    context = RoundContext(committed, max_new=nodes)
    tree = DraftTree(lm, context, Warp(), Stopwatch(), siblings=without_replacement)
    DySpecHeap(nodes).grow(tree)
    return tree.parent


def mask_order(grown: Trees | None = None, prefix: int = PREFIX) -> Figure:
    """Return the numbers of non-empty blocks, for the order in which nodes are drawn and for
    others; by default of `trees`."""
    grown = trees() if grown is None else grown
    masks, records = list[Tensor](), list[Record]()
    for name, parents in grown.items():
        orders = {
            "as drawn": range(len(parents) + 1),
            "breadth first": breadth_first(parents),
            "depth first": depth_first(parents),
            "heavy path": heavy_path(parents),
        }
        for order, rows in orders.items():
            mask = tree_mask(parents, rows, prefix)
            masks.append(mask)
            records.append(
                {
                    **{"tree": name, "order": order},
                    **{"rows": len(mask), "prefix (tokens)": prefix},
                    FILLED: int(filled(mask, BLOCK).sum()),
                    "blocks": filled(mask, BLOCK).numel(),
                }
            )
    return Figure(
        name="mask-order",
        title="Attention mask of a tree before and after reordering",
        source="DySpec, figures 6 and 7",
        kind="exact",
        n=f"{len(grown)} trees of {max(map(len, grown.values()))} nodes behind {prefix} tokens",
        interval="no interval: counted",
        records=records,
        draw=partial(_draw, masks=masks),
    )


def mask_sizes(sizes: Sequence[int] = SIZES, prefixes: Sequence[int] = PREFIXES) -> Figure:
    """Return the numbers of non-empty blocks of DySpec trees by their size and by the prefix: the
    trees are the first draws of the largest one."""
    largest = dyspec_parents(max(sizes))
    grown = {f"DySpec, {size} nodes": largest[:size] for size in sizes}
    return Figure(
        name="mask-sizes",
        title="Blocks of the attention mask by tree size and prefix",
        source="DySpec, figures 6 and 7 (one size, one prefix)",
        kind="exact",
        n=f"{len(grown)} sizes of a tree, {len(prefixes)} prefixes",
        interval="no interval: counted",
        records=[row for prefix in prefixes for row in mask_order(grown, prefix).records],
    )


def tree_mask(parents: Sequence[int], order: Sequence[int], prefix: int) -> Tensor:
    """Return the mask of the target's call: bool [rows of the tree, prefix and tree].

    parents: of rows 1, 2, ... (row 0 follows the prefix), each before its children; order: the rows
    as they are sent; prefix: cached tokens, visible to all."""
    rows = torch.tensor(order)
    tree = RowTree().grown(torch.tensor([-1, *parents])).visible()[rows][:, rows]
    return torch.cat([torch.ones(len(rows), prefix, dtype=torch.bool), tree], dim=1)


def breadth_first(parents: Sequence[int]) -> list[int]:
    """Return the rows of a tree level by level, each level as they were added; row 0 first.
    parents: of rows 1, 2, ..."""
    depth = [0]
    for parent in parents:
        depth.append(depth[parent] + 1)
    return sorted(range(len(depth)), key=depth.__getitem__)


def heavy_path(parents: Sequence[int]) -> list[int]:
    """Return the rows of a tree in pre-order, the child with the largest subtree first (of equal
    ones the first that was added); row 0 comes first. parents: of rows 1, 2, ..., each before its
    children."""
    size = [1] * (len(parents) + 1)
    for row in range(len(parents), 0, -1):
        size[parents[row - 1]] += size[row]
    children, order, waiting = children_of(parents), list[int](), [0]
    while waiting:
        row = waiting.pop()
        order.append(row)
        waiting += sorted(children[row], key=lambda child: (size[child], -child))
    return order


def filled(mask: Tensor, block: int) -> Tensor:
    """Return which blocks have a visible entry, bool [block rows, block columns]; those at the
    edges may be smaller."""
    height, width = ((-size) % block for size in mask.shape)
    return (
        pad(mask, (0, width, 0, height))
        .unfold(0, block, block)
        .unfold(1, block, block)
        .any(-1)
        .any(-1)
    )


def _draw(records: Sequence[Record], canvas: Canvas, masks: Sequence[Tensor]) -> None:
    """Draw the orders of the first tree."""
    canvas.set_size_inches(8.4, 7.6)
    grid = canvas.subplots(2, 2, sharex=True, sharey=True)
    for axes, record, mask in zip(grid.flatten(), records, masks, strict=False):
        blocks = filled(mask, BLOCK).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        axes.imshow(blocks.numpy(), cmap=SHADE, aspect="auto", interpolation="nearest")
        y, x = mask.nonzero(as_tuple=True)
        axes.plot(x.numpy(), y.numpy(), ",", color="black")
        axes.set(xlim=(0, mask.shape[1]), ylim=(mask.shape[0], 0))
        axes.set_title(f"{record['order']}: {record[FILLED]} blocks", fontsize=10)
    for axes in grid[1]:
        axes.set_xlabel("seen: prefix and tree (tokens)")
    for row in grid:
        row[0].set_ylabel("row of the target's call (tokens)")


FIGURES = (
    Entry(
        "Attention mask of a tree before and after reordering",
        f"An attention kernel skips {BLOCK} x {BLOCK} blocks that are empty. Depth first"
        " (ours) and along heavy paths (the paper's: the child with the largest subtree first),"
        " every subtree is a run of rows, and fewer blocks are touched; who sees whom is the same."
        " Shaded: the blocks of the first tree.",
        lambda artifacts: [mask_order],
    ),
    Entry(
        "Blocks of the attention mask by tree size and prefix",
        "The prefix is seen by every row, so its blocks are never empty: the longer it is, the less"
        " an order of the rows can save.",
        lambda artifacts: [mask_sizes],
    ),
)
