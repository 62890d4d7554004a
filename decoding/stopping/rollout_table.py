"""Rollouts recorded at every position of responses, as arrays with all values that a stop rule may
read."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import UserError

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
    confidence: [B, T, G], the probability of each token under that distribution
    predicted: what predictors say, by the names that stop rules give it; [B, T] or [B, T, G] each
    siblings: [B, T, G, 2], P(accepted) of the second and third candidate beside each token, given
        that the tokens before were accepted and the candidates before it were not; None: not
        recorded
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
    confidence: Array
    predicted: Mapping[str, Array] = field(default_factory=dict)
    siblings: Array | None = None

    @property
    def gamma(self) -> int:
        return self.tokens.shape[-1]

    def limit(self, gamma_max: int) -> Ints:
        """Return the most tokens of a draft from each anchor, [B, T]: `gamma_max`, up to an end
        token, leaving the last token of the output for the residual or bonus token."""
        room = self.max_new[:, None] - 1 - np.arange(self.tokens.shape[1])
        return np.maximum(0, np.minimum(np.minimum(room, gamma_max), self.drawn))

    def shortened(self, max_new: int) -> "RolloutTable":
        """Return the table as if at most `max_new` tokens had been asked for."""
        return replace(
            self, length=np.minimum(self.length, max_new), max_new=np.minimum(self.max_new, max_new)
        )

    def of_predictor(self, name: str) -> Array:
        """Return the predictions under `name`. Raises UserError if that predictor was not asked."""
        if name not in self.predicted:
            raise UserError(
                f"stop.checkpoint: expected a table with {name}, got none. Replay with the rule"
                " that asks it"
            )
        return self.predicted[name]


def build(rows: Sequence[Mapping[str, Any]], greedy: bool) -> RolloutTable:
    """Pad responses to one table. rows: one mapping per prompt with `prompt_id`, `length`,
    `max_new` and one row per position of every array of `RolloutTable`, named as there;
    `predicted` is a mapping of such arrays."""
    longest = max(row["length"] for row in rows)

    def padded(parts: Iterable[Any], dtype: type) -> NDArray[Any]:
        whole: list[NDArray[Any]] = [np.asarray(part, dtype=dtype) for part in parts]
        missing = [[(0, longest - len(x)), *[(0, 0)] * (x.ndim - 1)] for x in whole]
        return np.stack([np.pad(x, width) for x, width in zip(whole, missing, strict=True)])

    dtypes = {
        **dict.fromkeys(("tokens", "drawn", "accepted"), np.int64),
        **dict.fromkeys(("accept", "confidence", "max_q", "entropy", "siblings"), np.float64),
    }
    arrays: dict[str, Any] = {
        name: padded((row[name] for row in rows), dtype)
        for name, dtype in dtypes.items()
        if name in rows[0]
    }
    predicted = {
        name: padded((row["predicted"][name] for row in rows), np.float64)
        for name in rows[0].get("predicted", {})
    }
    length, max_new = (np.array([row[key] for row in rows], int) for key in ("length", "max_new"))
    prompt_ids = [row["prompt_id"] for row in rows]
    return RolloutTable(prompt_ids, length, max_new, greedy, **arrays, predicted=predicted)
