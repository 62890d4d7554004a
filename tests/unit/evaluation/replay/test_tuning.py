"""Cost tables, regression, the oracle, frontiers and intervals on cases whose answer is known."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decoding.cost import CostTable, cost_table, observed_cost, read_cost, regress, regress_traces
from decoding.stopping.fixed import Fixed
from decoding.stopping.rollout_table import RolloutTable, build
from decoding.trace import STAGES, RoundTrace, Trace
from evaluation.replay.simulate import Replayer, counts_of
from evaluation.replay.tuning import (
    Candidate,
    best,
    choose,
    dominated_share,
    dominates,
    frontier,
    hindsight,
    interval,
    knowing,
    oracle_calls,
    oracle_totals,
    span,
    speedup,
    sweep,
)
from runtime.errors import UserError
from runtime.intervals import Array

GAMMA = 6


def table_of(differs: list[list[bool]], gamma: int = GAMMA) -> RolloutTable:
    """Greedy responses whose draft differs at the given positions."""
    rows = []
    for number, misses in enumerate(differs):
        padded = [*misses, *[True] * gamma]
        right = np.array(
            [[not miss for miss in padded[start : start + gamma]] for start in range(len(misses))]
        )
        accept = np.logical_and.accumulate(right, axis=1)
        shape = (len(misses), gamma)
        facts = {
            "prompt_id": str(number),
            "length": len(misses),
            "max_new": len(misses),
            "drawn": [gamma] * shape[0],
        }
        values = {name: np.full(shape, 0.5) for name in ("confidence", "max_q", "entropy")}
        rows.append(
            facts | values | {"tokens": np.ones(shape), "accept": accept, "accepted": accept.sum(1)}
        )
    return build(rows, greedy=True)


FIXED = Fixed(1).policy(table_of([[False]]))


def random_misses(seed: int, length: int = 40, prompts: int = 4) -> list[list[bool]]:
    return (np.random.default_rng(seed).random((prompts, length)) < 0.3).tolist()


# Costs --------------------------------------------------------------------------------------------


def test_regression_recovers_known_costs() -> None:
    forwards = np.random.default_rng(0).integers(1, 60, (30, 2)).astype(float)
    exact = regress(forwards, forwards @ [0.0234, 0.112])
    assert (exact.draft, exact.target) == pytest.approx(
        (0.0234, 0.112)
    ) and exact.r2 == pytest.approx(1)
    noise = np.random.default_rng(1).normal(0, 0.1, 30)
    rough = regress(forwards, forwards @ [0.0234, 0.112] + noise)
    assert (rough.draft, rough.target) == pytest.approx(
        (0.0234, 0.112), rel=0.1
    ) and 0.95 < rough.r2 < 1
    assert "23.40 ms N_draft + 112.00 ms N_target over 30 generations" in str(exact)


def round_of(drafted: int, forwards: int, calls: int, **seconds: float) -> RoundTrace:
    parts = {stage: seconds.get(stage, 0.0) for stage in STAGES}
    tokens = [1] * drafted
    return RoundTrace(
        tokens, list(range(drafted)), [1.0] * drafted, 0, 0, [1], [0.5] * calls, forwards, parts
    )


def trace_of(rounds: list[RoundTrace]) -> Trace:
    spent = sum(sum(r.seconds.values()) for r in rounds)
    return Trace(3, [1] * len(rounds), rounds, 0.5, 0.5 + spent)


def test_costs_are_read_off_real_decodes() -> None:
    short = [
        round_of(1, 2, 2, draft=0.2, sample=0.02, target=1.0, verify=0.1, stop=0.06)
        for _ in range(3)
    ]
    long = [
        round_of(4, 4, 4, draft=0.4, sample=0.04, target=2.0, verify=0.2, stop=0.12)
        for _ in range(3)
    ]
    rare = [round_of(9, 9, 9, draft=0.9, sample=0.09, target=99.0, stop=0.27)]
    plain = [trace_of([round_of(0, 0, 0, target=0.8, sample=0.1)] * 4)]
    found = observed_cost({"confidence": [trace_of(short + long + rare)]}, plain)
    assert found.draft == pytest.approx(0.11) and found.autoregressive == pytest.approx(0.9)
    assert found.target.rows == [2, 5] and found.target.seconds == pytest.approx([1.1, 2.2]), (
        "one round is no measurement"
    )
    assert found.calls["confidence"] == pytest.approx(0.03)
    fit = regress_traces([trace_of(short), trace_of(long)])
    assert fit.draft * 6 + fit.target * 3 == pytest.approx(
        sum(sum(r.seconds.values()) for r in short)
    )


def test_a_price_is_a_sum_over_rounds(tmp_path: Path) -> None:
    by_length = np.zeros((1, GAMMA + 1))
    by_length[0, [0, 2]] = 1, 3  # a round without a draft and three of two tokens
    numbers = {"draft_forwards": 8.0, "questions": 9.0, "emitted": 8.0}
    counts = {name: np.array([value]) for name, value in numbers.items()}
    counts["calls_by_drafted"] = by_length
    table = cost_table(0.1, {1: 1.0, 3: 1.5}, 0.9, {"entropy": 0.01})
    assert table.price(counts, "entropy") == pytest.approx(0.8 + 1.0 + 3 * 1.5 + 0.09)
    assert table.price(counts, "fixed") == pytest.approx(0.8 + 1.0 + 3 * 1.5)
    fewer = cost_table(0.1, {1: 1.0, 2: 1.25}, 0.9)
    assert fewer.price(counts) == pytest.approx(table.price(counts)), "rows beyond are not free"
    assert table.plain(counts) == pytest.approx(7.2)
    file = tmp_path / "cost.json"
    with pytest.raises(UserError, match=r"cost\.file: .*is missing\. Measure it: .* cost=measure"):
        read_cost(file)
    file.write_text(
        json.dumps(
            {"seconds": table.to_dict(), "pair": {"target": "aa"}, "measured_on": {"threads": 3}}
        )
    )
    assert read_cost(file) == replace(table, pair={"target": "aa"}, measured_on={"threads": 3})
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pair": "aa"}))
    with pytest.raises(UserError, match=r"^cost\.file: .*is damaged .no valid pair.*cost=measure"):
        read_cost(file)


def test_a_plain_token_has_a_cost() -> None:
    with pytest.raises(UserError, match=r"^cost\.autoregressive: "):
        cost_table(1.0, {2: 1.0})
    cost_table(1.0, {2: 1.0}, 0.5, {"hrad": 0.0})


def test_a_row_may_cost_a_share_of_a_call() -> None:
    flat, dear = cost_table(1.0, 5.0, row=0), cost_table(1.0, 5.0, row=0.02)
    assert flat == cost_table(1.0, 5.0) and flat.target(100) == 5
    assert [dear.target(rows) for rows in (1, 2, 11)] == pytest.approx([5, 5.1, 6])
    assert dear.autoregressive == 5
    again = {int(rows): seconds for rows, seconds in dear.to_dict()["target"].items()}
    assert cost_table(1.0, again) == dear
    with pytest.raises(UserError, match=r"^cost\.row: expected 0 where cost\.target says seconds"):
        cost_table(1.0, {1: 5.0}, row=0.02)


def test_too_few_rounds_are_no_measurement() -> None:
    plain = [trace_of([round_of(0, 0, 0, target=0.8)])]
    with pytest.raises(UserError, match=r"cost\.limit: too few rounds"):
        observed_cost({"fixed 1": [trace_of([round_of(1, 1, 0, draft=0.1, target=1.0)])]}, plain)


# Bounds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("differs", "calls"),
    [
        ([False], (0, 1)),
        ([True], (0, 1)),
        ([False] * 5, (4, 1)),
        ([True] * 5, (0, 5)),
        ([False, True, False, False], (2, 2)),
        ([False, True, False, True], (2, 2)),
    ],
)
def test_oracle_counts_calls_at_the_edges(differs: list[bool], calls: tuple[int, int]) -> None:
    """Decoding with a draft as long as the text shows them: nothing is discarded, the calls add up
    to the tokens."""
    assert oracle_calls(differs) == calls
    assert sum(calls) == len(differs)
    cost = cost_table(1.0, 10.0)
    least = hindsight(Replayer(table_of([differs], gamma=9), 9), cost)
    assert least[0] == calls[0] * 1.0 + calls[1] * 10.0


def test_hindsight_is_the_oracle_where_drafting_pays() -> None:
    misses = random_misses(0)
    replayer = Replayer(table_of(misses, gamma=40), 40)
    for draft, target in ((1.0, 4.0), (0.0234, 0.112)):
        assert oracle_totals(replayer.table) == tuple(
            map(sum, zip(*map(oracle_calls, misses), strict=True))
        )
        wanted = [np.dot(oracle_calls(row), (draft, target)) for row in misses]
        assert hindsight(replayer, cost_table(draft, target)) == pytest.approx(wanted)


def test_no_policy_beats_hindsight_and_useless_drafts_are_not_drawn() -> None:
    replayer = Replayer(table_of(random_misses(1)), GAMMA)
    found = sweep(replayer, {"fixed": FIXED}, {"fixed": range(1, GAMMA + 1)})
    for cost in (cost_table(1.0, 5.0), cost_table(1.0, {1: 2.0, 4: 9.0}), cost_table(9.0, 1.0)):
        least = hindsight(replayer, cost)
        assert all((least <= cost.price(candidate.counts) + 1e-9).all() for candidate in found)
    assert hindsight(replayer, cost_table(9.0, 1.0)) == pytest.approx(40.0), "without a draft"
    measured, less = (cost_table(0.1, {1: 2.0, last: 1.0 + last}) for last in (GAMMA + 1, 2))
    assert hindsight(replayer, less) == pytest.approx(hindsight(replayer, measured))


def test_knowing_the_target_a_draft_ends_before_a_token_that_is_too_unlikely() -> None:
    table = table_of([[False, False, True, False, True]], gamma=3)
    found = Replayer(table, 3).replay(knowing(table), 0.5)
    row = counts_of(found, 0)
    assert row["rounds"] == 2 and row["accepted"] == 3, "two tokens, then the one before the end"
    assert row["drafted"] == row["accepted"], "nothing is discarded"
    always = table_of([[True] * 4], gamma=3)
    first = Replayer(always, 3).replay(knowing(always), 0.5)
    assert first["drafted"].tolist() == [3], "the first token is drawn, whatever it is worth"


# Choosing -----------------------------------------------------------------------------------------


def candidate(rule: str, threshold: float, discarded: float, rounds: float) -> Candidate:
    return Candidate(rule, threshold, counts_with(np.array([rounds]), np.array([discarded])))


def counts_with(rounds: Array, drafted: Array) -> dict[str, Array]:
    """Of prompts with 100 tokens each, nothing accepted, no draft's time."""
    zero = np.zeros(len(rounds))
    columns = {"draft_forwards": zero, "questions": zero, "accepted": zero, "emitted": zero + 100}
    return {**columns, "drafted": drafted, "rounds": rounds, "calls_by_drafted": rounds[:, None]}


