"""Which token of a distribution a uniform number stands for, and which token is the largest."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from runtime.errors import UserError

BLOCK = 256  # tokens: about the square root of a vocabulary
BELOW_ONE = 1 - 2.0**-52  # keeps a draw strictly below the total mass, whatever rounding does


def draw(probs: Tensor, generator: torch.Generator) -> Tensor:
    """One token per row from `probs` [..., V]: int64 [...]."""
    return pick(probs, torch.rand(probs.shape[:-1], dtype=torch.float64, generator=generator))


def pick(probs: Tensor, uniform: Tensor) -> Tensor:
    """The token each number of `uniform` [...] in [0, 1) stands for under `probs` [..., V]: int64
    [...].

    Inverse of the cumulative sum, searched in two steps as in `Pool`; sums of blocks have the
    precision of `probs`, all other sums are float64. Rows need not sum to exactly one; no token of
    probability 0 is drawn."""
    parts = _blocks(probs, 0.0)
    cumulative = parts.sum(-1).cumsum(-1, dtype=torch.float64)
    point = (uniform * BELOW_ONE).unsqueeze(-1) * cumulative[..., -1:]
    block = torch.searchsorted(cumulative, point, right=True)
    rest = point - torch.where(block > 0, cumulative.gather(-1, (block - 1).clamp_min(0)), 0.0)
    inner = _block(parts, block).cumsum(-1, dtype=torch.float64)
    below = inner[..., -1:].nextafter(
        inner.new_zeros(())
    )  # rounding may have put the point a little outside
    return (block * BLOCK + torch.searchsorted(inner, rest.minimum(below), right=True)).squeeze(-1)


def largest(values: Tensor) -> Tensor:
    """Index of the largest of `values` [..., V], the lowest on ties: int64 [...]. Twice as fast as
    `values.max`, and on the CPU, where numpy is good at it, ten times."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.asarray(values.detach().numpy().argmax(-1)))
    parts = _blocks(values, -math.inf)
    block = parts.amax(-1).max(-1, keepdim=True).indices
    return (block * BLOCK + _block(parts, block).max(-1, keepdim=True).indices).squeeze(-1)


def _blocks(rows: Tensor, fill: float) -> Tensor:
    """[..., V] -> [..., n, BLOCK], filled up behind the end."""
    missing = -rows.shape[-1] % BLOCK
    return (pad(rows, (0, missing), value=fill) if missing else rows).unflatten(-1, (-1, BLOCK))


def _block(parts: Tensor, index: Tensor) -> Tensor:
    """Of [..., n, BLOCK] the block `index` [..., 1]: [..., BLOCK]."""
    return parts.take_along_dim(index[..., None], -2).squeeze(-2)


def pool_of(probs: Tensor, peak: bool = False) -> "Pool | DevicePool":
    """A pool where `probs` [V] are. peak: `DevicePool.peak` is wanted, too."""
    return Pool(probs) if probs.device.type == "cpu" else DevicePool(probs, peak)


class Drawn(int):
    """A token and what a GPU sent along with it. q: its probability in the distribution that it was
    drawn from; noted: the numbers that `DevicePool.along` made of it."""

    q: float
    noted: list[float]

    @classmethod
    def of(cls, token: float, q: float, noted: list[float]) -> "Drawn":
        drawn = cls(token)
        drawn.q, drawn.noted = q, noted
        return drawn


