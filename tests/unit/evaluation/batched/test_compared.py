"""Ways to spend the rows of a step, on texts of which the best one is known."""

from typing import Any

import numpy as np
import pytest

from decoding.batch_cost import PerRow
from evaluation.batched.compared import (
    FIXED,
    LOGGED,
    ORACLE,
    PLAIN,
    chosen,
    compared,
    facts,
    judged,
)
from tests.unit.evaluation.batched.test_confidences import rounds

FREE = PerRow(1.0, 0.0, 0.01, 0.0)
DEAR = PerRow(1.0, 0.2, 0.01, 0.0)  # a row that is accepted with .1 does not pay


def by_name(accept: np.ndarray, confidence: np.ndarray, cost: PerRow) -> dict[str, dict[str, Any]]:
    table = rounds(accept, confidence)
    ways = chosen(table, {}, cost, [4], 3)
    assert list(ways) == [4]
    return {one["name"]: one for one in compared(judged(table, {}, cost, ways, 3))}


def test_nothing_is_gained_where_all_tokens_are_alike() -> None:
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


def test_knowing_which_tokens_are_accepted_pays_where_rows_are_dear() -> None:
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
    assert stale["over_fresh"].value == pytest.approx(
        stale["tokens_per_second"].value / best["tokens_per_second"].value
    )


def test_written_by_name() -> None:
    same = np.full((1, 9, 3), 0.8)
    (found,) = facts([by_name(same, same, FREE)[PLAIN]])
    assert found["requests"] == 4 and found["name"] == PLAIN
    rate = found["tokens_per_second"]
    assert rate["value"] == pytest.approx(4.0) and rate["low"] is None  # of one prompt
