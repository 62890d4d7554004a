"""The distribution of the draft stage / branch stage engine over several rounds, enumerated: it is
the target's."""

from itertools import pairwise
from pathlib import Path

import pytest

from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.sampling import Sampler, Warp
from decoding.stopping.confidence import Confidence
from decoding.stopping.hrad import ALL, NONE, SOME
from decoding.trace import RoundTrace
from evaluation.lossless import broken_invariants
from tests.contract.covering import covering, crossed
from tests.contract.engines import OFF, PROMPT, checked, stop_rule, toy_pair
from tests.contract.enumeration import distribution_of
from tests.contract.overlaps import KEEPING, PEARL, POLICIES, PRIOR, ByTarget, Policy, named

GREEDY = Warp(0.0)
MIXED = [p for p in POLICIES + PRIOR if p.outcome is None]


PARTS = (
    lambda policy: policy.chain_rule,
    lambda policy: policy.branch_rule,
    lambda policy: (policy.outcome, policy.confidence),
    lambda policy: (policy.pre_verify, policy.a_priori),
)


def length_of(policy: Policy) -> int:
    """Over three words. SpecHub draws two candidates whatever the first one is, RRS may draw one
    again, and class "none" draws new ones in every round, which gives many outcomes."""
    return 2 if policy.branch_rule in ("spechub", "rrs") or policy.outcome == NONE else 3


def has_branches(round_: RoundTrace) -> bool:
    return len(round_.draft_tokens) > round_.overlap.pending


def branch_taken(round_: RoundTrace) -> bool:
    return round_.row > round_.overlap.pending


@pytest.mark.parametrize("policy", covering(named(POLICIES + PRIOR + PEARL), *PARTS))
def test_distribution_over_several_rounds(policy: Policy) -> None:
    traces = checked(policy.engine(toy_pair(3, 31)), length_of(policy))
    traces += checked(policy.engine(toy_pair(2, 5)), 3 if policy.outcome == NONE else 4)
    assert max(len(trace.rounds) for trace in traces) > 1
    assert not any(broken_invariants(trace, 5, frozenset()) for trace in traces)
    branched = {branch_taken(round_) for t in traces for round_ in t.rounds if has_branches(round_)}
    assert branched == {True, False}, "branches were always or never taken"


@pytest.mark.parametrize("policy", named(KEEPING))
def test_distribution_of_what_posterior_selection_keeps(policy: Policy) -> None:
    """Of the two tokens after a candidate that was accepted: none, one or both, with branches after
    those."""
    traces = checked(policy.engine(toy_pair(2, 35)), KEEPING[policy])
    kept, after_kept = set[int](), set[bool]()
    for before, after in (pair for trace in traces for pair in pairwise(trace.rounds)):
        if branch_taken(before) and before.overlap.draft_steps == 3:
            kept.add(after.overlap.pending)
        if after.overlap.pending and has_branches(after):
            after_kept.add(branch_taken(after))
    assert kept == {0, 1, 2} and after_kept == {True, False}


def test_a_class_known_before_drafting_keeps_all_of_the_accepted_branch() -> None:
    policy = Policy("token", "rrsw", SOME, "before", 3, 2, a_priori=True)
    traces, kept = checked(policy.engine(toy_pair(2, 35)), 4), set[int]()
    for before, after in (pair for trace in traces for pair in pairwise(trace.rounds)):
        if branch_taken(before):
            branch = before.overlap.branches[before.row - before.overlap.pending - 1]
            assert after.overlap.pending == len(branch) - 1 and after.overlap.outcome == SOME
            kept.add(after.overlap.pending)
    assert len(kept) > 1


@pytest.mark.parametrize(
    ("policy", "warp", "draft_warp"),
    covering(
        crossed(
            named(MIXED + PEARL), [(Warp(0.7), Warp(1.5)), (OFF, Warp(0.7)), (Warp(0.7), GREEDY)]
        ),
        *(lambda policy, *_, part=part: part(policy) for part in PARTS),
        lambda policy, *warps: warps,
    ),
)
def test_distribution_under_warps(policy: Policy, warp: Warp, draft_warp: Warp) -> None:
    checked(policy.engine(toy_pair(3, 5), warp, draft_warp), length_of(policy))


