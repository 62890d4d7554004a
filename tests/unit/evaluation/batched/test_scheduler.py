"""The simulated scheduler, against budgets by hand and against fixed lengths."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.batch_cost import PerRow
from evaluation.batched.scheduler import (
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
SAID = (0.9, 0.2)


def first_token(policy_of: "type[Budget]", before: bool, lag: int) -> np.ndarray:
    """The law of the first token of one request whose only drafted token is x, of what is said of
    x being verified or not."""
    law = np.zeros(2)
    for x in range(2):
        policy = policy_of(np.array([1.0, 1.5]), lag, before)
        for _ in range(lag):
            policy.lengths(np.array([[0.9]]))
        verified = int(policy.lengths(np.array([[SAID[x]]]))[0])
        if not verified:
            law += Q[x] * P
            continue
        accepted = min(1.0, P[x] / Q[x])
        residual = np.maximum(P - Q, 0)
        law[x] += Q[x] * accepted
        law += Q[x] * (1 - accepted) * residual / residual.sum()
    return law


def test_it_is_exact_with_survival_before_and_a_settled_budget_alone() -> None:
    laws = {(b, lag): first_token(Budget, b, lag) for b, lag in product((False, True), (0, 1))}
    assert laws[True, 1] == pytest.approx(P, abs=1e-12)
    assert abs(laws[False, 0] - P).max() > 0.01


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
