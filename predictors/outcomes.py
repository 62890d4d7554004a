"""What may become of one position of a draft, and what a predictor of it says about the next
draw."""

from dataclasses import dataclass

import torch
from torch import Tensor

OUTCOMES = ("none", "third", "second", "first", "both")
"""Given that the path to the position is accepted, and that three candidates are put to the test
there: none is accepted; the third one is, or the second; the first one is, and the first candidate
after it is not; both are. In this order the more of a draft is accepted, the later."""
NEGLIGIBLE = 1e-3
"""Probability that a path is accepted, below which a harvest does not look at what comes after it,
and nothing is learned from it."""


@dataclass(frozen=True)
class Chances:
    """Probabilities [...] of one position, known once its first candidate is drawn.

    first: it is accepted; following: so is the first candidate after it, given that; second: the
    second candidate is, given that the first is not; third: the third is, given that neither is."""

    first: Tensor
    following: Tensor
    second: Tensor
    third: Tensor

    @classmethod
    def of(cls, outcomes: Tensor) -> "Chances":
        """From the probabilities [..., 5] of `OUTCOMES`. What cannot happen has chance 0."""
        none, third, second, first, both = outcomes.unbind(-1)
        accepted = first + both
        return cls(
            accepted,
            _share(both, accepted),
            _share(second, none + third + second),
            _share(third, none + third),
        )

    def outcomes(self) -> Tensor:
        """[..., 5], the probabilities of `OUTCOMES`."""
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
    """[..., gamma], along a draft of first candidates. probs: [..., gamma, C] of what is said of
    each once it is drawn. Of `OUTCOMES`: that all so far and the next one are accepted; of two
    classes, that all so far are."""
    if not foresees(probs.shape[-1]):
        return probs[..., 1].double().cumprod(-1)
    said = Chances.of(probs.double())
    return said.first.cumprod(-1) * said.following


def foresees(classes: int) -> bool:
    """Whether predictions of so many classes speak of a token that is not drawn yet."""
    return classes == len(OUTCOMES)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > 0, part / whole.clamp_min(1e-38), torch.zeros_like(part))
