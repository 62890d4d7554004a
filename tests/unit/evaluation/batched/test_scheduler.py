"""The simulated scheduler, against budgets by hand and against fixed lengths."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.batch_cost import PerRow
from evaluation.batched.scheduler import (
    NOTHING,
    Budget,
    FixedLength,
    Texts,
    best_budget,
    filled,
    serve,
    step_seconds,
)


def test_a_budget_by_hand() -> None:
    survival = np.array([[0.9, 0.8, 0.1], [0.5, 0.4, 0.3]])
    assert [filled(survival, b).tolist() for b in (0, 2, 3, 5)] == [[0, 0], [2, 0], [2, 1], [2, 3]]
    # (2 + .9) / 1.1, (2 + 1.7) / 1.2, (2 + 2.2) / 1.5, ...
    assert best_budget(survival, np.array([1, 1.1, 1.2, 1.5, 2, 3, 4])) == 2
    assert best_budget(survival, np.array([1, 2, 4, 8, 16, 32, 64.0])) == 0
    assert best_budget(survival, np.ones(7)) == 6


@given(st.integers(1, 6), st.integers(1, 5), st.data())
def test_equal_survival_is_a_fixed_length(requests: int, gamma: int, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, gamma))
    survival = np.tile(0.7 ** np.arange(1, gamma + 1), (requests, 1))
    assert filled(survival, requests * length).tolist() == [length] * requests


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_what_is_taken_is_a_prefix(requests: int, gamma: int, seed: int) -> None:
    survival = np.random.default_rng(seed).random((requests, gamma)).cumprod(1)
    for budget in range(requests * gamma + 1):
        lengths = filled(survival, budget)
        assert lengths.sum() == budget
        taken = [survival[r, i] for r in range(requests) for i in range(lengths[r])]
        left = [survival[r, i] for r in range(requests) for i in range(lengths[r], gamma)]
        assert min(taken, default=1) >= max(left, default=0)


def test_a_stale_budget_is_that_of_two_steps_ago() -> None:
    seconds = np.array([1, 1.5, 3.0])
    policy = Budget(seconds, lag=2)
    sure, unsure = np.array([[0.9, 0.8]]), np.array([[0.1, 0.01]])
    assert Budget(seconds).lengths(sure).tolist() == [1]
    assert Budget(seconds).lengths(unsure).tolist() == [0]
    assert [int(policy.lengths(each)[0]) for each in (unsure, unsure, sure, sure)] == [1, 1, 0, 0]


P = np.array([0.6, 0.4])
Q = np.array([0.5, 0.5])
SAID = np.array([0.9, 0.2])  # of a drawn token, by what it is
REJECTED = np.array([1.0, 0.0])  # norm([P - Q]+)


def two_tokens(draft: tuple[int, int], verified: int) -> np.ndarray:
    """[2, 2], the law of the next two tokens when so many of `draft` are verified token-wise."""
    law = np.outer(P, P) if verified == 0 else np.zeros((2, 2))
    if verified:
        accepted = np.minimum(1, P / Q)
        second = P
        if verified == 2:
            second = (1 - accepted[draft[1]]) * REJECTED
            second[draft[1]] += accepted[draft[1]]
        law[draft[0]] += accepted[draft[0]] * second
        law += (1 - accepted[draft[0]]) * np.outer(REJECTED, P)
    return law


SMOOTH, STEPPED = (1.0, 1.1, 1.2, 1.3, 4.0), (1.0, 1.1, 1.9, 1.95, 1.95)  # seconds by budget


def joint_law(
    before: bool, lag: int, seconds: tuple[float, ...] = SMOOTH, said: np.ndarray = SAID
) -> np.ndarray:
    """[2, 2, 2, 2], of the next two tokens of two requests that share a budget."""
    law = np.zeros((2, 2, 2, 2))
    for first in product(range(2), repeat=2):
        for second in product(range(2), repeat=2):
            policy = Budget(np.array(seconds), lag, before)
            for _ in range(lag):
                policy.lengths(np.array([[0.9, 0.8], [0.9, 0.8]]))
            lengths = policy.lengths(said[np.array([first, second])].cumprod(1))
            chance = Q[list(first + second)].prod()
            laws = [
                two_tokens(draft, int(length))
                for draft, length in zip((first, second), lengths, strict=True)
            ]
            law += chance * np.multiply.outer(*laws)
    return law


def test_it_is_exact_with_survival_before_and_a_settled_budget_alone() -> None:
    exact = np.multiply.outer(np.outer(P, P), np.outer(P, P))
    far = {
        (before, lag): abs(joint_law(before, lag) - exact).max()
        for before, lag in product((False, True), (0, 1))
    }
    assert far[True, 1] < 1e-12
    assert min(far[False, 0], far[False, 1]) > 1e-3
    assert abs(joint_law(True, 0, STEPPED) - exact).max() > 1e-3  # the budget is one of all draws
    assert abs(joint_law(True, 1, STEPPED) - exact).max() < 1e-12


def test_a_token_that_is_said_to_be_rejected_for_sure_is_a_draft_token_all_the_same() -> None:
    """Isotonic maps say 0. Whether it is verified must not depend on that."""
    exact = np.multiply.outer(np.outer(P, P), np.outer(P, P))
    law = joint_law(before=True, lag=1, said=np.array([0.9, 0.0]))
    assert abs(law - exact).max() < 1e-12
    survival = np.array([[0.0, 0.0], [0.5, NOTHING]])
    policy = Budget(np.ones(5), before=True)
    assert policy.lengths(survival).tolist() == [1, 1]


def test_what_is_not_drafted_is_not_verified() -> None:
    one = replace(texts(0.5), most=np.ones((3, 20), np.int64))
    seconds = step_seconds(PerRow(1.0, 0.5, 0.1, 0.0), 2, 3, 1)
    asked = [serve(one, FixedLength(length), seconds, 2, 4) for length in (1, 3)]
    assert (asked[0].tokens == asked[1].tokens).all()
    assert (asked[0].seconds == asked[1].seconds).all()


def texts(accept: float, prompts: int = 3, gamma: int = 3) -> Texts:
    shape = (prompts, 20, gamma)
    most = np.tile(np.minimum(gamma, 19 - np.arange(20)), (prompts, 1))
    return Texts(np.full(shape, accept), np.full(shape, accept), most, np.full(prompts, 20))


def test_served_alone_without_a_draft_is_a_token_a_step() -> None:
    cost = PerRow(1.0, 0.0, 0.1, 0.0)
    seconds = step_seconds(cost, 2, 3, 0)
    found = serve(texts(0.5), FixedLength(0), seconds, 2, 4)
    assert found.rate == pytest.approx(2.0)
    everything = serve(texts(1.0), FixedLength(3), step_seconds(cost, 2, 3, 3), 2, 4)
    assert everything.rate == pytest.approx(8 / 1.3)  # 20 tokens are five rounds of four
