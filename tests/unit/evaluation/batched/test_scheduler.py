"""The simulated scheduler: budgets by hand, what it is told, and ways to spend the rows of a step
on texts of which the best one is known."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from decoding.batch_cost import PerRow
from evaluation.batched.scheduler import (
    FIXED,
    LOGGED,
    NOTHING,
    ORACLE,
    PLAIN,
    POSITION,
    Budget,
    FixedLength,
    Simulation,
    Texts,
    best_budget,
    calibrated,
    compared,
    conditional,
    confidences,
    filled,
    page,
    serve,
    step_seconds,
    told,
)
from predictors.confidences.maps import of_temperatures
from tests.helpers.data.rollout_tables import sampled_table

FREE = PerRow(1.0, 0.0, 0.01, 0.0)
DEAR = PerRow(1.0, 0.2, 0.01, 0.0)  # a row that is accepted with .1 does not pay
HALF, THREE_QUARTERS = np.full((2, 5, 3), 0.5), np.full((2, 5, 3), 0.75)
P = np.array([0.6, 0.4])
Q = np.array([0.5, 0.5])
SAID = np.array([0.9, 0.2])  # of a drawn token, by what it is
REJECTED = np.array([1.0, 0.0])  # norm([P - Q]+)
SMOOTH, STEPPED = (1.0, 1.1, 1.2, 1.3, 4.0), (1.0, 1.1, 1.9, 1.95, 1.95)  # seconds by budget


def test_a_budget_by_hand():
    survival = np.array([[0.9, 0.8, 0.1], [0.5, 0.4, 0.3]])
    assert [filled(survival, b).tolist() for b in (0, 2, 3, 5)] == [[0, 0], [2, 0], [2, 1], [2, 3]]
    # (2 + .9) / 1.1, (2 + 1.7) / 1.2, (2 + 2.2) / 1.5, ...
    assert best_budget(survival, np.array([1, 1.1, 1.2, 1.5, 2, 3, 4])) == 2
    assert best_budget(survival, np.array([1, 2, 4, 8, 16, 32, 64.0])) == 0
    assert best_budget(survival, np.ones(7)) == 6


@given(st.integers(1, 6), st.integers(1, 5), st.data())
def test_equal_survival_is_a_fixed_length(requests, gamma, data):
    length = data.draw(st.integers(0, gamma))
    survival = np.tile(0.7 ** np.arange(1, gamma + 1), (requests, 1))
    assert filled(survival, requests * length).tolist() == [length] * requests


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_what_is_taken_is_a_prefix(requests, gamma, seed):
    survival = np.random.default_rng(seed).random((requests, gamma)).cumprod(1)
    for budget in range(requests * gamma + 1):
        lengths = filled(survival, budget)
        assert lengths.sum() == budget
        taken = [survival[r, i] for r in range(requests) for i in range(lengths[r])]
        left = [survival[r, i] for r in range(requests) for i in range(lengths[r], gamma)]
        assert min(taken, default=1) >= max(left, default=0)


def test_a_stale_budget_is_that_of_two_steps_ago():
    seconds = np.array([1, 1.5, 3.0])
    policy = Budget(seconds, lag=2)
    sure, unsure = np.array([[0.9, 0.8]]), np.array([[0.1, 0.01]])
    assert Budget(seconds).lengths(sure).tolist() == [1]
    assert Budget(seconds).lengths(unsure).tolist() == [0]
    assert [int(policy.lengths(each)[0]) for each in (unsure, unsure, sure, sure)] == [1, 1, 0, 0]


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


def joint_law(before: bool, lag: int, seconds: Any = SMOOTH, said: Any = SAID) -> np.ndarray:
    """[2, 2, 2, 2], of the next two tokens of two requests that share a budget."""
    law = np.zeros((2, 2, 2, 2))
    for first in product(range(2), repeat=2):
        for second in product(range(2), repeat=2):
            policy = Budget(np.array(seconds), lag, before)
            for _ in range(lag):
                policy.lengths(np.array([[0.9, 0.8], [0.9, 0.8]]))
            lengths = policy.lengths(said[np.array([first, second])].cumprod(1))
            chance = Q[list(first + second)].prod()
            laws = map(two_tokens, (first, second), lengths.tolist())
            law += chance * np.multiply.outer(*laws)
    return law


def test_it_is_exact_with_survival_before_and_a_settled_budget_alone():
    exact = np.multiply.outer(np.outer(P, P), np.outer(P, P))
    assert abs(joint_law(True, 1) - exact).max() < 1e-12
    assert min(abs(joint_law(False, lag) - exact).max() for lag in (0, 1)) > 1e-3
    assert abs(joint_law(True, 0, STEPPED) - exact).max() > 1e-3  # the budget is one of all draws
    assert abs(joint_law(True, 1, STEPPED) - exact).max() < 1e-12


def test_a_token_that_is_said_to_be_rejected_for_sure_is_a_draft_token_all_the_same():
    """Isotonic maps say 0. Whether it is verified must not depend on that."""
    exact = np.multiply.outer(np.outer(P, P), np.outer(P, P))
    law = joint_law(before=True, lag=1, said=np.array([0.9, 0.0]))
    assert abs(law - exact).max() < 1e-12
    survival = np.array([[0.0, 0.0], [0.5, NOTHING]])
    policy = Budget(np.ones(5), before=True)
    assert policy.lengths(survival).tolist() == [1, 1]


def test_what_is_not_drafted_is_not_verified():
    one = replace(texts(0.5), most=np.ones((3, 20), np.int64))
    seconds = step_seconds(PerRow(1.0, 0.5, 0.1, 0.0), 2, 3, 1)
    asked = [serve(one, FixedLength(length), seconds, 2, 4) for length in (1, 3)]
    assert (asked[0].tokens == asked[1].tokens).all()
    assert (asked[0].seconds == asked[1].seconds).all()


def texts(accept: float, prompts: int = 3, gamma: int = 3) -> Texts:
    shape = (prompts, 20, gamma)
    most = np.tile(np.minimum(gamma, 19 - np.arange(20)), (prompts, 1))
    return Texts(np.full(shape, accept), np.full(shape, accept), most, np.full(prompts, 20))


def test_served_alone_without_a_draft_is_a_token_a_step():
    cost = PerRow(1.0, 0.0, 0.1, 0.0)
    seconds = step_seconds(cost, 2, 3, 0)
    found = serve(texts(0.5), FixedLength(0), seconds, 2, 4)
    assert found.rate == pytest.approx(2.0)
    everything = serve(texts(1.0), FixedLength(3), step_seconds(cost, 2, 3, 3), 2, 4)
    assert everything.rate == pytest.approx(8 / 1.3)  # 20 tokens are five rounds of four


def test_rows_are_rounds_with_expected_labels():
    table = sampled_table(HALF, THREE_QUARTERS)
    found = confidences(table, 2)
    assert found.gamma == 2 and found.group.tolist() == [0] * 5 + [1] * 5
    assert found.length.tolist() == 2 * [2, 2, 2, 1, 0]  # the last place is kept
    assert found.labels[0].tolist() == [0.5, 0.25]
    assert found.logits[0].tolist() == pytest.approx([np.log(3)] * 2)
    table.length[1] = 2
    assert confidences(table, 3).group.tolist() == [0] * 5 + [1] * 2, "padding is left out"


def test_what_is_told_by_name():
    maps = {"halved": of_temperatures([2.0, 2.0, 2.0]), "none": None}
    found = told(sampled_table(HALF, THREE_QUARTERS), 3, maps)
    assert list(found) == [LOGGED, "halved", ORACLE]
    assert found[LOGGED] == pytest.approx(0.75) and found[ORACLE] == pytest.approx(0.5)
    assert found["halved"] == pytest.approx(1 / (1 + 3**-0.5))
    found = conditional(torch.tensor([[0.5, 0.25, 0.0, 0.0]]).double())
    assert found.tolist() == [[0.5, 0.5, 0.0, 0.0]]


def test_calibrations_are_fitted():
    draws = np.random.default_rng(0).random((8, 40, 2))
    table = sampled_table(draws / 2, draws)  # half as often as it says
    fit = {"_target_": "hydra.utils.get_method", "path": "predictors.calibration.fit_platt"}
    platt = {"fit": fit, "sequential": None, "survival": True}
    none = {"fit": None, "sequential": None, "survival": False}
    cfg = OmegaConf.create({"calibrations": {"platt": platt, "none": none}})
    maps = calibrated(cfg, table, 2)
    assert list(maps) == [POSITION, "platt", "none"] and maps["none"] is None
    found = told(table, 2, maps)
    far = {name: np.abs(found[name] - found[ORACLE]).mean() for name in (LOGGED, "platt")}
    assert far["platt"] < far[LOGGED] / 3
    constants = maps[POSITION].conditional(torch.randn(5, 2).double())
    first, second = (table.accept[:, :end, i] for i, end in enumerate((39, 38)))
    assert constants[:, 0].tolist() == pytest.approx([first.mean()] * 5)
    reached = table.accept[:, :38, 0]
    expected = (second * reached).sum() / reached.sum()
    assert constants[:, 1].tolist() == pytest.approx([expected] * 5)


def by_name(accept: np.ndarray, confidence: np.ndarray, cost: PerRow) -> dict[str, dict[str, Any]]:
    simulation = Simulation(sampled_table(accept, confidence), {}, cost, 4, 3)
    rows = compared(simulation.measured(simulation.ways()))
    assert {row["requests"] for row in rows} == {4} and page(rows).count("\n") == len(rows) + 1
    return {row["name"]: row for row in rows}


def test_nothing_is_gained_where_all_tokens_are_alike():
    same = np.full((4, 30, 3), 0.8)
    found = by_name(same, same, FREE)
    stale = [f"budget, {name}, 2 steps old" for name in (LOGGED, ORACLE)]
    assert {PLAIN, FIXED, f"budget, {LOGGED}", f"budget, {ORACLE}", *stale} == set(found)
    for name in set(found) - {PLAIN, *stale}:
        assert found[name]["drafted"] == 3 and found[name]["over_fixed"] == (1, 1, 1)
    plain = found[PLAIN]
    assert plain["tokens_per_second"].value == pytest.approx(4.0)  # four rows a second
    assert plain["drafted"] == 0 and plain["over_fixed"].value < 0.6
    assert found[FIXED]["tokens_per_second"].value > 6


def test_knowing_which_tokens_are_accepted_pays_where_rows_are_dear():
    kinds = np.random.default_rng(0).random((4, 30, 1)) < 0.5
    accept = np.where(kinds, 0.95, 0.1) * np.ones((4, 30, 3))
    wrong = by_name(accept, 1 - accept, DEAR)
    best, logged = wrong[f"budget, {ORACLE}"], wrong[f"budget, {LOGGED}"]
    for gain in (best["over_fixed"], best["over_logged"]):
        assert gain.low is not None and 1 < gain.low < gain.value
    assert logged["over_fixed"].high is not None and logged["over_fixed"].high < 1
    assert wrong[FIXED]["over_logged"].value == pytest.approx(1 / logged["over_fixed"].value)
    stale = wrong[f"budget, {ORACLE}, 2 steps old"]
    assert stale["drafted"] == best["drafted"]
    fresh = stale["tokens_per_second"].value / best["tokens_per_second"].value
    assert stale["over_fresh"].value == pytest.approx(fresh)
