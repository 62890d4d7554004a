"""Two sources for one draft: the text so far where it repeats itself, the draft model elsewhere."""

from typing import Annotated

import torch
from pydantic import Field

from decoding.draft_tree import DraftStep, DraftTree
from decoding.interfaces import DraftStructure
from decoding.structures.lookup import Copies, copy
from runtime.settings.kinds import DraftLength


class Sources(DraftStructure):
    """Draw tokens until the text ends as it did before, then copy what followed.

    Before each draw the committed text and the draft so far are searched for an earlier occurrence
    of their last `ngram_max` tokens, then of fewer, down to `ngram_min`. A match ends the drawing,
    at once if the committed text has one, and what followed is copied as `Copies` says, without a
    forward of the draft. Elsewhere tokens are drawn as in `Chain`, at most `gamma_max`.

    Which source a token has depends on the tokens before it alone, so drawn ones have the
    distribution q they were drawn from and copied ones are point masses, with one-hot q. The stop
    rule is asked before each draw and sees drawn tokens only: none follows a copied one. What is
    copied and accepted the draft reads at the beginning of its next draw."""

    shape = "chain"
    max_siblings = 1
    asks_stop = True

    def __init__(
        self,
        gamma_max: Annotated[
            DraftLength, "no more tokens are drawn than this, whatever the stop rule says"
        ],
        ngram_max: Annotated[int, Field(ge=1, le=256), "tokens of the longest ending looked for"],
        ngram_min: Annotated[int, Field(ge=1, le=256), "tokens of the shortest ending looked for"],
        stretch: Annotated[DraftLength, "tokens copied for each that matched"],
    ) -> None:
        self.gamma_max, self.copies = gamma_max, Copies(ngram_max, ngram_min, stretch)

    def grow(self, tree: DraftTree) -> None:
        context = tree.context
        step, text = DraftStep(tree), context.committed
        drawn = min(self.gamma_max, context.max_depth)
        while step.count < context.max_copied:
            with tree.watch.stage("sample"):
                tokens = self.copies.of(text, context.max_copied - step.count)
            if tokens:
                return copy(tree, step.row, tokens)
            if step.count == drawn or step.stopped_by(tree.stop):
                return
            if step.draw() in context.eos_ids:
                return
            text = torch.cat([text, torch.tensor(step.tokens[-1:])])