def test_frontier_keeps_what_nothing_beats() -> None:
    points = [(10, 60), (20, 40), (20, 50), (30, 45), (40, 30), (40, 30)]
    found = [candidate("fixed", level, *rates) for level, rates in enumerate(points)]
    assert [kept.threshold for kept in frontier(found)] == [0, 1, 4]
    assert found[0].rates == (0.1, 0.6)


def test_dominance() -> None:
    assert dominates((0.1, 0.5), (0.1, 0.6)) and not dominates((0.1, 0.5), (0.1, 0.5))
    assert not dominates((0.1, 0.6), (0.2, 0.5))
    theirs = [candidate("fixed", level, *rates) for level, rates in enumerate([(10, 60), (40, 30)])]
    assert dominated_share([candidate("specdecpp", 0.5, 9, 60)], theirs) == 0.5


def test_the_best_threshold_depends_on_the_cost_table() -> None:
    replayer = Replayer(table_of(random_misses(2)), GAMMA)
    found = sweep(replayer, {"fixed": FIXED}, {"fixed": range(1, GAMMA + 1)})
    slow, fast = cost_table(1.0, 2.0), cost_table(1.0, 100.0)
    assert best(found, slow).threshold < best(found, fast).threshold
    assert speedup(best(found, fast), fast) > 1 > speedup(best(found, slow), cost_table(5.0, 1.0))


