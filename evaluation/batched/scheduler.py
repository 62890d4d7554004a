"""The scheduler of serving engines, simulated: requests decoded together share a budget of rows.

Every step every request drafts the same number of tokens; a policy says how many of them are
verified. What the engines do: the budget is the one of most expected tokens per second, it goes to
the positions of highest survival, the probability that all of a draft up to there is accepted, and
tokens drawn beyond are thrown away.

**Exactness.** Greedy target and draft: all policies are exact, for text is what the target says,
however much of a draft is tested. Sampled: whether a token is verified must not depend on itself.
`Budget` therefore is *not* exact, as the engines' are not: survival through a position is computed
with the token there (a draw of low probability is cut off, so that the law of what is committed
changes), and the budget of the same step is one of all draws. It is exact in sampled mode only
where a position competes with the survival through the position *before* it (`before`), and the
budget was settled without this step's draws (`lag` of a step or more): positions that follow in the
same draft rank below it, so nothing that its token decides can push it out, and other requests are
independent. The tests enumerate two requests of two drafted tokens. Simulated tokens per second of
other settings are those of a text that is not the target's.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from decoding.batch_cost import BatchCost

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
LEAST = 1e-6  # survival below which the engines verify nothing
NOTHING = -1.0  # in place of a survival, where nothing is drafted


class Policy(Protocol):
    def lengths(self, survival: Array) -> Ints:
        """[R], tokens verified of each draft. survival: [R, gamma], what is said of them, `NOTHING`
        beyond what is drafted."""


@dataclass(frozen=True)
class FixedLength:
    length: int

    def lengths(self, survival: Array) -> Ints:
        return np.full(len(survival), self.length)


class Budget:
    """SGLang's: b = argmax (R + sum of the b largest survivals) / seconds(R + b), to the largest
    survivals (dspark_planner.py); ties by position, then request.

    seconds: [R gamma + 1], of a step that verifies so many draft tokens; lag: how many steps old
    the survivals are that settle the budget (SGLang: 2; before any is known, all are 1); before:
    positions compete with the survival through the position before them"""

    def __init__(self, seconds: Array, lag: int = 0, before: bool = False) -> None:
        self.seconds, self.lag, self.before = seconds, lag, before
        self._past: list[Array] = []

    def lengths(self, survival: Array) -> Ints:
        if self.before:
            ahead = np.concatenate([np.ones((len(survival), 1)), survival[:, :-1]], 1)
            survival = np.where(survival == NOTHING, NOTHING, ahead)
        self._past = [*self._past, survival][-self.lag - 1 :]
        known = self._past[0] if len(self._past) > self.lag else np.ones_like(survival)
        return filled(survival, best_budget(known, self.seconds))


def best_budget(survival: Array, seconds: Array) -> int:
    """Draft tokens to verify in a step for most expected tokens per second. survival: [R, gamma];
    seconds: [R gamma + 1]."""
    ranked = np.sort(survival[survival >= LEAST])[::-1]
    expected = len(survival) + np.concatenate([[0.0], np.cumsum(ranked)])
    return int(np.argmax(expected / seconds[: len(expected)]))


def filled(survival: Array, budget: int) -> Ints:
    """[R], how many tokens of each draft are among the `budget` of highest survival [R, gamma],
    which must not rise along a draft; so what is taken is a prefix of it."""
    requests, gamma = survival.shape
    order = np.argsort(-survival.T.ravel(), kind="stable")[:budget]  # by position, then request
    return np.bincount(order % requests, minlength=requests)


@dataclass(frozen=True)
class Texts:
    """N prompts. accept, said: [N, T, gamma], the probability that a token is accepted, given those
    before it, and what is said of it; most: [N, T], tokens that are drafted; length: [N]"""

    accept: Array
    said: Array
    most: Ints
    length: Ints


@dataclass(frozen=True)
class Served:
    """By prompt, [N]: tokens committed, and the share of every step's seconds (1 / R)."""

    tokens: Array
    seconds: Array

    @property
    def rate(self) -> float:
        """Tokens per second of all requests together."""
        return float(self.tokens.sum() / self.seconds.sum())


def step_seconds(cost: BatchCost, requests: int, gamma: int, drafted: int) -> Array:
    """[R gamma + 1], of a step with so many draft tokens verified, `drafted` of every request
    drawn."""
    rows = range(requests, requests * (gamma + 1) + 1)
    drafting = drafted * cost.draft(requests)
    return np.array([cost.target(requests, count) + drafting for count in rows])


def serve(
    texts: Texts, policy: Policy, seconds: Array, requests: int, rounds: int, seed: int = 0
) -> Served:
    """`requests` at once for at least `rounds` answers of every prompt. Slots take prompts in turn;
    one that is done takes the next. The coins of a position of the n-th answer are the same for
    all policies (common random numbers). seconds: of `step_seconds`, for this many requests."""
    count, gamma = len(texts.length), texts.accept.shape[-1]
    answers = max(rounds * count, 4 * requests)
    coins = np.random.default_rng(seed).random((answers, *texts.accept.shape[1:]))
    answer, place, following = np.arange(requests), np.zeros(requests, np.int64), requests
    tokens, spent, column = np.zeros(count), np.zeros(count), np.arange(gamma)
    while following < answers:
        prompt = answer % count
        most = texts.most[prompt, place]
        can = column < most[:, None]
        survival = np.where(can, texts.said[prompt, place].cumprod(1), NOTHING)
        length = np.minimum(policy.lengths(survival), most)
        right = coins[answer, place] < texts.accept[prompt, place]
        accepted = (right & (column < length[:, None])).cumprod(1).sum(1)
        committed = np.minimum(accepted + 1, texts.length[prompt] - place)
        np.add.at(tokens, prompt, committed)
        np.add.at(spent, prompt, seconds[length.sum()] / requests)
        place = place + accepted + 1
        done = np.flatnonzero(place >= texts.length[prompt])
        fresh = min(len(done), answers - following)
        if fresh < len(done):
            break
        answer[done] = np.arange(following, following + fresh)
        place[done], following = 0, following + fresh
    return Served(tokens, spent)
