"""What SpecBranch prints: the enumerated distribution of the engine shows the bias."""

import pytest

from decoding.engines import overlapped
from decoding.engines.branching import Always, Drafter
from decoding.engines.overlapped import OverlappedEngine
from decoding.interfaces import Verifier
from decoding.stopping.confidence import Confidence
from decoding.stopping.confidence_before import ConfidenceBefore
from decoding.stopping.hrad import ALL, NONE, SOME
from decoding.structures.branch_point import BranchPoint
from decoding.verifiers.block import BlockVerifier
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.token import TokenVerifier
from tests.contract.engines import OFF, decoded_distribution, target_distribution, toy_pair
from tests.contract.enumeration import largest_error, total_variation
from tests.contract.lossy import (
    AnyPassing,
    AsPrinted,
    CutOnDrawn,
    Redrawing,
    StoppedOnDrawn,
    TopAnyPassing,
    TopTokensAsDrawn,
    UnsureAsCandidate,
    WidthOfSecond,
)


def engine(
    branch_rule: Verifier, outcome: int, k_max: int = 2, gamma: int = 2, seed: int = 31
) -> OverlappedEngine:
    classes, structure = Always(outcome, Confidence(0.4)), BranchPoint(gamma, k_max)
    return OverlappedEngine(
        toy_pair(3, seed), structure, classes, TokenVerifier(), branch_rule, OFF, OFF, overlap=False
    )


def test_an_unsure_token_tested_by_another_rule_than_its_chain_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would have joined the chain, whose joint ratio is not 1, had it been sure."""
    monkeypatch.setattr(overlapped, "Drafter", UnsureAsCandidate)
    classes, parts = Always(SOME, Confidence(0.4)), (BlockVerifier(), RrswVerifier(), OFF, OFF)
    biased = OverlappedEngine(toy_pair(2, 9), BranchPoint(3, 4), classes, *parts, overlap=False)
    check_biased(biased, "unsure token of a block tested alone", 4)


def check_biased(engine: OverlappedEngine, said: str, length: int = 3) -> None:
    distribution, traces = decoded_distribution(engine, length)
    exact = target_distribution(engine.pair, OFF, length)
    print(
        f"{said}: total variation {total_variation(distribution, exact):.3f} over {len(traces)}"
        " paths"
    )
    assert sum(distribution.values()) == pytest.approx(1, abs=1e-9)
    assert largest_error(distribution, exact) > 3e-3 and total_variation(distribution, exact) > 1e-2


def test_an_unsure_token_that_is_redrawn_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlapped, "Drafter", Redrawing)
    check_biased(engine(RrswVerifier(), SOME), "unsure token redrawn")


@pytest.mark.parametrize(("drafter", "outcome"), [(CutOnDrawn, SOME), (StoppedOnDrawn, ALL)])
def test_a_branch_that_ends_at_a_drawn_token_without_it_is_caught(
    drafter: type[Drafter], outcome: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut by posterior selection, or as it grows."""
    monkeypatch.setattr(overlapped, "Drafter", drafter)
    classes, parts = (
        Always(outcome, ConfidenceBefore(0.4)),
        (TokenVerifier(), RrswVerifier(), OFF, OFF),
    )
    biased = OverlappedEngine(
        toy_pair(2, 35), BranchPoint(3, 2), classes, *parts, overlap=False, pre_verify=True
    )
    check_biased(biased, drafter.__name__, 4)


def test_a_width_read_off_a_token_that_may_go_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlapped, "Drafter", WidthOfSecond)
    check_biased(engine(RrswVerifier(), NONE, k_max=3, gamma=1, seed=25), "width of candidate 2", 2)


def test_the_engine_as_printed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of these together."""
    monkeypatch.setattr(overlapped, "Drafter", AsPrinted)
    check_biased(engine(TopAnyPassing(), SOME, k_max=4, seed=23), "as printed")


def test_top_tokens_verified_as_if_drawn_are_caught() -> None:
    check_biased(engine(TopTokensAsDrawn(), NONE, k_max=4), "top-k with p / q")


def test_the_best_of_all_passing_branches_is_caught() -> None:
    check_biased(engine(AnyPassing(), NONE, gamma=1, seed=33), "any passing branch", 2)
