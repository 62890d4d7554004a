import numpy as np
import pytest

from runtime.intervals import RESAMPLES, Estimate, bootstrap, drawn, draws


def test_a_resample_draws_as_many_groups_as_there_are_and_values_as_often():
    times = draws(7, seed=3)
    assert times.shape == (RESAMPLES, 7) and (times.sum(1) == 7).all()
    assert np.array_equal(times, draws(7, seed=3)) and not np.array_equal(times, draws(7, seed=4))
    times = np.array([[1, 1, 1], [0, 3, 0], [2, 0, 1]])
    found = drawn(np.array([5.0, 6.0, 7.0]), times)
    assert found.tolist() == [[5, 6, 7], [6, 6, 6], [5, 5, 7]]
    assert drawn(np.array([5.0, 6.0]), np.array([1, 1])).tolist() == [5, 6]


@pytest.mark.slow
def test_an_interval_holds_the_truth_as_often_as_it_says():
    held = 0
    for seed in range(200):
        sample = np.random.default_rng(seed).normal(2, 1, 60)

        def mean(times: np.ndarray, sample: np.ndarray = sample) -> np.ndarray:
            return times @ sample / len(sample)

        value, low, high = bootstrap(mean, 60, seed)
        assert value == pytest.approx(sample.mean())
        held += low <= 2 <= high
    assert 0.9 <= held / 200 <= 0.98


def test_a_pivotal_interval_is_mirrored_and_one_group_has_none():
    def largest(times: np.ndarray) -> np.ndarray:
        return (np.arange(5) * (times > 0)).max(-1)

    plain, mirrored = bootstrap(largest, 5), bootstrap(largest, 5, pivotal=True)
    assert plain.value == mirrored.value == 4
    assert (mirrored.low, mirrored.high) == (8 - plain.high, 8 - plain.low)
    assert bootstrap(lambda times: times @ np.array([3.0]), 1) == Estimate(3.0)
