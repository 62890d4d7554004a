"""Tables of tensors whose rows are positions: their blockwise computation, and the columns of a
distribution.

A draft with a small vocabulary gives all other tokens probability 0. For the acceptance of its
tokens and for residuals, only the target's total probability of those other tokens matters: they
are one column, after those of the draft's tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Self, TypeVar

import torch
from torch import Tensor

from data_gen.settings import HarvestSettings
from decoding.models.cached_lm import CachedLM
from decoding.sampling import Warp

# Numbers computed at once on a CPU: as many as fit a core's cache; a whole batch takes three times
# as long.
AT_ONCE = 200_000


@dataclass(frozen=True)
class Columns:
    """A dataclass of tensors with the same rows, [n, ...] each."""

    def take(self, rows: Tensor | slice) -> Self:
        if isinstance(rows, Tensor):
            rows = rows.to(next(iter(vars(self).values())).device)  # once for all columns
        return type(self)(**{name: column[rows] for name, column in vars(self).items()})

    @classmethod
    def join(
        cls,
        parts: Sequence[Self],
        how: Callable[[list[Tensor], int], Tensor] = torch.cat,
        dim: int = 0,
    ) -> Self:
        """Join parts, keeping the columns of this class where they have more."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: how([getattr(part, name) for part in parts], dim) for name in names})


ColumnsT = TypeVar("ColumnsT", bound=Columns)


def blockwise(distribution: Callable[..., ColumnsT], *rows: Tensor) -> ColumnsT:
    """Return `distribution(*rows)` of rows [n, ...], computed a few rows at a time on a CPU."""
    parts = [distribution(*block) for block in blocks(*rows)]
    return type(parts[0]).join(parts)


def blocks(*rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same few rows of each at a time. rows: [n, ...] each."""
    size = count = max(1, len(rows[0]))
    if rows[0].device.type == "cpu":
        size = max(1, AT_ONCE * count // max(1, *(each.numel() for each in rows)))
    return zip(*(each.split(size) for each in rows), strict=True)


def at(probs: Tensor, tokens: Tensor) -> Tensor:
    """Return probs [..., V] at tokens [...]."""
    return probs.gather(-1, tokens[..., None]).squeeze(-1)


@dataclass(frozen=True)
class OwnTokens:
    """Columns of a distribution: those of `tokens` [k], increasing, and one for all others of
    `vocab_size`; None: one for each token of the vocabulary."""

    tokens: Tensor | None
    vocab_size: int

    @classmethod
    def of(cls, draft: CachedLM) -> Self:
        """Return the columns of the logits that a draft currently gives."""
        return cls(draft.vocabulary if draft.merges else None, draft.vocab_size)

    @property
    def columns(self) -> int:
        return self.vocab_size if self.tokens is None else len(self.tokens) + 1

    def merged(self, probs: Tensor) -> Tensor:
        """Return the probabilities [n, V] of all tokens by column, [n, columns]."""
        if self.tokens is None:
            return probs
        own = probs.index_select(-1, self.tokens)
        rest = (probs.sum(-1, keepdim=True) - own.sum(-1, keepdim=True)).clamp_min_(0)
        return torch.cat([own, rest], -1)

    def ids(self, column: Tensor) -> Tensor:
        """Return the tokens of columns [...] that have one; negative numbers stay."""
        if self.tokens is None:
            return column
        return torch.where(column < 0, column, self.tokens[column.clamp(0, len(self.tokens) - 1)])

    def columns_of(self, ids: Tensor) -> Tensor:
        """Return the columns of proposed tokens [...]; negative numbers stay."""
        if self.tokens is None:
            return ids
        return torch.where(ids < 0, ids, torch.searchsorted(self.tokens, ids))


def may_merge(draft: CachedLM) -> bool:
    """Return whether the draft has a smaller vocabulary in the order of ids, so that ties go to the
    lowest."""
    tokens = draft.vocabulary
    return tokens is not None and bool((tokens.diff() > 0).all())


@dataclass(frozen=True)
class Warps:
    """Warps of both models, to distributions in the columns `own`, which are those of the draft's
    logits."""

    target: Warp
    draft: Warp
    own: OwnTokens

    @classmethod
    def of(cls, settings: HarvestSettings, draft: CachedLM) -> Self:
        return cls(settings.warp, settings.draft_warp, OwnTokens.of(draft))
