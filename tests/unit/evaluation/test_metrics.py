"""Metrics of hand-made traces, computed by hand."""

from dataclasses import replace

import pytest

from decoding.trace import STAGES, RoundTrace, Span, StageTrace, Trace
from evaluation.lossless import broken_invariants
from evaluation.metrics import accepted_lengths, accepted_runs, measure, profile


def round_(
    drafted: int, accepted: int, emitted: int, forwards: int = 0, **seconds: float
) -> RoundTrace:
    tokens = list(range(10, 10 + drafted))
    committed = [*tokens[:accepted], *[7] * (emitted - accepted)]
    times = {s: seconds.get(s, 0.0) for s in STAGES}
    return RoundTrace(
        tokens,
        list(range(drafted)),
        [0.5] * drafted,
        accepted,
        accepted,
        committed,
        [],
        forwards,
        times,
    )


def trace(rounds: list[RoundTrace], seconds: float, prefill: float = 0.0) -> Trace:
    return Trace(5, [token for r in rounds for token in r.tokens], rounds, prefill, seconds)


# 3 + 0 of 4 + 2 accepted, then 2 of 2, then 1 of 3: runs 3 | 0 | 3, and one token without draft
FIRST = [
    round_(4, 3, 4, 4),
    round_(2, 0, 1, 3),
    round_(2, 2, 3, 2),
    round_(3, 1, 2, 3),
    round_(0, 0, 1),
]
SECOND = [round_(1, 1, 2, 1), round_(1, 1, 2, 1)]  # one run of 2 that ends with the request


def test_runs_span_rounds_and_end_at_rejections() -> None:
    assert accepted_runs(trace(FIRST, 1.0)) == [3, 0, 3]
    assert accepted_runs(trace(SECOND, 1.0)) == [2]
    assert accepted_runs(trace([round_(0, 0, 1)], 1.0)) == []


def test_a_serial_round_is_an_accepted_length_by_itself() -> None:
    assert accepted_lengths(trace(FIRST, 1.0)) == [3, 0, 2, 1]
    assert accepted_lengths(trace([round_(0, 0, 1)], 1.0)) == []


def test_accepted_lengths_of_an_overlapped_engine_span_rounds() -> None:
    shared = StageTrace("draft", 1, 1, 1, 1, [], 0, 0, [])
    rounds = [replace(found, overlap=shared) for found in FIRST]
    assert accepted_lengths(trace(rounds, 1.0)) == accepted_runs(trace(FIRST, 1.0)) == [3, 0, 3]


def tree_round(row: int, accepted: int) -> RoundTrace:
    """Two children of the root, rows 1 and 3, and a child of the first, row 2."""
    committed, seconds = [7] * (accepted + 1), dict.fromkeys(STAGES, 0.0)
    return RoundTrace([4, 5, 6], [0, 1, 0], [0.5] * 3, row, accepted, committed, [], 2, seconds)


def test_runs_end_at_inner_rows_of_a_tree_only() -> None:
    deep, shallow, inner, root = (
        tree_round(2, 2),
        tree_round(3, 1),
        tree_round(1, 1),
        tree_round(0, 0),
    )
    assert accepted_runs(trace([deep, shallow, inner, root, deep], 1.0)) == [2 + 1 + 1, 0, 2]


def test_ratios_pool_over_requests() -> None:
    found = measure([[trace(FIRST, 2.0), trace(SECOND, 1.0)]])
    assert (found.requests, found.tokens) == (2, 15)  # 11 + 4
    assert found.tokens_per_second.median == 5.0
    assert found.speedup is None
    assert found.tokens_per_target_call == pytest.approx(15 / 7)
    assert found.drafted_per_round == pytest.approx(13 / 7)
    assert found.draft_forwards_per_round == pytest.approx(14 / 7)
    assert found.accepted_run == pytest.approx((3 + 0 + 3 + 2) / 4)
    assert found.accepted_length == pytest.approx((3 + 0 + 2 + 1 + 1 + 1) / 6)
    assert found.discard_rate == pytest.approx(5 / 15)
    assert found.verification_rate == pytest.approx(7 / 15)
    assert found.rollback_rate == pytest.approx(5 / 13)
    assert found.acceptance == pytest.approx(8 / 13)
    assert found.acceptance_per_request == pytest.approx((6 / 11 + 2 / 2) / 2)
    assert found.acceptance_per_request_std == pytest.approx((1 - 6 / 11) / 2)