class DevicePool:
    """`Pool` for a distribution on a GPU, where a wait costs more than the vocabulary: a draw looks
    at all of it and sends a few numbers to the host, once.

    along: of a token [1] that is drawn, more numbers [k] that go with it; peak: the most probable
    token, where it was asked for, from the first draw on"""

    along: Callable[[Tensor], Tensor] | None = None
    peak: Drawn | None = None

    def __init__(self, probs: Tensor, peak: bool = False) -> None:
        self._top = probs.max(-1, keepdim=True) if peak else None
        self._left = probs
        self._copied = False
        self._tokens: float | None = None  # that have a probability

    def pick(self, uniform: float) -> int:
        """See `Pool`, which draws where a sum made in parts, as a GPU makes it, rose or fell at a
        token of probability 0. Raises UserError where the distribution is none: the host learns of
        it here."""
        cumulative = self._left.cumsum(-1, dtype=torch.float64)
        mass = cumulative[-1:]
        point = (mass * (uniform * BELOW_ONE)).minimum(mass.nextafter(mass.new_zeros(())))
        token = torch.searchsorted(cumulative, point, right=True)
        token = token.clamp_max(len(self._left) - 1)
        own = self._left.gather(-1, token)
        parts = [torch.where(own > 0, token, -1), mass, own, self._left.count_nonzero()[None]]
        if self._top is not None:
            parts += [self._top.indices, self._top.values]
        if self.along is not None:
            parts.append(self.along(token))
        sent = torch.cat([part.double() for part in parts])
        found, total, q, self._tokens, *noted = sent.tolist()
        refuse_unless_finite(total)
        if self._top is not None:
            peak, mass, *noted = noted
            self.peak = Drawn.of(peak, mass, [])
        if found >= 0:
            return Drawn.of(found, q, noted)
        return Pool(self._left.cpu()).pick(uniform)

    def take(self, token: int) -> None:
        """Out of the pool for good: one that was drawn."""
        self._left = self._left if self._copied else self._left.clone()
        self._left[token], self._copied = 0, True
        self._tokens = None if self._tokens is None else self._tokens - 1

    @property
    def empty(self) -> bool:
        """Before the first draw a distribution has at least one token, which nobody asks for."""
        return self._tokens is not None and self._tokens <= 0

    def distribution(self) -> Tensor:
        """What is left, [V], not normalised."""
        return self._left.clone()


def refuse_unless_finite(number: float) -> None:
    """Raises UserError for a sum of probabilities, or a logit, that is none."""
    if not math.isfinite(number):
        raise UserError(
            "pair: a model returned NaN or infinite logits. Use a wider pair dtype, e.g. float32"
        )


class Pool:
    """A distribution to draw several tokens from, and to take tokens out of: [V], which need not
    sum to exactly one.

    The inverse of the cumulative sum as in `pick`, searched in two steps: sums of blocks are kept,
    so that a draw looks at one block instead of the vocabulary, and taking a token out changes one
    sum. `probs` is not copied and must not change while the pool lives. Between two forwards
    nothing is in a core's cache, so it counts what code runs: a few hundred numbers are added up in
    Python sooner than a library for arrays is woken."""

    def __init__(self, probs: Tensor) -> None:
        self._probs = probs
        whole = len(probs) // BLOCK * BLOCK
        blocks = probs if whole == len(probs) else probs[:whole]
        self._sums: list[float] = blocks.view(-1, BLOCK).sum(-1).tolist()
        if whole < len(probs):
            self._sums.append(probs[whole:].sum().item())
        self._masses: dict[int, list[float]] = {}  # of the blocks looked at so far
        self._taken: list[int] = []

    def pick(self, uniform: float) -> int:
        """The token that `uniform` in [0, 1) stands for; none of probability 0."""
        block, rest = _search(self._sums, uniform * BELOW_ONE * sum(self._sums))
        return block * BLOCK + _search(self._block(block), rest)[0]

    def take(self, token: int) -> None:
        """Out of the pool for good."""
        block, place = divmod(token, BLOCK)
        masses = self._block(block)
        masses[place] = 0.0
        self._sums[block] = sum(masses)
        self._taken.append(token)

    @property
    def empty(self) -> bool:
        return not any(self._sums)

    def distribution(self) -> Tensor:
        """What is left, [V], not normalised."""
        left = self._probs.clone()
        left[self._taken] = 0
        return left

    def _block(self, block: int) -> list[float]:
        """Its tokens' masses, without those taken out."""
        if block not in self._masses:
            self._masses[block] = self._probs[block * BLOCK : (block + 1) * BLOCK].tolist()
        return self._masses[block]


def _search(masses: Sequence[float], point: float) -> tuple[int, float]:
    """Which of `masses`, laid end to end, the `point` >= 0 falls into, never one of 0, and how far.
    Rounding may have put the point behind the last one: that is the last one's end."""
    for index, mass in enumerate(masses):
        if point < mass:
            return index, point
        point -= mass
    last = max((index for index, mass in enumerate(masses) if mass > 0), default=-1)
    assert last >= 0, "a distribution has at least one token"
    return last, masses[last]
