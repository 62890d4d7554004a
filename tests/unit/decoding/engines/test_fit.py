"""What does not go together is refused when the engine is built, naming both keys."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decoding.engines.overlapped import OverlappedEngine
from decoding.engines.serial import SerialEngine
from decoding.interfaces import DraftStructure, StopRule, Verifier
from decoding.models.table_lm import TableLM, random_table
from decoding.sampling import Warp
from decoding.stopping.confidence import Confidence
from decoding.stopping.fixed import Fixed
from decoding.stopping.hrad import HRADStop
from decoding.stopping.never import Never
from decoding.structures.branch_point import BranchPoint
from decoding.structures.chain import Chain
from decoding.structures.dyspec import DySpecHeap, DySpecLayers
from decoding.structures.lookup import Lookup
from decoding.structures.static_tree import ParallelPaths, SpecInfer, WidthTree
from decoding.verifiers.block import BlockVerifier
from decoding.verifiers.parallel import ParallelVerifier
from decoding.verifiers.point_mass import PointMassVerifier
from decoding.verifiers.rrs import RrsVerifier
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.spechub import SpecHubVerifier
from decoding.verifiers.token import TokenVerifier
from evaluation.overlapped.walk import settings_of
from runtime.errors import UserError
from tests.contract.engines import stop_rule
from tests.helpers.damage.refusals import refuses
from tests.helpers.training.checkpoints import write_checkpoint

PAIR = SimpleNamespace(target=TableLM(random_table(3, 0)), draft=TableLM(random_table(3, 1)))
ON_GPU = SimpleNamespace(device=torch.device("cuda"), reads_target=False)
SPLIT = SimpleNamespace(target=PAIR.target, draft=ON_GPU)


def build(structure: DraftStructure, stop: StopRule, verifier: Verifier) -> SerialEngine:
    return SerialEngine(PAIR, structure, stop, verifier, Warp(), Warp())


NO_FIT = [  # structure, verifier, what is said of them
    (SpecInfer([2]), RrswVerifier(), "SpecInfer draws siblings by iid, RrswVerifier"),
    (SpecInfer([2]), SpecHubVerifier(), "SpecInfer draws siblings by iid"),
    (DySpecHeap(4), RrsVerifier(), "DySpecHeap draws siblings by without_replacement"),
    (DySpecLayers(0.1, 4), PointMassVerifier(), "DySpecLayers draws"),
    (WidthTree([3, 1]), SpecHubVerifier(), "WidthTree puts up to 3 candidates"),
    (BranchPoint(4, 3), SpecHubVerifier(), "BranchPoint puts up to 3 candidates"),
    (ParallelPaths(3, 2), SpecHubVerifier(), "ParallelPaths puts up to 3"),
    (WidthTree([2]), TokenVerifier(), "WidthTree drafts a tree, TokenVerifier"),
    (WidthTree([2]), ParallelVerifier("block"), "WidthTree drafts a tree, Parallel"),
    (BranchPoint(4, 2), BlockVerifier(), "BranchPoint drafts a branch_point"),
    (BranchPoint(4, 2), ParallelVerifier("token"), "BranchPoint drafts"),
    (ParallelPaths(2, 2), TokenVerifier(), "ParallelPaths drafts a paths"),
]
ASKS_NO_RULE = [
    (WidthTree([2]), RrsVerifier(), "WidthTree asks no stop rule, and Fixed is set"),
    (DySpecHeap(4), RrswVerifier(), "DySpecHeap asks no stop rule"),
    (Lookup(3, 1, 4), TokenVerifier(), "Lookup asks no stop rule"),
]


@pytest.mark.parametrize(("structure", "verifier", "reason"), NO_FIT + ASKS_NO_RULE)
def test_what_does_not_fit_is_refused(structure, verifier, reason):
    asks = "asks no stop rule" in reason
    with pytest.raises(UserError, match=f"^structure, {'stop' if asks else 'verifier'}: {reason}"):
        build(structure, Fixed(2) if asks else Never(), verifier)


@pytest.mark.parametrize(
    ("structure", "stop", "verifier"),
    [
        (Chain(4), Fixed(2), RrswVerifier()),
        (Chain(4), Never(), SpecHubVerifier()),
        (BranchPoint(4, 2), Fixed(2), SpecHubVerifier()),
        (BranchPoint(4, 5), Never(), PointMassVerifier()),
        (ParallelPaths(3, 2), Never(), ParallelVerifier("token")),
        (ParallelPaths(3, 2), Never(), RrsVerifier()),
        (SpecInfer([5, 2]), Never(), RrsVerifier()),
        (WidthTree([2, 2]), Never(), SpecHubVerifier()),
        (DySpecHeap(4), Never(), RrswVerifier()),
        (Lookup(3, 1, 4), Never(), BlockVerifier()),
        (Lookup(3, 1, 4), Never(), SpecHubVerifier()),
    ],
)
def test_what_fits_is_built(structure, stop, verifier):
    engine = build(structure, stop, verifier)
    assert (engine.structure, engine.stop, engine.verifier) == (structure, stop, verifier)


FITTING = {
    "pair": PAIR,
    "structure": BranchPoint(4, 3),
    "stop": Never(),
    "verifier": TokenVerifier(),
    "branch_verifier": RrswVerifier(),
}


def overlapped(**parts: Any) -> OverlappedEngine:
    return OverlappedEngine(**FITTING | parts, warp=Warp(), draft_warp=Warp())


NO_OVERLAP = [
    ({"structure": Chain(4)}, "structure, engine: Chain does not branch off"),
    ({"verifier": RrswVerifier()}, "verifier, engine: RrswVerifier does not verify pending"),
    ({"branch_verifier": BlockVerifier()}, "engine.branch_verifier, engine: BlockVerifier"),
    ({"branch_verifier": SpecHubVerifier()}, "structure, engine.branch_verifier: .* up to 3"),
    ({"stop": Fixed(2)}, "stop, engine: Fixed does not say how far"),
    ({"branch_verifier": "spechub"}, "engine.branch_verifier, engine: str does not choose"),
    ({"pair": SPLIT, "draft_threads": 1}, "engine.draft_threads, pair.draft_device: "),
    ({"draft_threads": 64}, "engine.draft_threads: 64 leaves the target none"),
]


@pytest.mark.parametrize(("parts", "reason"), NO_OVERLAP)
def test_what_does_not_fit_an_overlapped_engine_is_refused(parts, reason):
    overlapped()
    refuses(f"^{reason}", overlapped, **parts)


def test_classes_of_another_length_or_with_another_rule_are_refused(tmp_path):
    learned = stop_rule("hrad", tmp_path, {}, gamma=2)
    refuses("^structure.gamma_max, stop.check.*structure.gamma_max=2", overlapped, stop=learned)
    learned.confidence = Never()
    refuses("^stop.confidence, engine: Never cannot say", overlapped, stop=learned)


@pytest.mark.parametrize(("age", "fits"), [(0, {False, True}), (1, {True}), (2, set())])
def test_a_predictor_of_older_states_is_asked_a_priori_alone(tmp_path, age, fits):
    checkpoint = write_checkpoint(tmp_path, "hrad", 3, gamma=3, settings={"age": age})
    parts = {"structure": BranchPoint(3, 3), "stop": HRADStop(checkpoint, Confidence(0.4))}
    for a_priori in (False, True):
        message = rf"^stop\.checkpoint: .*predictor\.age={a_priori:d}"
        refused = nullcontext() if a_priori in fits else pytest.raises(UserError, match=message)
        with refused:
            overlapped(**parts, a_priori=a_priori)
        with refused:
            settings_of({**FITTING, **parts, "a_priori": a_priori, "pre_verify": False})
