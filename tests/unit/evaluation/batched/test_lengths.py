"""Lengths by batch size, against sums by hand and the replay of one request."""

import numpy as np
import pytest

from decoding.batch_cost import PerRow, share
from decoding.cost import cost_table
from decoding.stopping.fixed import Fixed
from evaluation.batched.lengths import answer, best_length, measurements
from evaluation.replay.simulate import Replayer
from evaluation.replay.tuning import Candidate, best, speedup, sweep
from evaluation.table import ratio
from tests.helpers.data.rollout_tables import sampled_table

COST, DEAR = PerRow(1.0, 0.0, 0.05, 0.0), PerRow(1.0, 1.0, 0.05, 0.0)


def candidates(accept: float) -> list[Candidate]:
    """Fixed lengths on texts in which every token is accepted with the same probability."""
    table = sampled_table(np.full((4, 30, 4), accept))
    lengths = {"fixed": Fixed(1).policy(table)}
    return sweep(Replayer(table, 4), lengths, {"fixed": range(1, 5)})


def test_one_request_is_what_replay_says():
    found = candidates(0.8)
    plain = cost_table(0.05, {1: 1.0, 8: 1.0})
    one = best_length(found, found, COST, 1, 4)
    pick = best(found, plain)
    assert one["length"] == pick.threshold
    assert one["speedup"] == pytest.approx(speedup(pick, plain), abs=1e-12)
    spent = plain.price(pick.counts).sum()
    assert one["tokens_per_second"] == pytest.approx(pick.counts["emitted"].sum() / spent)
    assert one["plain_tokens_per_second"] == 1.0


def test_it_does_not_pay_where_rows_cost_what_they_bring():
    found = candidates(0.5)
    eight = best_length(found, found, DEAR, 8, 4)
    assert eight["length"] == 0 < eight["best"] and eight["best_speedup"] < 1 == eight["speedup"]
    assert eight["tokens_per_second"] == eight["plain_tokens_per_second"] == pytest.approx(1.0)


def test_tokens_of_a_step_by_hand():
    """Two requests, one token each: 0.05 s of draft and 1 s of four rows bring about 2 * 1.5."""
    found = candidates(0.5)
    one = next(each for each in found if each.threshold == 1)
    spent = share(COST, 2, 4).price(one.counts)
    assert one.counts["emitted"].sum() / spent.sum() == pytest.approx(2 * 1.5 / 1.05, rel=0.05)


def test_the_rows_say_the_same_and_the_answer_is_a_sentence():
    found = candidates(0.8)
    one = best_length(found, found, COST, 1, 4)
    rows = measurements({"test": found}, COST, [1, 2], 4, {})
    same = rows[(rows["requests"] == 1) & (rows["setting"] == one["length"])]
    assert ratio(same, "modelled_plain", "modelled").value == one["speedup"]
    lines = answer([one, {"requests": 8, "length": 0}])
    assert lines.startswith(f"Draft {one['length']} tokens for 1 request(s) (")
    assert lines.endswith(" plain decoding). Use plain decoding for 8 request(s).")
