"""EAGLE-2 (2406.16858): expand the likeliest tokens layer by layer, then keep the likeliest of
all."""

from typing import Annotated

from decoding.draft_tree import DraftTree
from decoding.interfaces import DraftStructure
from decoding.sampling import top_tokens
from runtime.settings.kinds import DraftLength, Nodes


class Reranked(DraftStructure):
    """Layers in which the `width` nodes of the highest product of q get their `width` most probable
    tokens as children; of all nodes the `nodes` with the highest product are kept.

    Nothing is drawn by chance: which tokens are candidates, and which of them are kept, follows
    from the committed text. So pruning is exact whatever the target's temperature, given that the
    candidates are verified as what they are, point masses. It is not where they were drawn."""

    shape = "tree"
    sibling_samplers = (top_tokens,)

    def __init__(
        self,
        width: Annotated[Nodes, "nodes of a layer that get children, and children of each"],
        depth: Annotated[DraftLength, "layers, a draft forward each"],
        nodes: Annotated[Nodes, "tokens that are kept"],
    ) -> None:
        self.width, self.depth, self.nodes = width, depth, nodes

    def grow(self, tree: DraftTree) -> None:
        product, layer = [1.0], [0]
        for _ in range(self.depth):
            layer = [row for row in layer if tree.may_grow(row)]
            layer = sorted(layer, key=lambda row: -product[row])[: self.width]
            tree.run(layer)
            below = list[int]()
            for row in layer:
                for _ in range(self.width):
                    child = tree.draw(row)
                    if child is None:
                        break
                    product.append(product[row] * tree.drawn[child - 1])
                    below.append(child)
            layer = below
        rows = sorted(range(1, len(product)), key=lambda row: -product[row])  # parents first
        tree.keep(sorted(rows[: self.nodes]))
