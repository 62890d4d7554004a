"""How long a draft a stop rule makes, for all recorded rollouts at once.

A rule looks at one number before each draw and stops at the first that is below a threshold. What
it would look at does not depend on the threshold, so the lowest value seen so far is computed once,
and any threshold is a comparison. Every rule says its own `Policy`, under the structure `Chain`."""

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
        """At the start of a request."""

    def next_state(self, state: tuple[Any, ...], drafted: Any, accepted: Any) -> tuple[Any, ...]:
        """After a round of `drafted` tokens, `accepted` of them accepted."""


@dataclass(frozen=True)
class Policy:
    """A stop rule without its threshold, on a table of [B, T] anchors.

    reach: [B, T, G] (or broadcasting to it), the lowest value the rule has seen when it is asked
        with c tokens drawn; it goes on while sign * threshold <= reach
    most: [B, T] or a number, tokens at which it stops without looking
    ahead: whether looking takes the draft forward that the next draw would run (wasted when it
    stops there)
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
    """What a draft from each anchor takes, [B, T] each. drafted: tokens; forwards: of the draft;
    calls: numbers the rule computed."""

    drafted: Ints
    forwards: Ints
    calls: Ints


def lengths(policy: Policy, threshold: float, limit: Ints) -> Lengths:
    """What `Chain` draws with this rule.

    limit: [B, T], tokens at which nobody asks the rule any more: gamma_max, the end of the output,
    an end token."""
    willing = (policy.reach >= policy.sign * threshold).sum(-1)
    return stop_at(policy, willing, np.minimum(limit, policy.most))


def stop_at(policy: Policy, willing: Ints, limit: Ints) -> Lengths:
    """willing: first number of tokens at which the rule says stop; limit: where it is not asked, or
    does not look."""
    drafted = np.minimum(willing, limit)
    asked = np.minimum(willing + 1, limit)  # how often, with fewer than `limit` tokens
    forwards = drafted + (policy.ahead & (willing < limit))
    return Lengths(drafted, forwards, policy.per_round + np.maximum(0, asked - policy.first))


def lowest(value: Array) -> Array:
    """Running minimum along the draft, [B, T, G]."""
    return np.minimum.accumulate(value, axis=-1)


def seen_later(value: NDArray[Any], tokens: int) -> Array:
    """[B, T, G]: what depth c - tokens said, seen with c tokens drawn; nothing before."""
    shifted = np.full_like(value, np.inf)
    shifted[..., tokens:] = value[..., : value.shape[-1] - tokens]
    return shifted
