"""Inverse sampling of tokens from uniform numbers, and the arg max of large vocabularies."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from decoding.together import brought
from runtime.errors import UserError

BLOCK = 256  # tokens: about the square root of a vocabulary
BELOW_ONE = 1 - 2.0**-52  # keeps a draw strictly below the total mass, whatever rounding does


def draw(probs: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one token per row of `probs` [..., V]: int64 [...]."""
    return pick(probs, torch.rand(probs.shape[:-1], dtype=torch.float64, generator=generator))


def pick(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the token that each number of `uniform` [...] in [0, 1) stands for under `probs`
    [..., V]: int64 [...].

    Inverse of the cumulative sum, searched in two steps as in `Pool`; sums of blocks have the
    precision of `probs`, all other sums are float64. Rows need not sum to exactly one; no token of
    probability 0 is drawn."""
    parts = _blocks(probs, 0.0)
    cumulative = parts.sum(-1).cumsum(-1, dtype=torch.float64)
    point = (uniform * BELOW_ONE).unsqueeze(-1) * cumulative[..., -1:]
    block = torch.searchsorted(cumulative, point, right=True)
    rest = point - torch.where(block > 0, cumulative.gather(-1, (block - 1).clamp_min(0)), 0.0)
    inner = _block(parts, block).cumsum(-1, dtype=torch.float64)
    # Rounding may have put the point a little outside
    below = inner[..., -1:].nextafter(inner.new_zeros(()))
    return (block * BLOCK + torch.searchsorted(inner, rest.minimum(below), right=True)).squeeze(-1)


def largest(values: Tensor) -> Tensor:
    """Return the index of the largest of `values` [..., V], the lowest on ties: int64 [...]. Twice
    as fast as `values.max`, and on the CPU, where numpy is good at it, ten times."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.asarray(values.detach().numpy().argmax(-1)))
    parts = _blocks(values, -math.inf)
    block = parts.amax(-1).max(-1, keepdim=True).indices
    return (block * BLOCK + _block(parts, block).max(-1, keepdim=True).indices).squeeze(-1)


def _blocks(rows: Tensor, fill: float) -> Tensor:
    """Return [..., V] as [..., n, BLOCK], padded at the end."""
    missing = -rows.shape[-1] % BLOCK
    return (pad(rows, (0, missing), value=fill) if missing else rows).unflatten(-1, (-1, BLOCK))


def _block(parts: Tensor, index: Tensor) -> Tensor:
    """Return the block `index` [..., 1] of [..., n, BLOCK]: [..., BLOCK]."""
    return parts.take_along_dim(index[..., None], -2).squeeze(-2)


_masses = dict[tuple[int, torch.dtype], Tensor]()  # [2 V - 1]: zeros around a one


def point_mass(token: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return the distribution [size] of one token on the CPU: a view of numbers that all of them
    share, to be read only."""
    masses = _masses.get((size, dtype))
    if masses is None:
        with torch.inference_mode(False):
            masses = torch.zeros(2 * size - 1, dtype=dtype)
            masses[size - 1] = 1
        _masses[size, dtype] = masses
    return masses.narrow(0, size - 1 - token, size)


def certain_token(probs: Tensor) -> int | None:
    """Return the token that a `point_mass` is the distribution of; None for any other tensor."""
    if probs.device.type != "cpu" or probs.dim() != 1 or probs.stride() != (1,):
        return None
    masses = _masses.get((probs.size(0), probs.dtype))
    if masses is None:
        return None
    if probs.untyped_storage().data_ptr() != masses.untyped_storage().data_ptr():
        return None
    return probs.size(0) - 1 - int(probs.storage_offset())


class Draw(NamedTuple):
    """A drawn token. q: its probability in the distribution it was drawn from; noted: numbers that
    a device sent with it (`pool_of`)."""

    token: int
    q: float
    noted: Sequence[float] = ()


def refuse_unless_finite(number: float) -> None:
    """Raise UserError for a sum of probabilities, or a logit, that is no number."""
    if not math.isfinite(number):
        raise UserError(
            "pair: a model returned NaN or infinite logits. Use a wider pair dtype, e.g. float32"
        )


class HostPool:
    """A distribution [V] on the CPU from which several tokens are drawn and removed. It need not
    sum to exactly one, is not copied and must not change while the pool lives.

    Inverts the cumulative sum as `pick` does, in two steps: sums of blocks are kept, so that a draw
    reads one block instead of the vocabulary, and removing a token changes one sum. Between two
    forwards a core's cache is cold: adding up a few hundred numbers in Python is then faster than
    calling numpy or torch."""

    def __init__(self, probs: Tensor) -> None:
        self._probs = probs
        whole = len(probs) // BLOCK * BLOCK
        blocks = probs if whole == len(probs) else probs[:whole]
        self._sums: list[float] = blocks.view(-1, BLOCK).sum(-1).tolist()
        if whole < len(probs):
            self._sums.append(probs[whole:].sum().item())
        self._masses: dict[int, list[float]] = {}  # of the blocks looked at so far
        self._taken: list[int] = []

    def pick(self, uniform: float) -> Draw:
        """Return the token that `uniform` in [0, 1) stands for; none of probability 0."""
        block, rest = _search(self._sums, uniform * BELOW_ONE * sum(self._sums))
        masses = self._block(block)
        index = _search(masses, rest)[0]
        return Draw(block * BLOCK + index, masses[index])

    def take(self, token: int) -> None:
        """Remove a drawn token from the pool."""
        block, index = divmod(token, BLOCK)
        masses = self._block(block)
        masses[index] = 0.0
        self._sums[block] = sum(masses)
        self._taken.append(token)

    @property
    def empty(self) -> bool:
        return not any(self._sums)

    def sends_peak(self) -> Self:
        """Let a device send the peak along with the first draw."""
        return self

    def peak(self) -> Draw:
        """Return the most probable token of the whole distribution, the lowest id on ties."""
        token = int(self._probs.argmax())
        return Draw(token, self._probs[token].item())

    def distribution(self) -> Tensor:
        """Return what is left, [V], not normalised."""
        left = self._probs.clone()
        left[self._taken] = 0
        return left

    def _block(self, block: int) -> list[float]:
        """Return the masses of the block's tokens, 0 for removed ones."""
        if block not in self._masses:
            self._masses[block] = self._probs[block * BLOCK : (block + 1) * BLOCK].tolist()
        return self._masses[block]


class CertainPool:
    """A `HostPool` of a `point_mass`."""

    def __init__(self, token: int, probs: Tensor) -> None:
        self._only, self._probs, self.empty = Draw(token, 1.0), probs, False

    def pick(self, uniform: float) -> Draw:
        assert not self.empty, "a distribution has at least one token"
        return self._only

    def take(self, token: int) -> None:
        self.empty = self.empty or token == self._only.token

    def sends_peak(self) -> Self:
        return self

    def peak(self) -> Draw:
        return self._only

    def distribution(self) -> Tensor:
        return torch.zeros_like(self._probs) if self.empty else self._probs.clone()


def _search(masses: Sequence[float], point: float) -> tuple[int, float]:
    """Return which of `masses`, laid end to end, the `point` >= 0 falls into (never one of 0), and
    how far into it. A point that rounding has put behind the last one is that one's end."""
    for index, mass in enumerate(masses):
        if point < mass:
            return index, point
        point -= mass
    last = max((index for index, mass in enumerate(masses) if mass > 0), default=-1)
    assert last >= 0, "a distribution has at least one token"
    return last, masses[last]


class DevicePool:
    """A `HostPool` on a GPU, where a wait costs more than a pass over the vocabulary: a draw reads
    all of it and sends a few numbers to the host, once."""

    def __init__(self, probs: Tensor, noting: Callable[[Tensor], Tensor] | None = None) -> None:
        self._left, self._copied, self._noting = probs, False, noting
        self._top: Tensor | None = None  # index and probability of the peak, if it is to be sent
        self._peak: Draw | None = None
        self._tokens: float | None = None  # number of tokens with a probability above 0

    def pick(self, uniform: float) -> Draw:
        """Return the token that `uniform` in [0, 1) stands for. The GPU's cumulative sum, made in
        parts, may change at a token of probability 0; then `HostPool` picks. Raises UserError if
        the distribution is not finite, which the host learns here."""
        cumulative = self._left.cumsum(-1, dtype=torch.float64)
        mass = cumulative[-1:]
        point = (mass * (uniform * BELOW_ONE)).minimum(mass.nextafter(mass.new_zeros(())))
        token = torch.searchsorted(cumulative, point, right=True)
        token = token.clamp_max(len(self._left) - 1)
        own = self._left.gather(-1, token)
        parts = [torch.where(own > 0, token, -1), mass, own, self._left.count_nonzero()[None]]
        if self._top is not None:
            parts.append(self._top)
        if self._noting is not None:
            parts.append(self._noting(token))
        drawn, total, q, self._tokens, *noted = brought(torch.cat([x.double() for x in parts]))
        refuse_unless_finite(total)
        if self._top is not None:
            peak, mass_there, *noted = noted
            self._peak, self._top = Draw(int(peak), mass_there), None
        if drawn >= 0:
            return Draw(int(drawn), q, noted)
        return HostPool(self._left.cpu()).pick(uniform)

    def take(self, token: int) -> None:
        self._left = self._left if self._copied else self._left.clone()
        self._left[token], self._copied = 0, True
        self._tokens = None if self._tokens is None else self._tokens - 1

    @property
    def empty(self) -> bool:
        """Return whether no token is left; before the first draw there is at least one."""
        return self._tokens is not None and self._tokens <= 0

    def sends_peak(self) -> Self:
        self._top = torch.cat([part.double() for part in self._left.max(-1, keepdim=True)][::-1])
        return self

    def peak(self) -> Draw:
        assert self._peak is not None, "the peak comes with the first draw, where it is asked for"
        return self._peak

    def distribution(self) -> Tensor:
        return self._left.clone()


Pool = HostPool | CertainPool | DevicePool


def pool_of(probs: Tensor | Pool, noting: Callable[[Tensor], Tensor] | None = None) -> Pool:
    """Return a pool of `probs` [V] on their device. noting: gives numbers [k] about a drawn token
    [1], which a device sends along with it to save the host a wait."""
    if not isinstance(probs, Tensor):
        return probs
    if probs.device.type != "cpu":
        return DevicePool(probs, noting)
    token = certain_token(probs)
    return HostPool(probs) if token is None else CertainPool(token, probs)
