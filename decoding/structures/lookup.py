"""Prompt lookup: the text so far is the draft model."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from decoding.draft import RoundContext
from decoding.growth import DraftTree, StopRule
from decoding.sampling import Sampler, SiblingLaw
from predictors.errors import UserError, checked_count


class Lookup:
    """Copy up to `gamma` tokens from where the text last looked the way it ends now.

    Looks for an earlier occurrence of the last `ngram_max` committed tokens, then of fewer, down to `ngram_min`; of
    several the latest counts. Nothing is drawn, so each token is verified as a point mass: its q is one-hot, for which
    every sibling law and every rule is exact. No match, no draft. A copy that reaches the end of the text goes on with
    what it has copied, as in LZ77, so loops of any period are followed.
    """

    shape = "chain"
    sibling_laws = None
    max_siblings = 1
    asks_stop = False
    uses_draft = False

    def __init__(self, ngram_max: int, ngram_min: int, gamma: int) -> None:
        longest = checked_count("structure.ngram_max", ngram_max)
        shortest = checked_count("structure.ngram_min", ngram_min)
        if shortest > longest:
            raise UserError(f"structure.ngram_min: {ngram_min} must be from 1 to structure.ngram_max = {ngram_max}")
        self.ngrams = range(longest, shortest - 1, -1)
        self.gamma = checked_count("structure.gamma", gamma)

    def grow(
        self, tree: DraftTree, context: RoundContext, stop: StopRule, siblings: SiblingLaw, sampler: Sampler
    ) -> None:
        row = 0
        with tree.watch.stage("sample"):
            for token in continuation(context.committed, self.ngrams, min(self.gamma, context.max_depth)):
                tree.set_law(row, one_hot(torch.tensor(token), tree.vocab_size).float())
                row = tree.add(row, token)
                if token in context.eos_ids:
                    return


def continuation(text: Tensor, ngrams: Sequence[int], count: int) -> list[int]:
    """`count` tokens after the latest earlier occurrence of the longest n-gram that ends `text` [n]; [] for none."""
    for ngram in ngrams:
        end = latest_match(text, ngram)
        if end is not None:
            period, copy = len(text) - end, text[end:].tolist()
            return [copy[i % period] for i in range(count)]
    return []


def latest_match(text: Tensor, ngram: int) -> int | None:
    """Where the last `ngram` tokens of `text` occurred before: the index after the latest occurrence."""
    if len(text) <= ngram:
        return None
    found = (text[:-1].unfold(0, ngram, 1) == text[-ngram:]).all(1).nonzero()
    return int(found[-1]) + ngram if len(found) else None
