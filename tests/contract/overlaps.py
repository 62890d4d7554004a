"""Overlapped engines small enough to enumerate, executed in turn."""

from collections.abc import Iterable
from typing import NamedTuple

import pytest

from decoding.draft import RoundContext
from decoding.engines.branching import Always
from decoding.engines.overlapped import OverlappedEngine
from decoding.interfaces import Classes, Pair
from decoding.sampling import Warp
from decoding.stopping.confidence import Confidence
from decoding.stopping.confidence_before import ConfidenceBefore
from decoding.stopping.hrad import SOME
from decoding.structures.branch_point import BranchPoint
from tests.contract.engines import OFF, verifier

CONFIDENCE = {"drawn": Confidence(0.4), "before": ConfidenceBefore(0.65)}
CHAIN_RULES = ("token", "block")
BRANCH_RULES = ("rrsw", "point_mass", "spechub", "rrs")


class ByContext:
    """A class that depends on what is committed."""

    target_layers = ()
    trained_gamma, trained_age = None, 0

    def __init__(self, confidence: Confidence | ConfidenceBefore) -> None:
        self.confidence = confidence

    def classify(self, context: RoundContext) -> int:
        return int(context.committed[-1] + 2 * context.committed[-2] + len(context.committed)) % 3


class ByTarget(ByContext):
    """A class that depends on the target's states at the last verified position and the token after
    it."""

    target_layers = (-3, -2, -1)

    def classify(self, context: RoundContext) -> int:
        assert context.target_hidden is not None
        embedding = context.embed(int(context.committed[-1]))
        return int((context.target_hidden.sum() + embedding.sum()) * 1e3) % 3


class Policy(NamedTuple):
    """One way to decode. classes: of the context where None; gamma, k_max: of the structure."""

    chain_rule: str
    branch_rule: str
    outcome: int | None = None
    confidence: str = "drawn"
    gamma: int = 2
    k_max: int = 3
    pre_verify: bool = False
    a_priori: bool = False

    @property
    def classes(self) -> Classes:
        confidence = CONFIDENCE[self.confidence]
        return ByContext(confidence) if self.outcome is None else Always(self.outcome, confidence)

    @property
    def structure(self) -> BranchPoint:
        return BranchPoint(
            self.gamma, min(self.k_max, 2) if self.branch_rule == "spechub" else self.k_max
        )

    def engine(
        self,
        pair: Pair,
        warp: Warp = OFF,
        draft_warp: Warp = OFF,
        eos_ids: frozenset[int] = frozenset(),
        classes: Classes | None = None,
        overlap: bool = False,
    ) -> OverlappedEngine:
        rules = verifier(self.chain_rule), verifier(self.branch_rule)
        stop, modes = classes or self.classes, (overlap, self.pre_verify, self.a_priori)
        return OverlappedEngine(
            pair, self.structure, stop, *rules, warp, draft_warp, *modes, eos_ids=eos_ids
        )


MIXED = None, "drawn"
POLICIES = [
    Policy(chain, branch, outcome, confidence)
    for chain in CHAIN_RULES
    for branch in BRANCH_RULES
    for outcome, confidence in [(0, "drawn"), (1, "drawn"), (1, "before"), (2, "drawn"), MIXED]
]
PRIOR = [  # class "all" keeps the same tokens with and without it
    Policy(chain, branch, outcome, confidence, a_priori=True)
    for chain, branch in [("token", "rrsw"), ("block", "point_mass")]
    for outcome, confidence in [(0, "drawn"), (1, "before"), MIXED]
]
PEARL = [
    Policy(chain, "rrsw", 2, gamma=gamma, k_max=1, pre_verify=True)
    for chain in CHAIN_RULES
    for gamma in (2, 3)
]
KEEPING = {  # branches of three tokens, cut where none is likely, and how many tokens to decode
    Policy("block", "rrsw", SOME, "before", 3, 1, pre_verify=True): 4,
    Policy("token", "rrsw", SOME, "before", 3, 2, pre_verify=True): 4,
    Policy("token", "point_mass", SOME, "before", 3, 2, pre_verify=True): 5,
}


def named(policies: Iterable[Policy]) -> list:
    return [pytest.param(policy, id="-".join(map(str, policy))) for policy in policies]