def test_choices_are_judged_on_other_prompts() -> None:
    replayers = [Replayer(table_of(random_misses(seed)), GAMMA) for seed in (3, 4)]
    policies, grid = {"fixed": FIXED}, {"fixed": range(1, GAMMA + 1)}
    first, second = (sweep(replayer, policies, grid) for replayer in replayers)
    cost: CostTable = cost_table(1.0, 8.0)
    (choice,) = choose(first, second, cost, hindsight(replayers[1], cost))
    assert choice.threshold == best(first, cost).threshold
    judged = next(c for c in second if c.threshold == choice.threshold)
    assert choice.speedup == speedup(judged, cost) and choice.regret > 0
    assert choice.expected == speedup(best(first, cost), cost)
    assert choice.interval[0] <= choice.speedup <= choice.interval[1]


def test_rules_are_compared_prompt_by_prompt() -> None:
    rng, rules = np.random.default_rng(0), []
    hard = rng.uniform(10, 100, 30)  # rounds of a prompt: prompts differ far more than rules
    for name, factor in (("a", 1.0), ("b", 1.1), ("c", 1.3)):
        spent = hard * factor * rng.uniform(0.99, 1.01, 30)
        rules.append(Candidate(name, 0.5, counts_with(spent, np.zeros(30))))
    cost = cost_table(1.0, 8.0)
    first, second, third = choose(rules, rules, cost, np.ones(30))
    assert [choice.other for choice in (first, second, third)] == ["b", "a", "a"]
    assert first.gain == pytest.approx(1.1, rel=0.01) and third.gain == pytest.approx(1 / 1.3, 0.01)
    low, high = first.gain_interval
    assert 1.09 < low <= first.gain <= high < 1.11 and low > first.interval[0] / second.speedup
    (alone,) = choose(rules[:1], rules[:1], cost, np.ones(30))
    assert alone.other is None


