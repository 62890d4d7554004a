"""Rollouts recorded at every position of some responses, as arrays: all that a stop rule could have
seen there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class RolloutTable:
    """B responses, padded to T positions, with a rollout of G draft tokens from each.

    prompt_ids: [B]; length: [B], tokens of each response; max_new: [B], tokens that were asked for;
        greedy: whether the target is, so that `accept` is 0 or 1 and replay is exact
    tokens: [B, T, G], drafted; drawn: [B, T], how many of them up to the first end token; accepted:
    [B, T], a verdict
    accept: [B, T, G], min(1, p / q) given that the tokens before were accepted
    max_q, entropy: [B, T, G], of the draft at temperature 1, unfiltered, before each token; the
    entropy in nats
    confidence: [B, T, G], the probability of each token under that distribution; None where it was
    not recorded
    survival: [B, T, G], P(all tokens up to and with this one are accepted), by the acceptance head
    outcome: [B, T], the class H-RAD predicts
    """

    prompt_ids: Sequence[str]
    length: Ints
    max_new: Ints
    greedy: bool
    tokens: Ints
    drawn: Ints
    accepted: Ints
    accept: Array
    max_q: Array
    entropy: Array
    confidence: Array | None = None
    survival: Array | None = None
    outcome: Ints | None = None

    @property
    def gamma(self) -> int:
        return self.tokens.shape[-1]

    def limit(self, gamma_max: int) -> Ints:
        """[B, T], most tokens a draft from each anchor may have: `gamma_max`, up to an end token,
        and short of the last place of the output, which is kept for the residual or bonus token."""
        room = self.max_new[:, None] - 1 - np.arange(self.tokens.shape[1])
        return np.maximum(0, np.minimum(np.minimum(room, gamma_max), self.drawn))

    def shortened(self, max_new: int) -> "RolloutTable":
        """As if at most `max_new` tokens had been asked for."""
        return replace(
            self, length=np.minimum(self.length, max_new), max_new=np.minimum(self.max_new, max_new)
        )


def build(rows: Sequence[Mapping[str, Any]], greedy: bool) -> RolloutTable:
    """Pad responses to one table. rows: one mapping per prompt with `prompt_id`, `length`,
    `max_new` and one row per position of every array of `RolloutTable`, named as there."""
    longest = max(row["length"] for row in rows)
    names = [name for name in _DTYPES if name in rows[0]]
    arrays = {
        name: np.stack([_padded(row[name], longest, _DTYPES[name]) for row in rows])
        for name in names
    }
    length, max_new = (
        np.array([row[name] for row in rows], dtype=np.int64) for name in ("length", "max_new")
    )
    return RolloutTable([row["prompt_id"] for row in rows], length, max_new, greedy, **arrays)


_DTYPES = {
    **dict.fromkeys(("tokens", "drawn", "accepted", "outcome"), np.int64),
    **dict.fromkeys(("accept", "confidence", "max_q", "entropy", "survival"), np.float64),
}


def _padded(values: Any, rows: int, dtype: type) -> NDArray[Any]:
    values = np.asarray(values, dtype=dtype)
    padded = np.zeros((rows, *values.shape[1:]), dtype=dtype)
    padded[: len(values)] = values
    return padded