@pytest.mark.parametrize(
    ("policy", "draft_warp"),
    covering(
        crossed(named(MIXED + PEARL), [OFF, GREEDY]),
        *(lambda policy, _, part=part: part(policy) for part in PARTS),
        lambda _, draft_warp: draft_warp,
    ),
)
def test_greedy_target_is_autoregressive_whatever_is_drawn(
    policy: Policy, draft_warp: Warp
) -> None:
    pair, length = toy_pair(3, 5), length_of(policy) + 1
    expected = AutoregressiveEngine(pair, GREEDY).decode(PROMPT, length, Sampler.seeded(0)).tokens
    traces = checked(policy.engine(pair, GREEDY, draft_warp), length)
    assert all(trace.tokens == expected for trace in traces)


@pytest.mark.parametrize(
    ("policy", "eos"),
    covering(
        crossed(named([p for p in POLICIES if p.outcome in (None, ALL)] + PEARL), [1, 2]),
        *(lambda policy, eos, part=part: part(policy) for part in PARTS),
        lambda policy, eos: eos,
    ),
)
def test_distribution_with_eos(policy: Policy, eos: int) -> None:
    ids = frozenset({eos})
    traces = checked(policy.engine(toy_pair(3, 3), eos_ids=ids), length_of(policy))
    assert not any(broken_invariants(trace, length_of(policy), ids) for trace in traces)
    assert any(len(trace.tokens) < length_of(policy) for trace in traces)
    assert any(eos in round_.draft_tokens for trace in traces for round_ in trace.rounds)


@pytest.mark.full
@pytest.mark.parametrize("chain_rule", ["token", "block"])
@pytest.mark.parametrize("outcome", [None, 1, 2])
@pytest.mark.parametrize("confidence", ["drawn", "before"])
def test_distribution_of_longer_drafts(
    chain_rule: str, outcome: int | None, confidence: str
) -> None:
    policy = Policy(chain_rule, "rrsw", outcome, confidence, gamma=3, k_max=4)
    checked(policy.engine(toy_pair(2, 9)), 5)


@pytest.mark.full
@pytest.mark.parametrize("policy", named([p for p in POLICIES if p.outcome != SOME] + PEARL))
def test_distribution_of_larger_sizes(policy: Policy) -> None:
    checked(policy.engine(toy_pair(3, 31)), length_of(policy) + 1)
    checked(policy.engine(toy_pair(2, 5)), 5)


@pytest.mark.slow
def test_distribution_of_what_posterior_selection_keeps_of_longer_texts() -> None:
    policy = next(policy for policy in KEEPING if policy.chain_rule == "block")
    checked(policy.engine(toy_pair(2, 35)), KEEPING[policy] + 1)


@pytest.mark.parametrize("policy", covering(named(MIXED), *PARTS))
def test_distribution_under_classes_read_off_the_target(policy: Policy) -> None:
    """Its states at the last verified position, and, for a branch, the embedding of the branch's
    first token."""
    decoder = policy.engine(toy_pair(3, 31), classes=ByTarget(Confidence(0.4)))
    traces = checked(decoder, length_of(policy))
    assert len({round_.predicted[0] for trace in traces for round_ in trace.rounds}) > 1


def test_distribution_under_a_learned_class(tmp_path: Path) -> None:
    learned = stop_rule("hrad", tmp_path, {"confidence": {"threshold": 0.4}}, gamma=2)
    checked(MIXED[0].engine(toy_pair(3, 31), classes=learned), 3)


@pytest.mark.parametrize(
    "policy", covering(named([p for p in MIXED if p.branch_rule != "point_mass"] + PEARL), *PARTS)
)
def test_a_draft_that_is_the_target_is_accepted(policy: Policy) -> None:
    engine = policy.engine(toy_pair(3, 8, weight=1.0))

    def rejected(sampler: Sampler) -> bool:
        rounds = engine.decode(PROMPT, length_of(policy), sampler).rounds
        return any(round_.rejected for round_ in rounds)

    assert distribution_of(rejected).get(True, 0.0) < 1e-12