def test_rollback_counts_steps_in_time() -> None:
    """A tree has as many as its depth; where the models overlap the engine has counted them."""
    assert (
        measure(
            [[trace([tree_round(2, 2), tree_round(3, 1), tree_round(0, 0)], 1.0)]]
        ).rollback_rate
        == 3 / 6
    )
    counted = round_(6, 1, 2)
    counted.overlap = StageTrace("branch", 1, 2, 4, 0, [[1]], 3, 0, [])
    assert measure([[trace([counted], 1.0)]]).rollback_rate == 3 / 4


def test_speedup_is_taken_within_a_repeat() -> None:
    """The machine slows down threefold in the second repeat; the ratio does not care."""
    ours = [[trace(SECOND, 1.0)], [trace(SECOND, 3.0)], [trace(SECOND, 2.0)]]
    plain = [[trace(SECOND, 2.0)], [trace(SECOND, 6.0)], [trace(SECOND, 3.0)]]
    found = measure(ours, plain)
    assert found.speedup is not None
    assert (found.speedup.low, found.speedup.median, found.speedup.high) == (1.5, 2.0, 2.0)
    assert (found.tokens_per_second.low, found.tokens_per_second.high) == (
        pytest.approx(4 / 3),
        4.0,
    )


def test_autoregressive_traces_have_no_draft_figures() -> None:
    found = measure([[trace([round_(0, 0, 1)] * 3, 1.0)]])
    assert found.tokens_per_target_call == found.verification_rate == 1
    assert found.acceptance == found.accepted_run == found.discard_rate == found.rollback_rate == 0


def test_profile_and_predictor_share() -> None:
    rounds = [round_(1, 1, 2, 1, draft=0.2, target=0.5, stop=0.1, verify=0.05)]
    shares = profile([trace(rounds, 1.5, prefill=0.5)])
    assert shares["target"] == 0.5 and shares["other"] == pytest.approx(0.15)
    assert shares["overhead"] == pytest.approx(0.3)
    assert measure([[trace(rounds, 2.0)]]).predictor_share == pytest.approx(0.05)


def test_overhead_is_the_time_in_which_no_model_has_a_job() -> None:
    first, second = round_(1, 1, 2, 1, draft=0.4, target=0.5), round_(1, 0, 1, 1, draft=0.1)
    side_by_side = [
        Span("target", "verify", 0.5, 1.0, 2),
        Span("draft", "branch stage", 0.6, 0.9, 3),
    ]
    first.overlap = StageTrace("pre_verify", None, 0, 3, 0, [[1]], 0, 0, side_by_side)
    second.overlap = StageTrace(
        "branch", 2, 1, 3, 0, [[1]], 3, 0, [Span("draft", "branch stage", 1.1, 1.3, 1)]
    )
    shares = profile([trace([first, second], 1.5, prefill=0.5)])
    assert shares["draft"] + shares["target"] == pytest.approx(1) and shares[
        "overhead"
    ] == pytest.approx(0.3)


def test_invariants() -> None:
    sound = trace(FIRST, 1.0)
    assert broken_invariants(sound, 11, frozenset({99})) == []
    assert broken_invariants(sound, 10, frozenset({99})) == ["longer than max_new_tokens"]
    assert broken_invariants(sound, 11, frozenset({7})) == ["goes on after EOS"]
    withdrawn = trace([round_(4, 3, 4)], 1.0)
    withdrawn.rounds[0].draft_tokens[1] = 3
    assert broken_invariants(withdrawn, 9, frozenset()) == [
        "a round commits other tokens than it accepted"
    ]
