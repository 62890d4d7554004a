"""Whether the best stop rule is a threshold on survival: SpecDec++'s decision process, solved by
dynamic programming on recorded rollouts."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
BINS = 20  # of survival, equally wide


@dataclass(frozen=True)
class Rule:
    """A stop rule over states: k tokens drawn, their survival in one of `BINS`.

    go_on: [G, BINS], whether another token is drawn; rate: tokens per draft forward's time it makes
    on the rounds it was found on"""

    go_on: Flags
    rate: float


def survival(accept: Array) -> Array:
    """[n, G + 1]: P(the first k tokens are accepted). accept: [n, G], min(1, p / q) of each, given
    those before."""
    ones = np.ones_like(accept[:, :1])
    found: Array = np.cumprod(np.concatenate([ones, accept], 1), 1)
    return found


def bins(survived: Array) -> NDArray[np.int64]:
    return np.minimum((survived * BINS).astype(np.int64), BINS - 1)


def totals(go_on: Flags, survived: Array, target: float) -> tuple[Array, Array]:
    """[n] each: tokens a round is expected to bring, and its time in draft forwards, under `go_on`
    [G, BINS] or [n, G]."""
    states = bins(survived[:, :-1])
    depth = np.arange(states.shape[1])
    willing = go_on[depth, states]
    drawn = np.logical_and.accumulate(willing, 1)
    return 1 + (survived[:, 1:] * drawn).sum(1), target + drawn.sum(1)


def best(survived: Array, target: float) -> Rule:
    """The fastest rule on these rounds that backward induction finds among those that look at depth
    and survival (in bins), never slower than the best threshold or length, where it begins.

    The rate at which time is worth tokens is that of the rule itself (Dinkelbach). Bins are no
    states of a Markov chain, so that a step may lose, and then is the last. Every round counts
    once.

    survived: [n, G + 1]; target: seconds of a target call over those of a draft forward."""
    found = max(threshold(survived, target), fixed(survived, target), key=lambda rule: rule.rate)
    for _ in range(100):
        better = _rated(_induction(survived, found.rate), survived, target)
        if better.rate <= found.rate + 1e-12:
            break
        found = better
    return found


def _rated(go_on: Flags, survived: Array, target: float) -> Rule:
    tokens, time = totals(go_on, survived, target)
    return Rule(go_on, float(tokens.sum() / time.sum()))


def _induction(survived: Array, rate: float) -> Flags:
    """[G, BINS]: where another token is worth its time at `rate` tokens per draft forward. A state
    that no round reaches does what the next higher one of its depth does."""
    states = bins(survived)
    depth = survived.shape[1] - 1
    go_on = np.zeros((depth, BINS), bool)
    worth = np.zeros(len(survived))  # of what follows, at the state of each round
    for k in range(depth - 1, -1, -1):
        gain = survived[:, k + 1] - rate + worth
        rows = np.bincount(states[:, k], minlength=BINS)
        mean = np.bincount(states[:, k], gain, BINS) / np.maximum(rows, 1)
        go_on[k] = mean > 0
        for empty in np.flatnonzero(rows == 0)[::-1]:
            go_on[k, empty] = go_on[k, empty + 1] if empty + 1 < BINS else True
        worth = np.maximum(mean, 0)[states[:, k]]
    return go_on


def threshold(survived: Array, target: float) -> Rule:
    """The best of the rules that go on from a survival on, the same at every depth."""
    return _best_of([np.arange(BINS) >= first for first in range(BINS + 1)], survived, target)


def fixed(survived: Array, target: float) -> Rule:
    """The best fixed length."""
    depth = survived.shape[1] - 1
    rules = [np.repeat(np.arange(depth)[:, None] < n, BINS, 1) for n in range(depth + 1)]
    return _best_of(rules, survived, target)


def _best_of(rules: list[Flags], survived: Array, target: float) -> Rule:
    shape = survived.shape[1] - 1, BINS
    found = (_rated(np.broadcast_to(flags, shape), survived, target) for flags in rules)
    return max(found, key=lambda rule: rule.rate)
