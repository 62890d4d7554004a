"""Verification of draft tokens: their distributions, and the outcome that a rule gives them, i.e.
the end of the accepted path and the distribution of the token after it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from decoding.draft import Draft, Shape, Verdict
from decoding.picking import certain_token, refuse_unless_finite
from decoding.processors import Processed
from decoding.sampling import Sampler, SiblingSampler, Warp, iid
from decoding.together import brought


@dataclass(frozen=True)
class VerdictDistribution:
    """The distribution of one round's outcome, without a random number.

    end_prob: [n + 1] float64, probability that the accepted path ends at each row of the draft;
    sums to 1.
    residual: row -> [V], distribution of the token committed after that row; None where nothing
    follows."""

    end_prob: Tensor
    residual: Callable[[int], Tensor | None]


class WarpedRows:
    """Target distributions [V] after each row of a draft, warped when they are first read: a walk
    down a tree reads few.

    Logits that are not finite raise only when their row is read.
    """

    def __init__(
        self, logits: Tensor, warp: Warp, text: Callable[[int], Tensor] | None = None
    ) -> None:
        """logits: [closed + 1, V]; text: gives the text [n] up to a row, for warps that read it."""
        self._logits, self._warp, self._text = logits, warp, text
        self._distributions: dict[int, Tensor] = {}
        self._noted: dict[tuple[int, int], float] = {}  # p of tokens, sent by a device

    def note(self, row: int, token: int, p: float) -> None:
        """Note `self[row][token]`, which is on the host already."""
        self._noted[row, token] = p

    @property
    def device(self) -> torch.device:
        return self._logits.device

    def __getitem__(self, row: int) -> Tensor:
        if row not in self._distributions:
            if self._text and isinstance(self._warp, Processed):
                warp = self._warp.after(partial(self._text, row))
                self._distributions[row] = warp.probs(self._logits[row])
            elif self.device.type != "cpu":  # a GPU warps all of them as fast as one
                rows = self._warp.probs(self._logits)
                self._distributions = dict(enumerate(rows.unbind()))
            else:
                self._distributions[row] = self._warp.probs(self._logits[row])
        return self._distributions[row]

    def drawn(self, parents: Sequence[int], tokens: Sequence[int]) -> list[float | None]:
        """Return p of each token after its parent's row; None if that row was not read: rows are
        not warped for the record alone."""
        p = [self._noted.get(pair) for pair in zip(parents, tokens, strict=True)]
        missing = [
            node
            for node, row in enumerate(parents)
            if p[node] is None and row in self._distributions
        ]
        read = numbers([self._distributions[parents[node]][tokens[node]] for node in missing])
        for node, value in zip(missing, read, strict=True):
            p[node] = value
        return p


def numbers(scalars: Sequence[Tensor]) -> list[float]:
    """Return probabilities [] as numbers: those of a device in one copy, refused where one is no
    number."""
    if not scalars or scalars[0].device.type == "cpu":
        return [scalar.item() for scalar in scalars]
    sent: list[float] = brought(torch.stack(list(scalars)))
    refuse_unless_finite(sum(sent))
    return sent


Rows = Tensor | WarpedRows
"""p, by row."""


@dataclass(frozen=True)
class DraftPath:
    """A path down a draft. Its rows are read in place; no [V] is copied until a rule asks for it.

    rows:  [g + 1] the row the path starts from, then the row of each of its g tokens
    first: [V], the target distribution the first token is tested against: p[rows[0]], or what
    earlier drafts left of it"""

    draft: Draft
    p: Rows
    rows: Sequence[int]
    first: Tensor

    @classmethod
    def whole(cls, draft: Draft, p: Rows) -> "DraftPath":
        """Return the one path of a chain, from the last committed token on."""
        assert draft.is_chain, "this verifier is exact for chains only"
        return cls(draft, p, range(len(draft) + 1), p[0])

    def __len__(self) -> int:
        return len(self.rows) - 1

    def target(self, t: int) -> Tensor:
        """Return the target distribution after t tokens, [V]."""
        return self.p[self.rows[t]] if t else self.first

    def after(self) -> Tensor | None:
        """Return the distribution after the whole path is accepted, [V]; None if its last token is
        an open leaf."""
        return None if self.rows[-1] > self.draft.closed else self.target(len(self))

    def q(self, t: int) -> Tensor:
        """Return the distribution token t + 1 was drawn from, [V]."""
        return self.draft.q[self.rows[t]]

    def drawn(self) -> Iterator[tuple[float, float]]:
        """Yield p and q of each token: on the host one by one, so that only rows that are read are
        warped; from a device all at once."""
        if self.first.device.type != "cpu":
            yield from self.drawn_with([])[0]
            return
        for t, row in enumerate(self.rows[1:]):
            token = self.draft.token[row - 1]
            known = self.draft.drawn_q
            q = known[row - 1] if known else self.q(t)[token].item()
            assert q > 0, "a drawn token has q > 0"
            yield self.target(t)[token].item(), q

    def drawn_with(self, more: Sequence[Tensor]) -> tuple[list[tuple[float, float]], list[float]]:
        """Return p and q of each token and `more` numbers [], in one copy from their device."""
        tokens = [self.draft.token[row - 1] for row in self.rows[1:]]
        known = [self.draft.drawn_q[row - 1] for row in self.rows[1:]] if self.draft.drawn_q else []
        sides = (self.target,) if known else (self.target, self.q)
        drawn = [side(t)[x].double() for side in sides for t, x in enumerate(tokens)]
        sent, count = numbers([*drawn, *more]), len(tokens)
        p, q = sent[:count], known or sent[count : 2 * count]
        if isinstance(self.p, WarpedRows):
            for t, token in enumerate(tokens):
                if t or self.first is self.p[self.rows[0]]:
                    self.p.note(self.rows[t], token, p[t])
        return list(zip(p, q, strict=True)), sent[len(drawn) :]


class ChainVerifier(ABC):
    """A rule for one path, and so for a chain and for pending tokens."""

    lossless = True
    siblings: SiblingSampler = staticmethod(iid)
    shapes: tuple[Shape, ...] = ("chain",)
    max_siblings = 1

    @abstractmethod
    def on_path(self, path: DraftPath) -> VerdictDistribution:
        """Return the distribution of the path's end: row t stands for t accepted tokens."""

    @abstractmethod
    def walk(self, path: DraftPath, sampler: Sampler) -> tuple[int, Tensor | None]:
        """Draw from `on_path`, reading only what is needed: return the number of tokens accepted,
        and the distribution [V] of the token that follows (None after an open leaf)."""

    def distribution(self, draft: Draft, p: Tensor) -> VerdictDistribution:
        return self.on_path(DraftPath.whole(draft, p))

    def verify(self, draft: Draft, p: Rows, sampler: Sampler) -> Verdict:
        return verdict_at(draft, *self.walk(DraftPath.whole(draft, p), sampler), sampler)


