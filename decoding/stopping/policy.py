"""Draft lengths of a stop rule, for all recorded rollouts at once.

A rule reads one number before each draw and stops at the first that is below a threshold. These
numbers do not depend on the threshold, so their running minimum is computed once, and any threshold
is a comparison. Every rule gives its own `Policy`, under the structure `Chain`."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
NEVER = 2**31
NONE, SOME, ALL = 0, 1, 2
"""Classes of a round: nothing is drafted, until a rule stops, as much as allowed."""


class Adaptive(Protocol):
    """A rule whose threshold follows the verdicts. Its state is a tuple of numbers or of arrays,
    the threshold in force first."""

    def first_state(self, threshold: Any) -> tuple[Any, ...]:
        """Return the state at the start of a request."""

    def next_state(self, state: tuple[Any, ...], drafted: Any, accepted: Any) -> tuple[Any, ...]:
        """Return the state after a round of `drafted` tokens, `accepted` of them accepted."""


@dataclass(frozen=True)
class Policy:
    """A stop rule without its threshold, on a table of [B, T] anchors.

    reach: [B, T, G] (or broadcasting to it), the lowest value the rule has read when it is asked
        with c tokens drawn; it goes on while sign * threshold <= reach
    most: [B, T] or a number, tokens at which it stops without reading a value
    ahead: whether reading the value takes the draft forward of the next draw (wasted if it stops
    there)
    first: smallest c at which it computes anything
    per_round: computations at the start of a round
    adaptive: the rule itself where its threshold follows the verdicts
    """

    reach: Array
    sign: float = 1.0
    most: Ints | int = NEVER
    ahead: bool = False
    first: int = 0
    per_round: int = 0
    adaptive: Adaptive | None = None


@dataclass(frozen=True)
class Lengths:
    """Counts of the draft from each anchor, [B, T] each. drafted: tokens; forwards: those of the
    draft model; calls: numbers that the rule computed."""

    drafted: Ints
    forwards: Ints
    calls: Ints


def lengths(policy: Policy, threshold: float, limit: Ints) -> Lengths:
    """Return the counts of the drafts that `Chain` draws with this rule.

    limit: [B, T], tokens at which the rule is no longer asked: gamma_max, the end of the output, or
    an end token."""
    willing = (policy.reach >= policy.sign * threshold).sum(-1)
    return stop_at(policy, willing, np.minimum(limit, policy.most))


def stop_at(policy: Policy, willing: Ints, limit: Ints) -> Lengths:
    """Return the counts of drafts. willing: first number of tokens at which the rule stops; limit:
    number at which it is not asked, or reads no value."""
    drafted = np.minimum(willing, limit)
    asked = np.minimum(willing + 1, limit)  # how often, with fewer than `limit` tokens
    forwards = drafted + (policy.ahead & (willing < limit))
    return Lengths(drafted, forwards, policy.per_round + np.maximum(0, asked - policy.first))


def lowest(value: Array) -> Array:
    """Return the running minimum along the draft, [B, T, G]."""
    return np.minimum.accumulate(value, axis=-1)


def seen_later(value: NDArray[Any], tokens: int) -> Array:
    """Return [B, T, G]: with c tokens drawn, the value of depth c - tokens; none before."""
    shifted = np.full_like(value, np.inf)
    shifted[..., tokens:] = value[..., : value.shape[-1] - tokens]
    return shifted
