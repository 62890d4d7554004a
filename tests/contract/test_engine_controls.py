"""Engines that take drawn tokens back, and what SpecBranch prints: the enumerated distribution of
the engine shows the bias, by the amounts published."""

from pathlib import Path
from typing import Any

import pytest

from decoding.engines import overlapped
from decoding.engines.branching import Always, Drafter
from decoding.engines.overlapped import OverlappedEngine
from decoding.engines.serial import SerialEngine
from decoding.interfaces import Verifier
from decoding.stopping.confidence import Confidence
from decoding.stopping.confidence_before import ConfidenceBefore
from decoding.stopping.hrad import ALL, NONE, SOME
from decoding.stopping.never import Never
from decoding.structures.branch_point import BranchPoint
from decoding.structures.chain import Chain
from decoding.structures.dyspec import DySpecHeap
from decoding.verifiers.block import BlockVerifier
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.token import TokenVerifier
from tests.contract.engines import (
    OFF,
    decoded_distribution,
    stop_rule,
    target_distribution,
    toy_pair,
)
from tests.contract.enumeration import largest_error, total_variation
from tests.contract.lossy import (
    AnyPassing,
    AsPrinted,
    CutOnDrawn,
    Pruning,
    Redrawing,
    StoppedOnDrawn,
    TopAnyPassing,
    TopTokensAsDrawn,
    UnsureAsCandidate,
    WidthOfSecond,
)


def check_biased(
    engine: Any, length: int, error: float = 1e-2, least: float = 0.03, most: float = 0.4
) -> None:
    distribution, traces = decoded_distribution(engine, length)
    exact = target_distribution(engine.pair, OFF, length)
    off = total_variation(distribution, exact)
    print(f"total variation {off:.3f} over {len(traces)} paths")
    assert sum(distribution.values()) == pytest.approx(1, abs=1e-9)
    assert largest_error(distribution, exact) > error and least < off < most


SLIGHT = 3e-3, 1e-2, 1.0  # bounds for what overlapped engines show in a few tokens


class DroppingChain(Chain):
    """SpecBranch's class 1 as printed: a drawn token with q < eps is looked at and taken back."""

    def grow(self, tree) -> None:
        super().grow(tree)
        if tree.token and tree.q(tree.parent[-1])[tree.token[-1]] < 0.4:
            tree.token.pop()
            tree.parent.pop()
            tree.drawn.pop()


def test_engine_that_drops_an_unsure_token_is_caught(tmp_path: Path) -> None:
    """Published total variation: 6e-2 to 2e-1 per round."""
    pair = toy_pair(2, seed=9)
    stop = stop_rule("confidence", tmp_path, {"threshold": 0.4})
    check_biased(SerialEngine(pair, DroppingChain(3), stop, TokenVerifier(), OFF, OFF), 4)


class PruningDySpec(Pruning, DySpecHeap):
    pass


def test_engine_that_prunes_drawn_nodes_by_value_is_caught() -> None:
    """Published total variation: 1e-1 to 2e-1 per round."""
    check_biased(
        SerialEngine(toy_pair(3, seed=9), PruningDySpec(4), Never(), RrswVerifier(), OFF, OFF), 3
    )


def overlapped_engine(
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
    check_biased(biased, 4, *SLIGHT)


def test_an_unsure_token_that_is_redrawn_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlapped, "Drafter", Redrawing)
    check_biased(overlapped_engine(RrswVerifier(), SOME), 3, *SLIGHT)


@pytest.mark.parametrize(("drafter", "outcome"), [(CutOnDrawn, SOME), (StoppedOnDrawn, ALL)])
def test_a_branch_that_ends_at_a_drawn_token_without_it_is_caught(
    drafter: type[Drafter], outcome: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut by posterior selection, or as it grows."""
    monkeypatch.setattr(overlapped, "Drafter", drafter)
    classes = Always(outcome, ConfidenceBefore(0.4))
    parts = TokenVerifier(), RrswVerifier(), OFF, OFF
    biased = OverlappedEngine(
        toy_pair(2, 35), BranchPoint(3, 2), classes, *parts, overlap=False, pre_verify=True
    )
    check_biased(biased, 4, *SLIGHT)


def test_a_width_read_off_a_token_that_may_go_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlapped, "Drafter", WidthOfSecond)
    biased = overlapped_engine(RrswVerifier(), NONE, k_max=3, gamma=1, seed=25)
    check_biased(biased, 2, *SLIGHT)


def test_the_engine_as_printed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of these together."""
    monkeypatch.setattr(overlapped, "Drafter", AsPrinted)
    check_biased(overlapped_engine(TopAnyPassing(), SOME, k_max=4, seed=23), 3, *SLIGHT)


def test_top_tokens_verified_as_if_drawn_are_caught() -> None:
    check_biased(overlapped_engine(TopTokensAsDrawn(), NONE, k_max=4), 3, *SLIGHT)


def test_the_best_of_all_passing_branches_is_caught() -> None:
    check_biased(overlapped_engine(AnyPassing(), NONE, gamma=1, seed=33), 2, *SLIGHT)