def test_the_rule_to_advise_is_the_best_where_thresholds_are_chosen() -> None:
    by_choice, by_verdict = candidate("a", 0.5, 0, 40), candidate("b", 0.5, 0, 50)
    swapped = [replace(by_verdict, rule="a"), replace(by_choice, rule="b")]
    found = choose([by_choice, by_verdict], swapped, cost_table(1.0, 8.0), np.ones(1))
    assert [choice.rule for choice in found] == ["a", "b"] and found[0].speculate
    assert found[0].expected > found[1].expected and found[0].speedup < found[1].speedup


def test_a_rule_speculates_where_it_pays_beyond_the_noise() -> None:
    replayers = [Replayer(table_of(random_misses(seed)), GAMMA) for seed in (3, 4)]
    first, second = (sweep(r, {"fixed": FIXED}, {"fixed": range(1, GAMMA + 1)}) for r in replayers)
    found = {}
    for price in np.arange(0.1, 2.0, 0.05):  # of a draft token; a target call is 1
        cost = cost_table(float(price), 1.0)
        (choice,) = choose(first, second, cost, np.ones(1))
        found[price] = (
            choice.expected,
            interval(*priced(first, choice.threshold, cost))[0],
            choice.speculate,
        )
    assert all(speculates == (low > 1) for _, low, speculates in found.values())
    assert {speculates for *_, speculates in found.values()} == {True, False}
    assert any(expected > 1 and not speculates for expected, _, speculates in found.values()), (
        "not beyond the noise"
    )


def priced(candidates: list[Candidate], threshold: float, cost: CostTable) -> tuple[Any, Any]:
    counts = next(c.counts for c in candidates if c.threshold == threshold)
    return cost.plain(counts), cost.price(counts)


def test_one_prompt_has_no_interval() -> None:
    ends = interval(np.ones(1), np.ones(1))
    assert (
        all(map(math.isnan, ends))
        and span(ends) == span([None, None]) == "-"
        and span((1.0, 2.0)) == "1.000-2.000"
    )


def test_interval_covers_the_ratio_of_sums() -> None:
    rng, covered = np.random.default_rng(0), 0
    for seed in range(60):
        below = rng.gamma(2.0, 1.0, 80)
        low, high = interval(2 * below + rng.normal(0, 0.5, 80), below, seed)
        covered += low <= 2 <= high
    assert covered >= 52
