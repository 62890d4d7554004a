"""Test whether the best stop rule is a threshold on survival: SpecDec++'s decision process, solved
by dynamic programming on recorded rollouts."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
BINS = 20  # of survival, equally wide


@dataclass(frozen=True)
class Rule:
    """A stop rule over states: k tokens drawn, their survival in one of `BINS`.

    go_on: [G, BINS], whether another token is drawn; rate: tokens per draft forward's time on the
    rounds it was fitted to"""

    go_on: Flags
    rate: float


def survival(accept: Array) -> Array:
    """Return P(the first k tokens are accepted), [n, G + 1]. accept: [n, G], min(1, p / q) of each,
    given those before."""
    ones = np.ones_like(accept[:, :1])
    products: Array = np.cumprod(np.concatenate([ones, accept], 1), 1)
    return products


def bins(survived: Array) -> NDArray[np.int64]:
    return np.minimum((survived * BINS).astype(np.int64), BINS - 1)


def totals(go_on: Flags, survived: Array, target: float) -> tuple[Array, Array]:
    """Return the expected tokens of each round, and its time in draft forwards, [n] each, under
    `go_on` [G, BINS] or [n, G]."""
    states = bins(survived[:, :-1])
    depth = np.arange(states.shape[1])
    willing = go_on[depth, states]
    drawn = np.logical_and.accumulate(willing, 1)
    return 1 + (survived[:, 1:] * drawn).sum(1), target + drawn.sum(1)


def best(survived: Array, target: float) -> Rule:
    """Return the fastest rule on these rounds, by depth and binned survival, that backward
    induction finds when it starts from the best threshold or length.

    The price of time in tokens is the rate of the rule itself (Dinkelbach). Bins are not states of
    a Markov chain, so a step may be a loss, and then the iteration ends. Every round counts once.

    survived: [n, G + 1]; target: seconds of a target call over those of a draft forward."""
    fastest = max(threshold(survived, target), fixed(survived, target), key=lambda rule: rule.rate)
    for _ in range(100):
        better = _rated(_induction(survived, fastest.rate), survived, target)
        if better.rate <= fastest.rate + 1e-12:
            break
        fastest = better
    return fastest


def _rated(go_on: Flags, survived: Array, target: float) -> Rule:
    tokens, time = totals(go_on, survived, target)
    return Rule(go_on, float(tokens.sum() / time.sum()))


def _induction(survived: Array, rate: float) -> Flags:
    """Return where another token is worth its time at `rate` tokens per draft forward, [G, BINS].
    A state that no round reaches gets the decision of the next higher one of its depth."""
    states = bins(survived)
    depth = survived.shape[1] - 1
    go_on = np.zeros((depth, BINS), bool)
    worth = np.zeros(len(survived))  # value of continuing, at the state of each round
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
    """Return the best rule with one threshold on survival for all depths."""
    return _best_of([np.arange(BINS) >= first for first in range(BINS + 1)], survived, target)


def fixed(survived: Array, target: float) -> Rule:
    """Return the best fixed length as a rule."""
    depth = survived.shape[1] - 1
    rules = [np.repeat(np.arange(depth)[:, None] < n, BINS, 1) for n in range(depth + 1)]
    return _best_of(rules, survived, target)


def _best_of(rules: list[Flags], survived: Array, target: float) -> Rule:
    shape = survived.shape[1] - 1, BINS
    rated = (_rated(np.broadcast_to(flags, shape), survived, target) for flags in rules)
    return max(rated, key=lambda rule: rule.rate)
