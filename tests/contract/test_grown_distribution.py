"""Drafts grown by value, several rounds, enumerated: the output has the target's distribution,
whatever the predictor says and however the rate is found; where a drawn node is pruned it has
not."""

import pytest

from decoding.cost import CostTable, cost_table
from decoding.engines.serial import SerialEngine
from decoding.sampling import Warp
from decoding.stopping.never import Never
from decoding.structures.lookup import Copies
from decoding.trace import Trace
from tests.contract.covering import covering, crossed
from tests.contract.engines import (
    OFF,
    checked,
    decoded_distribution,
    limited_pair,
    target_distribution,
    toy_pair,
    verifier,
)
from tests.contract.enumeration import largest_error
from tests.contract.lossy import PruningGrown
from tests.contract.test_engine_controls import check_biased
from tests.helpers.decoding.value_stub import Nosy, grown

COSTS = {
    "free rows": cost_table(0.3, 5.0),
    "rows": cost_table(0.5, {1: 5.0, 9: 10.0}),
    "steps": cost_table(0.2, {1: 5.0, 2: 5.0, 3: 6.0, 9: 6.0}),
}
RULES = ["rrsw", "spechub", "point_mass", "rrs"]


def engine(rule: str, vocab: int, cost: CostTable, **settings):
    settings = {"budget": 4, "siblings": 2} | settings
    structure = grown(Nosy(), cost, **settings)
    pair = toy_pair(vocab, 31)
    return SerialEngine(pair, structure, Never(), verifier(rule), OFF, OFF)


def sizes(traces: list[Trace]) -> set[int]:
    return {len(round_.draft_tokens) for trace in traces for round_ in trace.rounds}


def widths(traces: list[Trace]) -> set[int]:
    """Candidates of the first position."""
    return {round_.draft_parents.count(0) for trace in traces for round_ in trace.rounds}


@pytest.mark.parametrize(("rule", "cost"), covering(crossed(RULES, COSTS)))
def test_grown_drafts_are_lossless(rule: str, cost: str) -> None:
    found = list[Trace]()
    for rate in (None, 0.5):
        for vocab, length in ((2, 4), (3, 3)):
            traces = checked(engine(rule, vocab, COSTS[cost], rate=rate, budget=3), length)
            assert max(len(trace.rounds) for trace in traces) > 1
            found += traces
    assert len(sizes(found)) > 2 and {1, 2} & widths(found)


@pytest.mark.parametrize("rule", ["rrsw", "point_mass", "rrs"])
@pytest.mark.few(1)
def test_three_candidates_of_one_position(rule: str) -> None:
    cost, found = cost_table(4.0, {1: 5.0, 9: 5.1}), set[int]()
    for rate in (0.02, 0.4):
        found |= widths(checked(engine(rule, 3, cost, rate=rate, siblings=3, budget=4), 3))
    assert 3 in found and len(found) > 2


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_chain_is_grown_for_rules_that_take_chains(rule: str) -> None:
    traces = checked(engine(rule, 2, COSTS["rows"], siblings=1), 4)
    assert sizes(traces) >= {0, 1, 2}


@pytest.mark.parametrize(("rule", "siblings"), [*((rule, 2) for rule in RULES), ("block", 1)])
def test_rounds_that_copy_from_the_text_between_grown_ones(rule: str, siblings: int) -> None:
    found = list[Trace]()
    for vocab, length, ngram in ((2, 5, 2), (3, 4, 1)):
        copies, cost = Copies(2, ngram, 1), COSTS["rows"]
        found += checked(engine(rule, vocab, cost, siblings=siblings, copies=copies), length)
    copied = [
        round_.draft_forwards == 0 < len(round_.draft_tokens) for t in found for round_ in t.rounds
    ]
    assert 0 < sum(copied) < len(copied)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("budget", [1, 2])
def test_the_smallest_drafts(rule: str, budget: int) -> None:
    traces = checked(engine(rule, 2, COSTS["free rows"], budget=budget), 3)
    assert sizes(traces) == {0, budget}, "no draft where one token is left"
    assert checked(engine(rule, 2, COSTS["free rows"], budget=budget), 1)[0].rounds


@pytest.mark.parametrize(("rule", "tokens"), covering(crossed(RULES, [[0, 2], [1]])))
def test_a_draft_that_lacks_tokens(rule: str, tokens: list[int]) -> None:
    decoder = engine(rule, 3, COSTS["free rows"], budget=3)
    decoder.pair = limited_pair(3, 5, tokens)
    checked(decoder, 3)


WARPS = [(Warp(0.7, top_k=2), Warp(1.5)), (OFF, Warp(0.0)), (Warp(0.0), OFF)]


@pytest.mark.parametrize(("rule", "warp", "draft_warp"), covering(crossed(RULES, WARPS)))
def test_warps_and_an_end_token_inside_of_a_draft(rule: str, warp: Warp, draft_warp: Warp) -> None:
    decoder = engine(rule, 3, COSTS["free rows"], budget=3)
    decoder.warp, decoder.draft_warp, decoder.eos_ids = warp, draft_warp, frozenset({1})
    for trace in checked(decoder, 3):
        for round_ in trace.rounds:
            inner = {round_.draft_tokens[parent - 1] for parent in round_.draft_parents if parent}
            assert 1 not in inner


@pytest.mark.parametrize("rule", ["rrsw", "spechub", "rrs"])
@pytest.mark.few(1)
def test_pruning_a_drawn_node_by_its_value_is_caught(rule: str) -> None:
    structure = grown(Nosy(), COSTS["free rows"], budget=4, kind=PruningGrown)
    check_biased(SerialEngine(toy_pair(3, seed=9), structure, Never(), verifier(rule), OFF, OFF), 3)


def test_a_pair_whose_second_follows_from_its_first_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("decoding.structures.grown.SETTLED_FIRST", ())
    errors = []
    for seed in range(5, 13):
        structure = grown(Nosy(), COSTS["steps"], budget=4)
        decoder = SerialEngine(toy_pair(3, seed), structure, Never(), verifier("spechub"), OFF, OFF)
        distribution, _ = decoded_distribution(decoder, 3)
        errors.append(largest_error(distribution, target_distribution(decoder.pair, OFF, 3)))
    assert max(errors) > 1e-3
