"""Two sources for one draft: the text so far where it repeats itself, the draft model elsewhere."""

from collections.abc import Sequence
from pathlib import Path

import torch

from decoding.draft import RoundContext
from decoding.draft_tree import DraftStep, DraftTree, StopRule
from decoding.sampling import Sampler, SiblingSampler
from decoding.structures.lookup import copy, following, longest_match, ngram_sizes
from predictors.base import load_predictor
from predictors.copies import Copies
from runtime.errors import UserError, checked_count

KEY = "structure.copies"


class Sources:
    """Draw tokens until the text ends as it did before, then copy what followed.

    Before each draw the committed text and the draft so far are searched for an earlier occurrence
    of their last `ngram_max` tokens, then of fewer, down to `ngram_min`. A match ends the drawing,
    at once if the committed text has one, and its length says how far to trust it: `stretch` tokens
    are copied for each that matched (SuffixDecoding, 2411.04975, where it is called alpha), without
    a forward of the draft. Elsewhere tokens are drawn as in `Chain`, at most `gamma_max`.

    With `copies`, the checkpoint of a predictor, that says whether and how far: a match counts
    where the first copied token is accepted with a probability of at least `first`, and tokens are
    copied as long as everything up to them is with at least `eps`, as in SpecDec++. Drawn tokens
    before the copy count with the probability they had in the draft; behind unlikely ones a match
    still ends the draft, with no copy at all.

    Which source a token has depends on the tokens before it alone, so drawn ones have the
    distribution q they were drawn from and copied ones are point masses, with one-hot q. The stop
    rule is asked before each draw and sees drawn tokens only: none follows a copied one. What is
    copied and accepted the draft reads at the beginning of its next draw."""

    shape = "chain"
    sibling_samplers = None
    max_siblings = 1
    asks_stop = True
    uses_draft = True

    def __init__(
        self,
        gamma_max: int,
        ngram_max: int,
        ngram_min: int,
        stretch: int,
        copies: str | Path | None = None,
        first: float = 0.4,
        eps: float = 0.1,
    ) -> None:
        self.gamma_max = checked_count("structure.gamma_max", gamma_max)
        self.ngrams = ngram_sizes(ngram_max, ngram_min)
        self.stretch = checked_count("structure.stretch", stretch)
        self.first, self.eps = checked_threshold("first", first), checked_threshold("eps", eps)
        self.chances: dict[
            int, Sequence[float]
        ] = {}  # by the length of a match: 1, 2, ... copied tokens are accepted
        if copies is not None:
            predictor = load_copies(copies, self.ngrams)
            self.chances = {size: predictor.all_accepted(size) for size in self.ngrams}

    def grow(
        self,
        tree: DraftTree,
        context: RoundContext,
        stop: StopRule,
        siblings: SiblingSampler,
        sampler: Sampler,
    ) -> None:
        step, text, survival = DraftStep(tree), context.committed, 1.0
        while step.count < context.max_depth:
            with tree.watch.stage("sample"):
                match = longest_match(text, self.ngrams)
                length = None if match is None else self.length(match[1], survival)
            if match is not None and length is not None:
                count = min(length, context.max_depth - step.count)
                return copy(tree, step.row, following(text, match[0], count), context.eos_ids)
            if step.count == self.gamma_max or step.stopped_by(stop):
                return
            if step.draw(siblings, sampler) in context.eos_ids:
                return
            text = torch.cat([text, torch.tensor(step.tokens[-1:])])
            if self.chances:
                survival *= step.drawn_unwarped_q()

    def length(self, size: int, survival: float = 1.0) -> int | None:
        """Tokens to copy after a match of `size` behind drawn tokens that are all accepted with
        probability `survival`; None where the match does not count."""
        if not self.chances:
            return self.stretch * size
        chances = self.chances[size]
        return (
            sum(survival * chance >= self.eps for chance in chances)
            if chances[0] >= self.first
            else None
        )


def load_copies(checkpoint: str | Path, ngrams: Sequence[int]) -> Copies:
    """A predictor of copies after matches of the sizes `ngrams`, the longest first, or
    UserError."""
    predictor = load_predictor(checkpoint, key=KEY)
    if not isinstance(predictor, Copies):
        raise UserError(
            f"{KEY}: {checkpoint} holds {predictor.name!r}, which knows nothing of copies. "
            "Train one that does: python train.py predictor=copies"
        )
    if predictor.ngram_max != ngrams[0] or predictor.ngram_min > ngrams[-1]:
        raise UserError(
            f"{KEY}: {checkpoint} was trained with n-grams of {predictor.ngram_min} to"
            f" {predictor.ngram_max} tokens, this run has structure.ngram_min={ngrams[-1]},"
            f" structure.ngram_max={ngrams[0]}. Use the former, or train for these: python train.py"
            " predictor=copies predictor.ngram_min=... predictor.ngram_max=..."
        )
    return predictor


def checked_threshold(name: str, value: float) -> float:
    if type(value) not in (int, float) or not 0 <= value <= 1:
        raise UserError(
            f"structure.{name}: {value} is no probability. Give one from 0 to 1, such as 0.1"
        )
    return value
