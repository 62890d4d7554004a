"""Modelled time against counts small enough to price by hand."""

import pytest

from decoding.trace import STAGES, RoundTrace, StageTrace, Trace
from evaluation.table import compare, over, prompts, timed
from evaluation.timeline import Devices, branch_rows, modelled_seconds, priced

C5 = Devices.of_ratio(5)


def trace(*rounds: RoundTrace) -> Trace:
    return Trace(
        3, [token for round_ in rounds for token in round_.tokens], list(rounds), 9.0, 99.0
    )


def chain(drafted: int, committed: int) -> RoundTrace:
    """A round in turn; prefill and measured seconds must not matter."""
    tokens = list(range(drafted))
    return RoundTrace(
        tokens,
        list(range(drafted)),
        [0.5] * drafted,
        0,
        0,
        [7] * committed,
        [],
        drafted,
        dict.fromkeys(STAGES, 1.0),
    )


def overlapped(
    pending: int, alone: int, beside: int, branches: int, committed: int = 1
) -> RoundTrace:
    round_ = chain(pending, committed)
    round_.draft_forwards = alone + beside
    round_.overlap = StageTrace(
        "draft", 1, pending, alone + beside, alone, [[1]] * branches, 0, 0, []
    )
    return round_


def test_in_turn_is_a_sum() -> None:
    assert modelled_seconds(trace(chain(0, 1), chain(3, 2)), C5) == 5 + (3 + 5)


@pytest.mark.parametrize(("beside", "seconds"), [(0, 5), (4, 5), (7, 7)])
def test_side_by_side_is_the_longer_of_the_two(beside: int, seconds: float) -> None:
    assert modelled_seconds(trace(overlapped(2, 0, beside, 3)), C5) == seconds


def test_the_draft_stage_comes_before() -> None:
    assert modelled_seconds(trace(overlapped(2, 3, 4, 3)), C5) == 3 + 5


def test_rows_are_priced() -> None:
    devices = Devices(draft=lambda rows: rows / 10, target=lambda rows: 10.0 + rows)
    assert modelled_seconds(trace(chain(3, 1)), devices) == pytest.approx(3 * 0.1 + 14)
    round_ = overlapped(2, 1, 3, 0)
    round_.overlap.branches = [
        [1, 2, 3],
        [1],
        [1, 2],
    ]  # the tip's own forward, then two that grow, then one
    assert branch_rows(round_.overlap, 3) == [1, 2, 1]
    assert modelled_seconds(trace(round_), devices) == pytest.approx(0.1 + 13)
    assert modelled_seconds(
        trace(round_), Devices(devices.draft, lambda rows: 0.0)
    ) == pytest.approx(0.1 + 0.4)


def test_rows_beyond_the_draft_are_priced() -> None:
    round_ = chain(3, 1)
    round_.extra_rows = 20
    assert modelled_seconds(trace(round_), Devices(lambda rows: 0.0, float)) == 24


def test_a_tree_forward_has_the_nodes_of_its_layer() -> None:
    round_ = chain(6, 1)
    round_.draft_forwards = 2
    devices = Devices(draft=lambda rows: float(rows), target=lambda rows: 100.0)
    assert modelled_seconds(trace(round_), devices) == 2 * 3 + 100


@pytest.mark.parametrize(("forwards", "seconds"), [(0, 5), (4, 5), (5, 5.5), (6, 6), (9, 9)])
def test_a_pipelined_target_leaves_halves_to_the_draft(forwards: int, seconds: float) -> None:
    """Whole draft steps in each half of 2.5: two and two fit, a fifth makes one half last 3."""
    devices = Devices(C5.draft, C5.target, pipeline=True)
    assert modelled_seconds(trace(overlapped(1, 0, forwards, 2)), devices) == seconds


def test_counts_and_prices_of_both_models_side_by_side() -> None:
    def round_(pending: int, accepted: int, branch: bool, steps: int, lost: int) -> RoundTrace:
        stages = StageTrace("draft", 1, pending, steps, 1, [[0, 0]], lost, 0, [])
        found = chain(pending + 1, 0)
        found.tokens, found.accepted = [0] * (accepted + 1), accepted + branch
        found.draft_parents = [*range(pending), pending]
        found.row = pending + 1 if branch else accepted
        found.draft_forwards, found.overlap = 3, stages
        return found

    first = trace(round_(2, 2, True, 4, 0), round_(2, 1, False, 5, 3))
    second = trace(round_(1, 0, False, 2, 2))
    second.prompt_id = "b"
    traces = {"m": [first, second, first]}
    rows = priced(timed(traces), traces, [4], None, [])
    each = prompts(rows, "emitted", "rounds", "steps", "lost", "run_tokens", "runs", "modelled c=4")
    assert each.to_numpy().tolist() == [[10, 4, 18, 6, 8, 2, 20], [1, 1, 2, 2, 0, 1, 5]]
    assert over(each, each, "lost", "steps") == (1, 1, 1)


def test_speedup_is_per_token() -> None:
    plain = trace(*[chain(0, 1)] * 6)
    traces = {
        "autoregressive": [plain],
        "m": [trace(overlapped(3, 0, 4, 1, committed=4))],
        "nothing": [trace()],
    }
    rows = priced(timed(traces), traces, [5], None, [])
    found = compare(rows, below="modelled c=5")
    assert found["autoregressive"].value == 1 and found["nothing"].value == 0
    assert found["m"].value == pytest.approx(4)
