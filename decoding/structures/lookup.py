"""Prompt lookup: the text so far is the draft model."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from torch import Tensor

from decoding.draft_tree import DraftTree
from decoding.interfaces import DraftStructure
from runtime.errors import UserError
from runtime.settings.kinds import DraftLength


class Lookup(DraftStructure):
    """Copy up to `gamma` tokens from where the text last looked the way it ends now.

    Looks for an earlier occurrence of the last `ngram_max` committed tokens, then of fewer, down to
    `ngram_min`; of several the latest counts. Nothing is drawn, so each token is verified as a
    point mass: its q is one-hot, for which every sibling distribution and every rule is exact. No
    match, no draft. A copy that reaches the end of the text goes on with what it has copied, as in
    LZ77, so loops of any period are followed."""

    shape = "chain"
    max_siblings = 1
    uses_draft = False

    def __init__(
        self,
        ngram_max: Annotated[int, Field(ge=1, le=256), "tokens of the longest ending looked for"],
        ngram_min: Annotated[int, Field(ge=1, le=256), "tokens of the shortest ending looked for"],
        gamma: Annotated[DraftLength, "most tokens copied"],
    ) -> None:
        self.ngrams = ngram_sizes(ngram_max, ngram_min)
        self.gamma = gamma

    def grow(self, tree: DraftTree) -> None:
        with tree.watch.stage("sample"):
            text, most = tree.context.committed, min(self.gamma, tree.context.max_copied)
            match = longest_match(text, self.ngrams)
            tokens = following(text, match[0], most) if match else []
        copy(tree, 0, tokens)


class Copies:
    """Copies what followed an earlier occurrence of the text's last tokens: `stretch` tokens for
    each that matched (alpha of SuffixDecoding, 2411.04975), since longer matches are more
    reliable."""

    def __init__(
        self,
        ngram_max: Annotated[int, Field(ge=1, le=256), "tokens of the longest ending looked for"],
        ngram_min: Annotated[int, Field(ge=1, le=256), "tokens of the shortest ending looked for"],
        stretch: Annotated[DraftLength, "tokens copied for each that matched"],
    ) -> None:
        self.ngrams, self.stretch = ngram_sizes(ngram_max, ngram_min), stretch

    def of(self, text: Tensor, most: int) -> list[int]:
        """Return at most `most` tokens; [] if the end of `text` [n] did not occur before."""
        match = longest_match(text, self.ngrams)
        if match is None:
            return []
        return following(text, match[0], min(self.stretch * match[1], most))


def ngram_sizes(ngram_max: int, ngram_min: int) -> range:
    """Return sizes from the longest to the shortest; UserError where there are none."""
    if ngram_min > ngram_max:
        raise UserError(
            f"structure.ngram_min: expected at most structure.ngram_max = {ngram_max}, got"
            f" {ngram_min}. Lower it"
        )
    return range(ngram_max, ngram_min - 1, -1)


def copy(tree: DraftTree, row: int, tokens: Sequence[int]) -> None:
    """Add `tokens` below `row` up to the first EOS: point masses, without a forward."""
    with tree.watch.stage("sample"):
        for token in tokens:
            row = tree.copy(row, token)
            if token in tree.context.eos_ids:
                return


def longest_match(text: Tensor, ngrams: Sequence[int]) -> tuple[int, int] | None:
    """Return where the longest n-gram that ends `text` [n] occurred before: the index after the
    latest occurrence, and n. None where nothing occurred before.

    ngrams: sizes, the longest first, without gaps."""
    longest, size = ngrams[0], ngrams[-1]
    if len(text) <= size:
        return None
    ends = (text[:-1].unfold(0, size, 1) == text[-size:]).all(1).nonzero()[:, 0] + size
    while len(ends) and size < longest:
        earlier = ends[ends > size]
        longer = earlier[text[earlier - size - 1] == text[-size - 1]]
        if not len(longer):
            break
        ends, size = longer, size + 1
    return (int(ends[-1]), size) if len(ends) else None


def following(text: Tensor, end: int, count: int) -> list[int]:
    """Return `count` tokens from index `end` of `text` on, and of the copy from its end on."""
    period, copied = len(text) - end, text[end : end + count].tolist()
    return [copied[i % period] for i in range(count)]
