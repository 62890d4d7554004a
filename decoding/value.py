"""What a value predictor says of a drawn token while a draft is drawn."""

from pathlib import Path
from typing import NamedTuple

from decoding.asking import said
from decoding.draft import RoundContext
from decoding.draft_tree import DrawnToken
from predictors.base import Predictor, load_predictor
from predictors.outcomes import OUTCOMES
from runtime.errors import UserError

FALLS = 0.85
"""Chance of a candidate over that of its elder one, at most, where neither was learned."""


def load_value(checkpoint: str | Path, key: str) -> Predictor:
    """A predictor of `OUTCOMES` that is asked after each drawn token, or UserError naming `key`."""
    predictor = load_predictor(checkpoint, key=key)
    if predictor.classes != OUTCOMES or predictor.when != "token":
        raise UserError(
            f"{key}: {checkpoint} holds {predictor.name!r}, which does not say what a token is"
            " worth. Train one that does: python train.py predictor=value"
        )
    return predictor


class Said(NamedTuple):
    """`predictors.outcomes.Chances` of one token, as numbers."""

    first: float
    following: float
    second: float
    third: float

    @classmethod
    def of(cls, outcomes: list[float]) -> "Said":
        none, third, second, first, both = outcomes
        accepted, rejected = first + both, none + third
        return cls(
            accepted,
            both / accepted if accepted > 0 else 0.0,
            second / (rejected + second) if rejected + second > 0 else 0.0,
            third / rejected if rejected > 0 else 0.0,
        )

    def siblings(self, count: int) -> list[float]:
        """Chances of the second, third, ... of 1 + `count` candidates, each if its elder ones are
        rejected. What was never learned, beyond the third, falls as the third does from the
        second, at least by `FALLS`."""
        found = [self.second, self.third]
        share = min(FALLS, self.third / self.second) if self.second > 0 else 0.0
        while len(found) < count:
            found.append(found[-1] * share)
        return found[:count]


def ask(predictor: Predictor, context: RoundContext, drawn: DrawnToken) -> Said:
    """Of one drawn token."""
    return Said.of(said(predictor, context, drawn)[0].tolist())
