"""Run random code as a probability tree: every draw is a branch, every path is replayed from the
start."""

from collections import defaultdict
from collections.abc import Callable, Hashable
from itertools import product

import torch
from torch import Tensor

from decoding.picking import DevicePool, Draw, Pool
from decoding.sampling import Sampler

Distribution = dict[Hashable, float]


class Branching(Sampler):
    """Follows `script`, then takes the first possible branch and notes the others in `open`."""

    def __init__(self, script: tuple[int, ...] = ()) -> None:
        self.script = script
        self.taken: tuple[int, ...] = ()
        self.open: list[tuple[int, ...]] = []
        self.probability = 1.0

    def fork(self) -> "Branching":
        return self

    def draw(self, distribution: Tensor | Pool) -> Draw:
        """From a pool of a device as it draws there: by a number in the middle of the branch."""
        plain = isinstance(distribution, Tensor)
        weights = (distribution if plain else distribution.distribution()).tolist()
        total = sum(weights)
        choice = self._branch([weight / total for weight in weights])
        if isinstance(distribution, DevicePool):
            drawn = distribution.pick((sum(weights[:choice]) + weights[choice] / 2) / total)
            assert drawn.token == choice
            return drawn
        return Draw(choice, weights[choice])

    def accept(self, p: float, q: float) -> bool:
        accept = min(1.0, p / q)
        return self._branch([1 - accept, accept]) == 1

    def _branch(self, probs: list[float]) -> int:
        possible = [index for index, probability in enumerate(probs) if probability > 0]
        if len(self.taken) < len(self.script):
            choice = self.script[len(self.taken)]
        else:
            choice = possible[0]
            self.open += [(*self.taken, other) for other in possible[1:]]
        self.taken = (*self.taken, choice)
        self.probability *= probs[choice]
        return choice


def distribution_of(run: Callable[[Sampler], Hashable]) -> Distribution:
    """The exact distribution of what `run` returns, over everything it draws from the sampler it is
    given."""
    distribution: Distribution = defaultdict(float)
    open_paths: list[tuple[int, ...]] = [()]
    while open_paths:
        sampler = Branching(open_paths.pop())
        distribution[run(sampler)] += sampler.probability
        open_paths += sampler.open
    return dict(distribution)


def autoregressive_distribution(
    conditional: Callable[[tuple[int, ...]], Tensor],
    vocab: int,
    length: int,
    prompt: tuple[int, ...] = (),
    eos_ids: frozenset[int] = frozenset(),
) -> Distribution:
    """What decoding with the target alone would give: the distribution of `length` tokens after
    `prompt`, cut at EOS."""
    distribution: Distribution = defaultdict(float)
    for tokens in product(range(vocab), repeat=length):
        probability, end = 1.0, length
        for count in range(length):
            probability *= conditional((*prompt, *tokens[:count]))[tokens[count]].item()
        for count, token in reversed(list(enumerate(tokens, 1))):
            end = count if token in eos_ids else end
        distribution[tokens[:end]] += probability
    return dict(distribution)


def errors(distribution: Distribution, exact: Distribution) -> list[float]:
    outcomes = distribution.keys() | exact.keys()
    return [abs(distribution.get(each, 0.0) - exact.get(each, 0.0)) for each in outcomes]


def largest_error(distribution: Distribution, exact: Distribution) -> float:
    return max(errors(distribution, exact))


def total_variation(distribution: Distribution, exact: Distribution) -> float:
    return sum(errors(distribution, exact)) / 2


def dirichlet(vocab: int, generator: torch.Generator, concentration: float = 1.0) -> Tensor:
    """[V] float64; concentration below 1 is peaky."""
    return torch._sample_dirichlet(
        torch.full((vocab,), concentration, dtype=torch.float64), generator
    )
