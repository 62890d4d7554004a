"""The only logit warp, the only random draws, and how siblings of one draft position are drawn."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from decoding.picking import DevicePool, Drawn, Pool, largest, pool_of, refuse_unless_finite
from runtime.errors import UserError
from runtime.settings.kinds import Size, Temperature, TopP

TOP_P_CANDIDATES = 1024  # tokens looked at before top-p falls back to sorting the whole vocabulary
SMALLEST = 1e-30  # below it a probability is 0: products and quotients stay normal in float32
AHEAD = 256  # uniform numbers made at once
SENT = 16  # candidates that come from a GPU at once


@dataclass(frozen=True)
class Warp:
    """From logits to the distribution that is sampled: temperature, then top-k, then top-p, each
    off at its default.

    temperature 0 is greedy decoding: all mass on the largest logit (lowest token id on ties).
    Tokens tied with the last one that top-k or top-p keeps are kept too, so the distribution never
    depends on how a sort breaks ties. Probabilities below 1e-30 become 0."""

    temperature: Annotated[Temperature, "what logits are divided by; 0: greedy"] = 1.0
    top_k: Annotated[Size, "most probable tokens that are kept; 0: all"] = 0
    top_p: Annotated[TopP, "share of the probability that the tokens kept have; 1: all"] = 1.0

    def __post_init__(self) -> None:
        """What lossless means rests on this, so it is checked for callers from Python, too."""
        known = 0 <= self.temperature < math.inf and self.top_k >= 0 and 0 < self.top_p <= 1
        if not known:
            raise UserError(
                f"warp: expected temperature >= 0, top_k >= 0 and top_p in (0, 1], got {self}. Give"
                " others"
            )

    def probs(self, logits: Tensor) -> Tensor:
        """Distribution of the next token, [..., V]: float32, or float64 where the logits are (exact
        tests).

        Raises UserError when a row holds NaN, +inf, or nothing but -inf; on a GPU the row is NaN,
        and drawing from it raises.
        """
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self.temperature == 0:
            return _one_hot(logits)
        if self.temperature != 1:
            logits = (logits - logits.amax(-1, keepdim=True)).div_(self.temperature)
        if 0 < self.top_k < logits.shape[-1]:
            logits = _keep_from(logits, logits.topk(self.top_k).values[..., -1:])
        probs = torch.threshold_(logits.softmax(-1), SMALLEST, 0.0)
        _refuse_unless_finite(probs[..., 0])  # a softmax is NaN throughout or nowhere
        return _nucleus(probs, self.top_p) if self.top_p < 1 else probs

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Warp":
        return cls(**values)


def _one_hot(logits: Tensor) -> Tensor:
    """All mass of each row of `logits` [..., V] on its largest; a single row has a way of its own,
    twice as fast."""
    peak = largest(logits)
    if logits.device.type != "cpu":
        return _one_hot_there(logits, peak[..., None])
    if logits.dim() == 1:
        token = int(peak)
        _refuse_unless_finite(logits[token])
        distribution = torch.zeros_like(logits)
        distribution[token] = 1
        return distribution
    _refuse_unless_finite(logits.gather(-1, peak[..., None]))
    return torch.zeros_like(logits).scatter_(-1, peak[..., None], 1.0)


def _one_hot_there(logits: Tensor, peak: Tensor) -> Tensor:
    """On a GPU, without a wait: all NaN, as a softmax is, where the largest logit is no number."""
    unknown = ~logits.gather(-1, peak).isfinite()
    return torch.zeros_like(logits).scatter_(-1, peak, 1.0).masked_fill_(unknown, math.nan)


def _refuse_unless_finite(numbers: Tensor) -> None:
    """On the CPU; on a GPU the draw does, so that nobody waits for this alone."""
    if numbers.device.type == "cpu":
        refuse_unless_finite((numbers.sum() if numbers.dim() else numbers).item())


def _keep_from(logits: Tensor, smallest: Tensor) -> Tensor:
    return logits.masked_fill(logits < smallest, -math.inf)


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Keep the most probable tokens until they hold `top_p` of the mass, and renormalise."""
    vocab = probs.shape[-1]
    there = probs.device.type != "cpu"  # a GPU sorts all of them while the host would wait
    ranked = probs if there else probs.topk(min(TOP_P_CANDIDATES, vocab)).values
    if there or bool((ranked.sum(-1) < top_p).any()):
        ranked = probs.sort(dim=-1, descending=True).values
    before = ranked.cumsum(-1) - ranked
    kept = (before < top_p).sum(-1, keepdim=True).clamp_min_(1)
    cut = probs * (probs >= ranked.gather(-1, kept - 1))
    return cut / cut.sum(-1, keepdim=True)


