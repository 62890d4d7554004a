"""Outcomes of one position of a draft, and the value of the next draw by their predicted
probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

OUTCOMES = ("none", "third", "second", "first", "both")
"""Given that the path to the position is accepted, and that three candidates are put to the test
there: none is accepted; the third one is, or the second; the first one is, and the first candidate
after it is not; both are. In this order the more of a draft is accepted, the later."""
NEGLIGIBLE = 1e-3
"""Probability that a path is accepted, below which a harvest does not look at what comes after it,
and nothing is learned from it."""


FALLS = 0.85
"""Chance of a candidate over that of the one before it, at most, where neither was learned."""
Number = TypeVar("Number", float, Tensor)


@dataclass(frozen=True)
class Chances(Generic[Number]):
    """Probabilities of one position, numbers or [...], known once its first candidate is drawn.

    first: the first candidate is accepted; following: the first candidate of the next position is,
    given that; second: the second candidate is, given that the first is not; third: the third is,
    given that neither is."""

    first: Number
    following: Number
    second: Number
    third: Number

    @staticmethod
    def of(outcomes: Tensor) -> "Chances[Tensor]":
        """Compute the chances from the probabilities [..., 5] of `OUTCOMES`; 0 where the condition
        cannot happen."""
        return Chances(*_chances(outcomes.unbind(-1)))

    @staticmethod
    def of_numbers(outcomes: Sequence[float]) -> "Chances[float]":
        """Compute the chances of one position from its five probabilities."""
        return Chances(*_chances(outcomes))

    def younger(self: "Chances[float]", count: int) -> list[float]:
        """Return the chances of the second, third, ... of 1 + `count` candidates, each given that
        those before it are rejected. Beyond the third, which was not learned, each falls by the
        ratio of the third to the second, at least by `FALLS`."""
        chances = [self.second, self.third]
        share = min(FALLS, self.third / self.second) if self.second > 0 else 0.0
        while len(chances) < count:
            chances.append(chances[-1] * share)
        return chances[:count]

    def outcomes(self: "Chances[Tensor]") -> Tensor:
        """Return the probabilities of `OUTCOMES`, [..., 5]."""
        left = 1 - self.first
        rest = left * (1 - self.second)
        return torch.stack(
            [
                rest * (1 - self.third),
                rest * self.third,
                left * self.second,
                self.first * (1 - self.following),
                self.first * self.following,
            ],
            dim=-1,
        )


def survival(probs: Tensor) -> Tensor:
    """Return the survival along a draft of first candidates, [..., gamma], from the probabilities
    [..., gamma, C] of each drawn token: with `OUTCOMES`, that all so far and the next one are
    accepted; with two classes, that all so far are."""
    if not foresees(probs.shape[-1]):
        return probs[..., 1].double().cumprod(-1)
    chances = Chances.of(probs.double())
    return chances.first.cumprod(-1) * chances.following


def foresees(classes: int) -> bool:
    """Return whether predictions of so many classes cover a token that is not drawn yet."""
    return classes == len(OUTCOMES)


def _chances(outcomes: Sequence[Any]) -> tuple[Any, ...]:
    none, third, second, first, both = outcomes
    accepted, rejected = first + both, none + third
    shares = (both, accepted), (second, rejected + second), (third, rejected)
    return accepted, *(_share(part, whole) for part, whole in shares)


def _share(part: Any, whole: Any) -> Any:
    if not isinstance(whole, Tensor):
        return part / whole if whole > 0 else 0.0
    return torch.where(whole > 0, part / whole.clamp_min(1e-38), torch.zeros_like(part))
