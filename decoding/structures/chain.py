"""One path of draft tokens."""

from typing import Annotated

from decoding.draft_tree import DraftStep, DraftTree
from decoding.interfaces import DraftStructure, StopRule
from runtime.settings.kinds import DraftLength


class Chain(DraftStructure):
    """Draw one token after another until the stop rule ends it, EOS is drawn, or `gamma_max` tokens
    are there.

    The limit on new tokens shortens the draft up front: it keeps one place for the residual or
    bonus token."""

    shape = "chain"
    max_siblings = 1
    asks_stop = True

    def __init__(
        self,
        gamma_max: Annotated[
            DraftLength, "no draft gets more tokens than this, whatever the stop rule says"
        ],
    ) -> None:
        self.gamma_max = gamma_max

    def grow(self, tree: DraftTree) -> None:
        draw_chain(DraftStep(tree), min(self.gamma_max, tree.context.max_depth), tree.stop)


def draw_chain(step: DraftStep, limit: int, stop: StopRule | None) -> bool:
    """Draw at most `limit` tokens from `step` on; return whether EOS ended it. stop: None for no
    rule."""
    while step.count < limit and not step.stopped_by(stop):
        if step.draw() in step.eos_ids:
            return True
    return False
