"""The logit warp, random draws, and the samplers of siblings at one draft position."""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from decoding.picking import Draw, Pool, largest, point_mass, pool_of, refuse_unless_finite
from decoding.together import brought
from runtime.errors import UserError
from runtime.settings.kinds import Size, Temperature, TopP

TOP_P_CANDIDATES = 1024  # tokens looked at before top-p falls back to sorting the whole vocabulary
SMALLEST = 1e-30  # below it a probability is 0: products and quotients stay normal in float32
AHEAD = 256  # uniform numbers made at once
SENT = 16  # candidates that come from a GPU at once


@dataclass(frozen=True)
class Warp:
    """The map from logits to the distribution that is sampled: temperature, then top-k, then top-p,
    each off at its default.

    temperature 0 is greedy decoding: all mass on the largest logit (lowest token id on ties).
    Tokens tied with the last one that top-k or top-p keeps are kept too, so the distribution never
    depends on how a sort breaks ties. Probabilities below 1e-30 become 0."""

    temperature: Annotated[Temperature, "what logits are divided by; 0: greedy"] = 1.0
    top_k: Annotated[Size, "most probable tokens that are kept; 0: all"] = 0
    top_p: Annotated[TopP, "share of the probability that the tokens kept have; 1: all"] = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < math.inf and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise UserError(
                f"warp: expected temperature >= 0, top_k >= 0 and top_p in (0, 1], got {self}. Give"
                " others"
            )

    def probs(self, logits: Tensor) -> Tensor:
        """Return the distribution of the next token, [..., V]: float32, or float64 where the logits
        are (exact tests).

        Raises UserError when a row holds NaN, +inf, or nothing but -inf; on a GPU the row is NaN,
        and drawing from it raises.
        """
        logits = logits.to(at_least_float32(logits.dtype))
        if self.temperature == 0:
            return _one_hot(logits)
        if self.temperature != 1:
            logits = (logits - logits.amax(-1, keepdim=True)).div_(self.temperature)
        if 0 < self.top_k < logits.shape[-1]:
            smallest = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < smallest, -math.inf)
        probs = torch.threshold_(logits.softmax(-1), SMALLEST, 0.0)
        _refuse_unless_finite(probs[..., 0])  # a softmax is NaN throughout or nowhere
        if self.top_p == 1:
            return probs
        # The most probable tokens that hold `top_p` of the mass, renormalised
        on_host = probs.device.type == "cpu"  # a GPU sorts all of them while the host would wait
        count = min(TOP_P_CANDIDATES, probs.shape[-1])
        ranked = probs.topk(count).values if on_host else probs
        if not on_host or bool((ranked.sum(-1) < self.top_p).any()):
            ranked = probs.sort(dim=-1, descending=True).values
        before = ranked.cumsum(-1) - ranked
        kept = (before < self.top_p).sum(-1, keepdim=True).clamp_min_(1)
        cut = probs * (probs >= ranked.gather(-1, kept - 1))
        return cut / cut.sum(-1, keepdim=True)

    def within(self, prompt: int, eos_ids: Collection[int]) -> "Warp":
        """Return the warp in a request with so many tokens of prompt, which `eos_ids` end."""
        return self

    def after(self, text: Callable[[], Tensor]) -> "Warp":
        """Return the warp of the token that follows a text [n]: this one, whatever the text."""
        return self

    @property
    def rest(self) -> "Warp":
        """The warp of logits that processors have changed: this one, where there are none."""
        return self

    def fields(self) -> dict[str, Any]:
        """Return temperature, top_k and top_p, for engines that know no more. Raises UserError for
        a warp that is more than these."""
        return asdict(self)

    def to_dict(self) -> dict[str, Any]:
        """Return everything it is, for records."""
        return self.fields()


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def _one_hot(logits: Tensor) -> Tensor:
    """Put all mass of each row of `logits` [..., V] on its largest, the lowest id on ties."""
    if logits.dim() == 1 and logits.device.type == "cpu":  # the row of a round: few calls
        values = logits.detach().numpy()
        token = int(values.argmax())
        refuse_unless_finite(values[token])
        return point_mass(token, len(values), logits.dtype)
    peak = largest(logits)[..., None]
    highest = logits.gather(-1, peak)
    _refuse_unless_finite(highest)
    hot = torch.zeros_like(logits).scatter_(-1, peak, 1.0)
    if hot.device.type != "cpu":  # NaN throughout, as a softmax is, where the largest is no number
        hot.masked_fill_(~highest.isfinite(), math.nan)
    return hot


