"""Engines that take drawn tokens back, and what SpecBranch prints: the enumerated distribution of
the engine shows the bias, by the amounts published."""

from collections.abc import Callable
from typing import Any

import pytest

from decoding.engines import overlapped
from decoding.engines.branching import Always, Drafter
from decoding.engines.overlapped import OverlappedEngine
from decoding.engines.serial import SerialEngine
from decoding.interfaces import Pair, Verifier
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
from tests.contract.engines import OFF, decoded_distribution, target_distribution, toy_pair
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


Make = Callable[[], Any]
SLIGHT = 3e-3, 1e-2, 1.0  # bounds for what overlapped engines show in a few tokens


class DroppingChain(Chain):
    """SpecBranch's class 1 as printed: a drawn token with q < eps is looked at and taken back."""

    def grow(self, tree) -> None:
        super().grow(tree)
        if tree.token and tree.q(tree.parent[-1])[tree.token[-1]] < 0.4:
            tree.token.pop()
            tree.parent.pop()
            tree.drawn.pop()


class PruningDySpec(Pruning, DySpecHeap):
    pass


def serial(vocab: int, structure: Any, stop: Any, verifier: Verifier) -> SerialEngine:
    return SerialEngine(toy_pair(vocab, seed=9), structure, stop, verifier, OFF, OFF)


def branching(pair: Pair, structure: BranchPoint, stop: Any, *rules: Verifier, **more: bool) -> Any:
    return OverlappedEngine(pair, structure, stop, *rules, OFF, OFF, overlap=False, **more)


def overlapped_engine(
    branch_rule: Verifier, outcome: int, k_max: int = 2, gamma: int = 2, seed: int = 31
) -> OverlappedEngine:
    classes, structure = Always(outcome, Confidence(0.4)), BranchPoint(gamma, k_max)
    return branching(toy_pair(3, seed), structure, classes, TokenVerifier(), branch_rule)


def posterior(outcome: int) -> OverlappedEngine:
    """Branches of three tokens, cut where none is likely."""
    parts = BranchPoint(3, 2), Always(outcome, ConfidenceBefore(0.4))
    rules = TokenVerifier(), RrswVerifier()
    return branching(toy_pair(2, 35), *parts, *rules, pre_verify=True)


def unsure_in_a_block_chain() -> OverlappedEngine:
    """Had it been sure, the token would have joined the chain, whose joint ratio is not 1."""
    parts = BranchPoint(3, 4), Always(SOME, Confidence(0.4))
    return branching(toy_pair(2, 9), *parts, BlockVerifier(), RrswVerifier())


@pytest.mark.parametrize(
    ("engine", "length"),
    [  # published total variation: 6e-2 to 2e-1 and 1e-1 to 2e-1 per round
        (lambda: serial(2, DroppingChain(3), Confidence(0.4), TokenVerifier()), 4),
        (lambda: serial(3, PruningDySpec(4), Never(), RrswVerifier()), 3),
    ],
    ids=["drops an unsure token", "prunes drawn nodes by value"],
)
def test_engines_that_take_drawn_tokens_back_are_caught(engine: Make, length: int) -> None:
    check_biased(engine(), length)


@pytest.mark.parametrize(
    ("drafter", "engine", "length"),
    [
        (UnsureAsCandidate, unsure_in_a_block_chain, 4),  # tested by another rule than its chain
        (Redrawing, lambda: overlapped_engine(RrswVerifier(), SOME), 3),
        (CutOnDrawn, lambda: posterior(SOME), 4),  # a branch ends at a drawn token without it
        (StoppedOnDrawn, lambda: posterior(ALL), 4),
        (WidthOfSecond, lambda: overlapped_engine(RrswVerifier(), NONE, 3, gamma=1, seed=25), 2),
        (AsPrinted, lambda: overlapped_engine(TopAnyPassing(), SOME, k_max=4, seed=23), 3),
        (Drafter, lambda: overlapped_engine(TopTokensAsDrawn(), NONE, k_max=4), 3),
        (Drafter, lambda: overlapped_engine(AnyPassing(), NONE, gamma=1, seed=33), 2),
    ],
)
def test_what_specbranch_prints_is_caught(
    drafter: type[Drafter], engine: Make, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part by part (see `tests.contract.lossy`), and all of it together."""
    monkeypatch.setattr(overlapped, "Drafter", drafter)
    check_biased(engine(), length, *SLIGHT)
