"""Lengths by batch size, against sums by hand and the replay of one request."""

import numpy as np
import pytest

from decoding.batch_cost import PerRow, share
from decoding.cost import cost_table
from decoding.stopping.fixed import Fixed
from decoding.stopping.rollout_table import RolloutTable
from evaluation.batched.lengths import answer, best_length, measurements
from evaluation.replay.simulate import Replayer
from evaluation.replay.tuning import Candidate, best, speedup, sweep
from evaluation.table import ratio

COST, DEAR = PerRow(1.0, 0.0, 0.05, 0.0), PerRow(1.0, 1.0, 0.05, 0.0)


def candidates(accept: float, prompts: int = 4, gamma: int = 4) -> list[Candidate]:
    """Fixed lengths on texts in which every token is accepted with the same probability."""
    shape = (prompts, 30, gamma)
    whole, ones = np.full(shape[:2], gamma), np.ones(shape)
    ends = np.full(prompts, 30)
    table = RolloutTable(
        *(list("abcd")[:prompts], ends, ends, False, ones.astype(int), whole, whole),
        *(np.full(shape, accept), ones, ones, ones),
    )
    rule = Fixed(1)
    return sweep(Replayer(table, gamma), {"fixed": rule.policy(table)}, {"fixed": range(1, 5)})


def test_one_request_is_what_replay_says() -> None:
    found = candidates(0.8)
    plain = cost_table(0.05, {1: 1.0, 8: 1.0})
    one = best_length(found, found, COST, 1, 4)
    pick = best(found, plain)
    assert one["length"] == pick.threshold
    assert one["speedup"] == pytest.approx(speedup(pick, plain), abs=1e-12)
    spent = plain.price(pick.counts).sum()
    assert one["tokens_per_second"] == pytest.approx(pick.counts["emitted"].sum() / spent)
    assert one["plain_tokens_per_second"] == 1.0


def test_it_does_not_pay_where_rows_cost_what_they_bring() -> None:
    found = candidates(0.5)
    eight = best_length(found, found, DEAR, 8, 4)
    assert (
        eight["length"] == 0
        and eight["best"] >= 1
        and eight["best_speedup"] < 1 == eight["speedup"]
    )
    assert eight["tokens_per_second"] == eight["plain_tokens_per_second"] == pytest.approx(1.0)


def test_tokens_of_a_step_by_hand() -> None:
    """Two requests, one token each: 0.05 s of draft and 1 s of four rows bring about 2 * 1.5."""
    found = candidates(0.5)
    one = next(each for each in found if each.threshold == 1)
    spent = share(COST, 2, 4).price(one.counts)
    assert one.counts["emitted"].sum() / spent.sum() == pytest.approx(2 * 1.5 / 1.05, rel=0.05)


def test_the_rows_say_the_same_and_the_answer_is_a_sentence() -> None:
    found = candidates(0.8)
    one = best_length(found, found, COST, 1, 4)
    rows = measurements({"test": found}, COST, [1, 2], 4, {})
    same = rows[(rows["requests"] == 1) & (rows["setting"] == one["length"])]
    assert ratio(same, "modelled_plain", "modelled").value == one["speedup"]
    assert answer([one, {"requests": 8, "length": 0}]).endswith(
        "Use plain decoding for 8 request(s)."
    )
