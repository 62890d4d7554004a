"""The best stop rule by dynamic programming: against every rule there is, on small processes."""

from itertools import product

import numpy as np
import pytest

from papers.specdecpp.optimal_stopping import BINS, best, bins, fixed, survival, threshold, totals

TARGETS = (1.0, 4.8, 10.0)


def rate(go_on: np.ndarray, survived: np.ndarray, target: float) -> float:
    tokens, time = totals(go_on, survived, target)
    return float(tokens.sum() / time.sum())


def rounds(seed: int, levels: tuple[float, ...], depth: int = 3, count: int = 400) -> np.ndarray:
    """Of tokens accepted with one of few probabilities, so that few states are reached."""
    return survival(np.random.default_rng(seed).choice(levels, (count, depth)))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("seed", range(4))
def test_no_rule_over_depth_and_survival_is_faster(seed, target):
    survived = rounds(seed, (0.3, 0.9))
    reached = [np.unique(bins(survived[:, k])).tolist() for k in range(3)]
    states = [(k, state) for k, of_depth in enumerate(reached) for state in of_depth]
    rates = []
    for flags in product((False, True), repeat=len(states)):
        go_on = np.zeros((3, BINS), bool)
        for (k, state), flag in zip(states, flags, strict=True):
            go_on[k, state] = flag
        rates.append(rate(go_on, survived, target))
    found = best(survived, target)
    assert found.rate == pytest.approx(max(rates), abs=1e-12)
    assert found.rate == pytest.approx(rate(found.go_on, survived, target), abs=1e-12)


@pytest.mark.parametrize("target", TARGETS)
def test_where_chances_do_not_depend_on_the_state_a_threshold_is_best(target):
    survived = rounds(0, (0.6, 0.95), depth=6, count=64_000)
    ours, other, length = (find(survived, target) for find in (best, threshold, fixed))
    assert ours.rate >= other.rate >= length.rate
    assert other.rate == pytest.approx(ours.rate, rel=2e-3)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.few(12)
def test_it_is_never_behind_a_threshold_or_a_length(seed):
    survived = survival(np.random.default_rng(seed).random((30, 4)) ** 0.3)
    found = best(survived, 5.0)
    assert found.rate == pytest.approx(rate(found.go_on, survived, 5.0), abs=1e-12)
    assert found.rate >= max(threshold(survived, 5.0).rate, fixed(survived, 5.0).rate)


def test_a_rule_of_depth_is_found_and_a_draft_that_is_never_accepted_is_not_drawn():
    survived = survival(np.tile([1.0, 1.0, 0.0, 0.0], (5, 1)))
    assert best(survived, 4.0).rate == pytest.approx(3 / 6)
    assert fixed(survived, 4.0).go_on[:, 0].tolist() == [True, True, False, False]
    survived = survival(np.zeros((5, 3)))
    for find in (best, threshold, fixed):
        assert find(survived, 5.0).rate == pytest.approx(1 / 5)


def test_survival_starts_at_one_and_falls_in_the_last_bin():
    assert survival(np.array([[0.5, 0.5]])).tolist() == [[1.0, 0.5, 0.25]]
    assert bins(np.array([0.0, 0.5, 1.0])).tolist() == [0, BINS // 2, BINS - 1]