class Sampler:
    """All randomness of one request: one generator stream and two verbs. Tests enumerate by
    overriding them.

    Its numbers are taken from `generator` a few ahead, in the order in which single ones would be.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self._ahead: list[float] = []  # the next one last

    @classmethod
    def seeded(cls, seed: int) -> "Sampler":
        return cls(torch.Generator().manual_seed(seed))

    def fork(self) -> "Sampler":
        """A stream of its own, for a part whose draws must not depend on when the other parts
        draw."""
        return Sampler.seeded(int(torch.randint(1 << 62, (), generator=self.generator)))

    def draw(self, distribution: Tensor | Pool | DevicePool) -> int:
        """One index from `distribution` [n], which need not sum to exactly one."""
        pool = pool_of(distribution) if isinstance(distribution, Tensor) else distribution
        return pool.pick(self._uniform())

    def accept(self, p: float, q: float) -> bool:
        """True with probability min(1, p / q); q > 0."""
        return self._uniform() * q < p

    def _uniform(self) -> float:
        """In [0, 1)."""
        if not self._ahead:
            self._ahead = torch.rand(AHEAD, dtype=torch.float64, generator=self.generator).tolist()[
                ::-1
            ]
        return self._ahead.pop()


class Noting(Sampler):
    """`sampler`, which sends `along` (of a token [1], numbers [k]) with what it draws on a GPU."""

    def __init__(self, sampler: Sampler, along: Callable[[Tensor], Tensor]) -> None:
        self._sampler, self._along = sampler, along

    def draw(self, distribution: Tensor | Pool | DevicePool) -> int:
        pool = pool_of(distribution) if isinstance(distribution, Tensor) else distribution
        if isinstance(pool, DevicePool):
            pool.along = self._along
        return self._sampler.draw(pool)

    def accept(self, p: float, q: float) -> bool:
        return self._sampler.accept(p, q)


SiblingSampler = Callable[[Tensor, Sampler], Iterator[int]]
"""(q [V], sampler) -> the candidates of one position in draw order, each drawn when it is asked
for.

A verifier names the one distribution it is exact for, and structures draw through nothing else. How
many candidates are taken may depend on what is known before the draw and on earlier candidates
(algorithms with a fixed number: `hub_pair`). """


def iid(q: Tensor, sampler: Sampler) -> Iterator[int]:
    """Independent draws without end, duplicates kept."""
    pool = pool_of(q)
    while True:
        yield sampler.draw(pool)


def without_replacement(q: Tensor, sampler: Sampler) -> Iterator[int]:
    """Distinct draws: each from q without the earlier ones, renormalised. Ends with the support of
    q."""
    pool = pool_of(q)
    while not pool.empty:
        token = sampler.draw(pool)
        yield token
        pool.take(token)


def hub_pair(q: Tensor, sampler: Sampler) -> Iterator[int]:
    """SpecHub's pair (2411.05289): c1 ~ q; c2 is the hub argmax q, or, when c1 is the hub, a draw
    from the rest.

    One candidate where q is a point mass. Taking the first alone is a plain draw from q; whether
    the second one is taken must not depend on the first."""
    pool = pool_of(q, peak=True)
    first = sampler.draw(pool)
    yield first
    sent = pool.peak if isinstance(pool, DevicePool) else None
    hub = int(q.argmax()) if sent is None else sent
    if first != hub:
        yield hub
        return
    pool.take(hub)
    if not pool.empty:
        yield sampler.draw(pool)


SETTLED_FIRST = (hub_pair,)
"""Of these the number of candidates must be settled before the first one is drawn."""


def top_tokens(q: Tensor, sampler: Sampler) -> Iterator[int]:
    """The tokens of q from the most probable down (lowest id on ties), nothing drawn: verify them
    as point masses. Raises UserError where q is NaN."""
    if q.device.type != "cpu":
        yield from _top_tokens_there(q)
        return
    left = q.clone()
    while bool(left.any()):
        token = int(left.argmax())
        left[token] = 0
        yield token


def _top_tokens_there(q: Tensor) -> Iterator[int]:
    """On a GPU: sorted once, and sent a few at a time."""
    ranked = q.sort(descending=True, stable=True)
    for first in range(0, len(q), SENT):
        some = slice(first, first + SENT)
        sent = torch.cat([q.sum()[None], ranked.values[some], ranked.indices[some]])
        total, *both = sent.double().tolist()
        refuse_unless_finite(total)  # no draw notices
        half = len(both) // 2
        for mass, token in zip(both[:half], both[half:], strict=True):
            if mass <= 0:
                return
            yield Drawn.of(token, mass, [])
