"""Trees whose shape (the draws, not the tokens) is fixed before the round."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from decoding.draft import Shape, children_of
from decoding.draft_tree import DraftTree
from decoding.interfaces import DraftStructure
from decoding.sampling import iid
from runtime.settings.kinds import Widths

PlannedRow = tuple[int, int]
"""A row of the tree being drawn, and the row of the plan it stands for."""


class StaticTree(DraftStructure):
    """A plan given by parent rows, drawn layer by layer: one draft forward per layer, siblings by
    the verifier's distribution.

    parents: of rows 1, 2, ... of the plan, each before its children. The b-th candidate drawn at a
    position gets the b-th child's subtree. Where a distribution has no more candidates, or the path
    ends (EOS, `max_depth`), the plan's remaining rows there are missing."""

    shape: Shape = "tree"

    def __init__(self, parents: Sequence[int]) -> None:
        self._children = children_of(parents)
        self.max_siblings = max(map(len, self._children))

    def grow(self, tree: DraftTree) -> None:
        layer: list[PlannedRow] = [(0, 0)]
        while layer:
            inner = [
                (row, self._children[planned])
                for row, planned in layer
                if self._children[planned] and tree.may_grow(row)
            ]
            tree.run(row for row, _ in inner)
            layer = []
            for row, children in inner:
                for child in children:
                    drawn = tree.draw(row)
                    if drawn is None:
                        break
                    layer.append((drawn, child))


class WidthTree(StaticTree):
    """Every node of depth d has `widths[d]` children."""

    def __init__(self, widths: Annotated[Widths, "children of every node, per depth"]) -> None:
        super().__init__(width_parents(widths))


class SpecInfer(WidthTree):
    """Static widths with independent siblings, duplicates kept (SpecInfer, 2305.09781)."""

    sibling_samplers = (iid,)


class ParallelPaths(StaticTree):
    """`paths` drafts of `gamma` tokens that share only the last committed token.

    Their first tokens are siblings, drawn by the verifier's distribution; equal ones stay separate
    paths. From there on each goes its own way. All of them together cost one draft forward per
    depth."""

    shape = "paths"

    def __init__(
        self,
        paths: Annotated[int, Field(ge=1, le=64), "drafts side by side"],
        gamma: Annotated[int, Field(ge=1, le=64), "tokens of each"],
    ) -> None:
        super().__init__(width_parents([paths] + [1] * (gamma - 1)))


def width_parents(widths: Sequence[int]) -> list[int]:
    """Return the parent rows of the tree with these widths, layer by layer."""
    parents, layer = list[int](), range(1)
    for width in widths:
        parents += [row for row in layer for _ in range(width)]
        layer = range(layer.stop, len(parents) + 1)
    return parents
