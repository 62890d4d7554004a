"""DySpec: trees that grow where the draft puts its mass, siblings without replacement, nothing
pruned.

The value of a draw estimates the probability that it is reached and of use, taking the draft's
probabilities for acceptance (DySpec, section 4.1). With q the draft's distribution at a row, the
next draw there is worth

    reach(row) * (1 - q of the children it has),     reach(child y) = reach(row) * q[y],
    reach(root) = 1,

which is what the paper's products v R[y] and v (1 - R[y]) over the renormalised residuals R
telescope to. Whether to draw may depend on every token in the tree; a drawn one stays, whatever its
value."""

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Annotated

from pydantic import Field

from decoding.draft_tree import DraftTree
from decoding.interfaces import DraftStructure
from decoding.sampling import without_replacement
from runtime.settings.kinds import Nodes


@dataclass
class Position:
    """A row below which the next sibling may be drawn. left: 1 - q of the children it has."""

    row: int
    reach: float
    left: float = 1.0

    @property
    def value(self) -> float:
        return self.reach * self.left

    def took(self, tree: DraftTree, child: int) -> "Position":
        """Account for a child just drawn; return the position below it."""
        q = tree.drawn[child - 1]
        self.left -= q
        return Position(child, self.reach * q)


class DySpecHeap(DraftStructure):
    """`budget` draws, always the most valuable one next (DySpec, Algorithm 1).

    One draft forward per node that gets children; a leaf needs none."""

    shape = "tree"
    sibling_samplers = (without_replacement,)

    def __init__(
        self, budget: Annotated[Nodes, "tokens of a draft; the paper has 64 and 768"]
    ) -> None:
        self.budget = budget

    def grow(self, tree: DraftTree) -> None:
        positions = {0: Position(0, 1.0)}
        waiting = [(-1.0, 0)] if tree.may_grow(0) else []  # (-value, row)
        while waiting and len(tree.token) < self.budget:
            here = positions[heappop(waiting)[1]]
            child = tree.draw(here.row)
            if child is None:
                continue
            positions[child] = here.took(tree, child)
            for position in (here, positions[child]):
                if position.value > 0 and tree.may_grow(position.row):
                    heappush(waiting, (-position.value, position.row))


class DySpecLayers(DraftStructure):
    """Layer by layer, every draw worth more than `threshold`: one draft forward per layer (DySpec,
    Algorithm 2).

    The printed condition v < t is a typo for v > t. At most `cap` nodes: what it refuses are
    further draws, those below the least valuable rows of the layer first."""

    shape = "tree"
    sibling_samplers = (without_replacement,)

    def __init__(
        self,
        threshold: Annotated[
            float,
            Field(gt=0, lt=1),
            "draws worth more than this probability are made; about 1 / the number of tokens"
            " wanted",
        ],
        cap: Annotated[Nodes, "most tokens of a draft; draws beyond it are refused"],
    ) -> None:
        self.threshold, self.cap = threshold, cap

    def grow(self, tree: DraftTree) -> None:
        layer = [Position(0, 1.0)]
        while layer:
            # The most valuable first, no more than the cap leaves: each draws at least once
            layer = [p for p in layer if p.value > self.threshold and tree.may_grow(p.row)]
            layer.sort(key=lambda position: -position.value)
            layer, below = layer[: self.cap - len(tree.token)], list[Position]()
            tree.run(here.row for here in layer)
            for here in layer:
                while here.value > self.threshold and len(tree.token) < self.cap:
                    child = tree.draw(here.row)
                    if child is None:
                        break
                    below.append(here.took(tree, child))
            layer = below
