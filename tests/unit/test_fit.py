"""What does not go together is refused when the engine is built, naming both keys."""

from types import SimpleNamespace

import pytest

from decoding.engines.serial import SerialEngine
from decoding.growth import DraftStructure, StopRule
from decoding.law import Verifier
from decoding.sampling import Warp
from decoding.stopping.fixed import Fixed
from decoding.stopping.never import Never
from decoding.structures.branch_point import BranchPoint
from decoding.structures.chain import Chain
from decoding.structures.dyspec import DySpecHeap, DySpecLayers
from decoding.structures.lookup import Lookup
from decoding.structures.static_tree import ParallelPaths, SpecInfer, WidthTree
from decoding.table_lm import TableLM, random_table
from decoding.verifiers.block import BlockVerifier
from decoding.verifiers.parallel import ParallelVerifier
from decoding.verifiers.point_mass import PointMassVerifier
from decoding.verifiers.rrs import RrsVerifier
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.spechub import SpecHubVerifier
from decoding.verifiers.token import TokenVerifier
from predictors.errors import UserError

PAIR = SimpleNamespace(target=TableLM(random_table(3, 0)), draft=TableLM(random_table(3, 1)))


def build(structure: DraftStructure, stop: StopRule, verifier: Verifier) -> SerialEngine:
    return SerialEngine(PAIR, structure, stop, verifier, Warp(), Warp())


@pytest.mark.parametrize(
    ("structure", "stop", "verifier", "said"),
    [
        (SpecInfer([2]), Never(), RrswVerifier(), "structure, verifier: SpecInfer draws siblings by iid, RrswVerifier"),
        (SpecInfer([2]), Never(), SpecHubVerifier(), "structure, verifier: SpecInfer draws siblings by iid"),
        (
            DySpecHeap(4),
            Never(),
            RrsVerifier(),
            "structure, verifier: DySpecHeap draws siblings by without_replacement",
        ),
        (DySpecLayers(0.1, 4), Never(), PointMassVerifier(), "structure, verifier: DySpecLayers draws"),
        (WidthTree([3, 1]), Never(), SpecHubVerifier(), "structure, verifier: WidthTree puts up to 3 candidates"),
        (BranchPoint(4, 3), Never(), SpecHubVerifier(), "structure, verifier: BranchPoint puts up to 3 candidates"),
        (ParallelPaths(3, 2), Never(), SpecHubVerifier(), "structure, verifier: ParallelPaths puts up to 3"),
        (WidthTree([2]), Never(), TokenVerifier(), "structure, verifier: WidthTree drafts a tree, TokenVerifier"),
        (WidthTree([2]), Never(), ParallelVerifier("block"), "structure, verifier: WidthTree drafts a tree, Parallel"),
        (BranchPoint(4, 2), Never(), BlockVerifier(), "structure, verifier: BranchPoint drafts a branch_point"),
        (BranchPoint(4, 2), Never(), ParallelVerifier("token"), "structure, verifier: BranchPoint drafts"),
        (ParallelPaths(2, 2), Never(), TokenVerifier(), "structure, verifier: ParallelPaths drafts a paths"),
        (WidthTree([2]), Fixed(2), RrsVerifier(), "structure, stop: WidthTree asks no stop rule, and Fixed is set"),
        (DySpecHeap(4), Fixed(2), RrswVerifier(), "structure, stop: DySpecHeap asks no stop rule"),
        (Lookup(3, 1, 4), Fixed(2), TokenVerifier(), "structure, stop: Lookup asks no stop rule"),
    ],
)
def test_misfits_are_refused(structure: DraftStructure, stop: StopRule, verifier: Verifier, said: str) -> None:
    with pytest.raises(UserError) as error:
        build(structure, stop, verifier)
    assert str(error.value).startswith(said)


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
def test_what_fits_is_built(structure: DraftStructure, stop: StopRule, verifier: Verifier) -> None:
    engine = build(structure, stop, verifier)
    assert (engine.structure, engine.stop, engine.verifier) == (structure, stop, verifier)
