"""One path and, at its end, candidates for the position after it that the target is not run on."""

from typing import Annotated

from pydantic import Field

from decoding.draft import Shape
from decoding.draft_tree import DraftStep, DraftTree
from decoding.interfaces import DraftStructure
from decoding.structures.chain import draw_chain
from runtime.settings.kinds import DraftLength


class BranchPoint(DraftStructure):
    """A chain under the stop rule, then `candidates` siblings at its end as open leaves
    (SpecBranch's branch point).

    An accepted candidate is the last token of the round: the target's distribution after it is not
    known yet. So the chain may be as long as any, the candidates stand where the residual or bonus
    token would, and an EOS has none after it. Their number is fixed, which is exact for every
    sibling distribution; SpecBranch derives it from q of the first one."""

    shape: Shape = "branch_point"
    asks_stop = True

    def __init__(
        self,
        gamma_max: Annotated[
            DraftLength, "no chain gets more tokens than this, whatever the stop rule says"
        ],
        candidates: Annotated[int, Field(ge=1, le=64), "tokens tried at the end of the chain"],
    ) -> None:
        self.gamma_max, self.candidates = gamma_max, candidates
        self.max_siblings = candidates

    def grow(self, tree: DraftTree) -> None:
        step, limit = DraftStep(tree), min(self.gamma_max, tree.context.max_depth)
        if tree.context.beyond_draft or draw_chain(step, limit, tree.stop):
            return
        rows = (tree.draw(step.row) for _ in range(self.candidates))
        tree.open = sum(row is not None for row in rows)