def sample_verdict(draft: Draft, distribution: VerdictDistribution, sampler: Sampler) -> Verdict:
    """Draw a verdict from its distribution: first the end of the path, then the token after it."""
    row = sampler.draw(distribution.end_prob).token
    return verdict_at(draft, row, distribution.residual(row), sampler)


def verdict_at(draft: Draft, row: int, residual: Tensor | None, sampler: Sampler) -> Verdict:
    """Return the verdict that ends at `row`, its last token drawn from `residual` [V]."""
    token = None if residual is None else sampler.draw(residual).token
    return Verdict(row, draft.path(row), token, draft.closed + bool(draft.open))


def residual_distribution(p: Tensor, q: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """Return norm([scale * p - q]+), [V], or of many rows [m, V], with a scale [m] each. Where no
    mass is left, the row is never reached, and p is returned; so what is left of a point mass is
    itself."""
    if certain_token(p) is not None:
        return p
    if isinstance(scale, Tensor):
        short = torch.addcmul(q, p, scale.to(p)[:, None], value=-1).clamp_(max=0)
    else:  # fused: p * scale alone may be subnormal, which is slow
        short = torch.sub(q, p, alpha=scale).clamp_(max=0)
    if p.device.type == "cpu" and p.dim() == 1 and not isinstance(scale, Tensor):
        mass = -short.sum().item()  # all of one sign, so nothing cancels
        return short.div_(-mass) if mass > 0 else p
    total = -short.sum(-1, keepdim=True)  # stays on the device
    return torch.where(total > 0, short.div_(-total), p)