def _refuse_unless_finite(numbers: Tensor) -> None:
    """Raise UserError on the CPU; on a GPU the draw does, which saves a wait."""
    if numbers.device.type == "cpu":
        refuse_unless_finite((numbers.sum() if numbers.dim() else numbers).item())


class Sampler:
    """All randomness of one request: one stream of random numbers, and the methods `draw` and
    `accept`. Tests enumerate outcomes by overriding them.

    Numbers are taken from `generator` in advance, in the order of single calls.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self._ahead: list[float] = []  # the next one last

    @classmethod
    def seeded(cls, seed: int) -> "Sampler":
        return cls(torch.Generator().manual_seed(seed))

    def fork(self) -> "Sampler":
        """Return a new stream, for draws that must not depend on the timing of other draws."""
        return Sampler.seeded(int(torch.randint(1 << 62, (), generator=self.generator)))

    def draw(self, distribution: Tensor | Pool) -> Draw:
        """Draw one index from `distribution` [n], which need not sum to exactly one."""
        return pool_of(distribution).pick(self._uniform())

    def accept(self, p: float, q: float) -> bool:
        """Return True with probability min(1, p / q); q > 0."""
        return self._uniform() * q < p

    def _uniform(self) -> float:
        """Return the next number in [0, 1)."""
        if not self._ahead:
            ahead = torch.rand(AHEAD, dtype=torch.float64, generator=self.generator)
            self._ahead = ahead.tolist()[::-1]
        return self._ahead.pop()


SiblingSampler = Callable[[Tensor | Pool, Sampler], Iterator[Draw]]
"""(q [V], sampler) -> the candidates of one position in draw order, each drawn when it is asked
for.

A verifier names the one distribution it is exact for, and structures draw through nothing else. How
many candidates are taken may depend on what is known before the draw and on earlier candidates
(algorithms with a fixed number: `hub_pair`). """


def iid(q: Tensor | Pool, sampler: Sampler) -> Iterator[Draw]:
    """Draw independently without end, duplicates kept."""
    pool = pool_of(q)
    while True:
        yield sampler.draw(pool)


def without_replacement(q: Tensor | Pool, sampler: Sampler) -> Iterator[Draw]:
    """Draw each from q without the earlier ones, renormalised. Ends with the support of q."""
    pool = pool_of(q)
    while not pool.empty:
        drawn = sampler.draw(pool)
        yield drawn
        pool.take(drawn.token)


def hub_pair(q: Tensor | Pool, sampler: Sampler) -> Iterator[Draw]:
    """Draw SpecHub's pair (2411.05289): c1 ~ q; c2 is the hub argmax q, or, when c1 is the hub, a
    draw from the rest.

    One candidate where q is a point mass. Taking the first alone is a plain draw from q; whether
    the second one is taken must not depend on the first."""
    pool = pool_of(q).sends_peak()
    first = sampler.draw(pool)
    yield first
    hub = pool.peak()
    if first.token != hub.token:
        yield hub
        return
    pool.take(hub.token)
    if not pool.empty:
        yield sampler.draw(pool)


SETTLED_FIRST = (hub_pair,)
"""Sibling distributions whose number of candidates must be settled before the first is drawn."""


def top_tokens(q: Tensor | Pool, sampler: Sampler) -> Iterator[Draw]:
    """Yield the tokens of q from the most probable down (lowest id on ties). They are not drawn:
    verify them as point masses. Raises UserError if q is NaN."""
    left = pool_of(q).distribution()
    if left.device.type == "cpu":
        while bool(left.any()):
            token = int(left.argmax())
            mass, left[token] = left[token].item(), 0
            yield Draw(token, mass)
        return
    ranked = left.sort(descending=True, stable=True)  # once, and sent a few at a time
    for first in range(0, len(left), SENT):
        part = slice(first, first + SENT)
        joined = torch.cat([left.sum()[None], ranked.values[part], ranked.indices[part]])
        total, *both = brought(joined.double())
        refuse_unless_finite(total)  # no draw notices
        half = len(both) // 2
        for mass, token in zip(both[:half], both[half:], strict=True):
            if mass <= 0:
                return
            yield Draw(int(token), mass)
