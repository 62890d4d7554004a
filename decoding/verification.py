"""What a verification rule says: where the accepted path ends, and the distribution of the token
that follows it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.draft import Draft, Verdict
from decoding.picking import refuse_unless_finite
from decoding.sampling import Sampler, Warp


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

    Logits that are no numbers are noticed there, so in rows that nothing depends on they are not.
    """

    def __init__(self, logits: Tensor, warp: Warp) -> None:
        """logits: [closed + 1, V]."""
        self._logits = logits
        self._warp = warp
        self._distributions: dict[int, Tensor] = {}
        self._known: dict[tuple[int, int], float] = {}  # p of tokens, from a GPU

    def note(self, row: int, token: int, p: float) -> None:
        """`self[row][token]` is on the host already."""
        self._known[row, token] = p

    @property
    def device(self) -> torch.device:
        return self._logits.device

    def __getitem__(self, row: int) -> Tensor:
        if row not in self._distributions:
            if self.device.type != "cpu":  # a GPU warps all of them as fast as one
                rows = self._warp.probs(self._logits)
                self._distributions = dict(enumerate(rows.unbind()))
            else:
                self._distributions[row] = self._warp.probs(self._logits[row])
        return self._distributions[row]

    def drawn(self, parents: Sequence[int], tokens: Sequence[int]) -> list[float | None]:
        """p of each token after its parent's row; None where that row was not read: nothing is
        warped for the record alone."""
        drawn = list(zip(parents, tokens, strict=True))
        found: list[float | None] = [self._known.get(pair) for pair in drawn]
        read = [
            (place, self._distributions[row][token])
            for place, (row, token) in enumerate(drawn)
            if found[place] is None and row in self._distributions
        ]
        for (place, _), p in zip(read, numbers([p for _, p in read]), strict=True):
            found[place] = p
        return found


def numbers(scalars: Sequence[Tensor]) -> list[float]:
    """Probabilities [] as numbers: of a GPU all at once, and refused there where one is none."""
    if not scalars or scalars[0].device.type == "cpu":
        return [scalar.item() for scalar in scalars]
    found: list[float] = torch.stack(list(scalars)).tolist()
    refuse_unless_finite(sum(found))
    return found


Rows = Tensor | WarpedRows
"""p, by row."""


def sample_verdict(draft: Draft, distribution: VerdictDistribution, sampler: Sampler) -> Verdict:
    """The plain way to verify: draw the end of the path, then the token after it."""
    row = sampler.draw(distribution.end_prob)
    residual = distribution.residual(row)
    return verdict_at(draft, row, residual, sampler)


def verdict_at(draft: Draft, row: int, residual: Tensor | None, sampler: Sampler) -> Verdict:
    """The verdict that ends at `row`, its last token drawn from `residual` [V]."""
    token = None if residual is None else sampler.draw(residual)
    return Verdict(row, draft.path(row), token, draft.closed + bool(draft.open))


def residual_distribution(p: Tensor, q: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """norm([scale * p - q]+), [V], or of many rows [m, V], with a scale [m] each. No mass left
    means the row is never reached: p itself stands in."""
    if isinstance(scale, Tensor):
        short = torch.addcmul(q, p, scale.to(p)[:, None], value=-1).clamp_(max=0)
        return _normalised_there(short, p)
    short = torch.sub(q, p, alpha=scale).clamp_(
        max=0
    )  # fused: p * scale alone may be subnormal, which is slow
    if p.device.type != "cpu" or p.dim() > 1:  # nobody waits
        return _normalised_there(short, p)
    mass = -short.sum().item()  # all of one sign, so nothing cancels
    return short.div_(-mass) if mass > 0 else p


def _normalised_there(short: Tensor, otherwise: Tensor) -> Tensor:
    """norm(-short), by rows, without a look at its sums."""
    total = -short.sum(-1, keepdim=True)
    return torch.where(total > 0, short.div_(-total), otherwise)
