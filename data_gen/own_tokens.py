"""A harvest looks at a draft's distributions where the draft has any: at the tokens that it may
propose.

A draft with a small vocabulary gives all other tokens no probability. For the acceptance of its
tokens, for residuals and for what comes after it is enough to know what the target gives all of
those together: they are one column, behind the draft's own."""

from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.models.cached_lm import CachedLM
from decoding.sampling import Warp


@dataclass(frozen=True)
class OwnTokens:
    """Columns of a distribution: those of `tokens` [k], increasing, and one for all others of
    `vocab_size`; None: one for each token of the vocabulary."""

    tokens: Tensor | None
    vocab_size: int

    @property
    def columns(self) -> int:
        return self.vocab_size if self.tokens is None else len(self.tokens) + 1

    def merged(self, probs: Tensor) -> Tensor:
        """Probabilities [n, V] of all tokens, by column: [n, columns]."""
        if self.tokens is None:
            return probs
        own = probs.index_select(-1, self.tokens)
        rest = (probs.sum(-1, keepdim=True) - own.sum(-1, keepdim=True)).clamp_min_(0)
        return torch.cat([own, rest], -1)

    def ids(self, column: Tensor) -> Tensor:
        """The tokens of columns [...] that have one; what is negative stays."""
        if self.tokens is None:
            return column
        return torch.where(column < 0, column, self.tokens[column.clamp(0, len(self.tokens) - 1)])

    def columns_of(self, ids: Tensor) -> Tensor:
        """Where proposed tokens [...] stand; what is negative stays."""
        if self.tokens is None:
            return ids
        return torch.where(ids < 0, ids, torch.searchsorted(self.tokens, ids))


@dataclass(frozen=True)
class Warps:
    """Warps of both models, from logits to distributions that are compared, in the columns `own`,
    in which the draft's logits are given."""

    target: Warp
    draft: Warp
    own: OwnTokens


def own_tokens(draft: CachedLM) -> OwnTokens:
    """The columns of the logits that it gives now."""
    return OwnTokens(draft.vocabulary if draft.merges else None, draft.vocab_size)


def may_merge(draft: CachedLM) -> bool:
    """Whether its tokens are some of all, and in the order of their ids: ties go to the lowest."""
    tokens = draft.vocabulary
    return tokens is not None and bool((tokens.diff() > 0).all())
