"""Counts and prices of simulated methods on traces small enough to count by hand."""

import numpy as np
import pytest

from decoding.stopping.fixed import Fixed
from decoding.stopping.rollout_table import build
from decoding.trace import STAGES, RoundTrace, StageTrace, Trace
from evaluation.overlapped.sums import Sums
from evaluation.replay.simulate import Replayer


def round_(pending: int, accepted: int, branch: bool, steps: int, lost: int) -> RoundTrace:
    stages = StageTrace("draft", 1, pending, steps, 1, [[0, 0]], lost, 0, [])
    tokens = [0] * (accepted + 1)
    row = pending + 1 if branch else accepted
    parents = [*range(pending), pending]
    drafted, seconds = [0] * (pending + 1), dict.fromkeys(STAGES, 0.0)
    return RoundTrace(drafted, parents, [], row, accepted + branch, tokens, [], 3, seconds, stages)


def trace(prompt: str, *rounds: RoundTrace) -> Trace:
    tokens = [0] * sum(len(one.tokens) for one in rounds)
    return Trace(0, tokens, list(rounds), 0.0, 0.0, prompt_id=prompt)


def test_traces_are_counted_and_priced_by_prompt() -> None:
    first = trace("a", round_(2, 2, True, 4, 0), round_(2, 1, False, 5, 3))
    found = Sums.overlapped([first, trace("b", round_(1, 0, False, 2, 2)), first], [4])
    assert found.prompts == 2
    counts = {name: values.tolist() for name, values in found.counts.items()}
    assert counts["tokens"] == [10, 1] and counts["calls"] == [4, 1]
    assert counts["steps"] == [18, 2] and counts["lost"] == [6, 2]
    assert counts["accepted"] == [8, 0] and counts["runs"] == [2, 1]
    assert found.seconds[4].tolist() == [20, 5]  # each round 1 + max(2, 4)
    facts = found.facts(4)
    assert facts["rollback"].value == pytest.approx(8 / 20)
    assert facts["speedup"].value == pytest.approx(4 * 11 / 25)
    assert found.over(found, 4)["speed"] == (1, 1, 1) == found.over(found, 4)["rollback"]


def test_drafts_in_turn_are_priced_as_a_sum() -> None:
    """Every second rollout is right to the end: rounds of 2 tokens at 0, 3, 4 and so on."""
    length, gamma = 6, 3
    right = np.array([[position % 2 == 0] * gamma for position in range(length)])
    facts = {"prompt_id": "a", "length": length, "max_new": length, "drawn": [gamma] * length}
    some = {name: np.full((length, gamma), 0.5) for name in ("confidence", "max_q", "entropy")}
    tokens = {"tokens": np.ones((length, gamma)), "accept": right, "accepted": right.sum(1)}
    table = build([facts | some | tokens], greedy=True)
    found = Sums.serial(Replayer(table, 2).replay(Fixed(1).policy(table), 2), [5])
    assert {name: values.tolist() for name, values in found.counts.items()} == {
        "tokens": [6],
        "calls": [3],
        "steps": [5],
        "lost": [2],
        "accepted": [3],
        "runs": [3],
    }
    assert found.seconds[5].tolist() == [5 + 5 * 3]
    both = found.joined(found)
    assert both.prompts == 2 and both.seconds[5].tolist() == [20, 20]
