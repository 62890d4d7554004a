"""What does not go together is refused when the engine is built, naming both keys."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

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
from tests.helpers.training.checkpoints import write_checkpoint

PAIR = SimpleNamespace(target=TableLM(random_table(3, 0)), draft=TableLM(random_table(3, 1)))
ON_GPU = SimpleNamespace(device=torch.device("cuda"), reads_target=False)


def build(structure: DraftStructure, stop: StopRule, verifier: Verifier) -> SerialEngine:
    return SerialEngine(PAIR, structure, stop, verifier, Warp(), Warp())


@pytest.mark.parametrize(
    ("structure", "stop", "verifier", "said"),
    [
        (
            SpecInfer([2]),
            Never(),
            RrswVerifier(),
            "structure, verifier: SpecInfer draws siblings by iid, RrswVerifier",
        ),
        (
            SpecInfer([2]),
            Never(),
            SpecHubVerifier(),
            "structure, verifier: SpecInfer draws siblings by iid",
        ),
        (
            DySpecHeap(4),
            Never(),
            RrsVerifier(),
            "structure, verifier: DySpecHeap draws siblings by without_replacement",
        ),
        (
            DySpecLayers(0.1, 4),
            Never(),
            PointMassVerifier(),
            "structure, verifier: DySpecLayers draws",
        ),
        (
            WidthTree([3, 1]),
            Never(),
            SpecHubVerifier(),
            "structure, verifier: WidthTree puts up to 3 candidates",
        ),
        (
            BranchPoint(4, 3),
            Never(),
            SpecHubVerifier(),
            "structure, verifier: BranchPoint puts up to 3 candidates",
        ),
        (
            ParallelPaths(3, 2),
            Never(),
            SpecHubVerifier(),
            "structure, verifier: ParallelPaths puts up to 3",
        ),
        (
            WidthTree([2]),
            Never(),
            TokenVerifier(),
            "structure, verifier: WidthTree drafts a tree, TokenVerifier",
        ),
        (
            WidthTree([2]),
            Never(),
            ParallelVerifier("block"),
            "structure, verifier: WidthTree drafts a tree, Parallel",
        ),
        (
            BranchPoint(4, 2),
            Never(),
            BlockVerifier(),
            "structure, verifier: BranchPoint drafts a branch_point",
        ),
        (
            BranchPoint(4, 2),
            Never(),
            ParallelVerifier("token"),
            "structure, verifier: BranchPoint drafts",
        ),
        (
            ParallelPaths(2, 2),
            Never(),
            TokenVerifier(),
            "structure, verifier: ParallelPaths drafts a paths",
        ),
        (
            WidthTree([2]),
            Fixed(2),
            RrsVerifier(),
            "structure, stop: WidthTree asks no stop rule, and Fixed is set",
        ),
        (DySpecHeap(4), Fixed(2), RrswVerifier(), "structure, stop: DySpecHeap asks no stop rule"),
        (Lookup(3, 1, 4), Fixed(2), TokenVerifier(), "structure, stop: Lookup asks no stop rule"),
    ],
)
def test_misfits_are_refused(
    structure: DraftStructure, stop: StopRule, verifier: Verifier, said: str
) -> None:
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


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"structure": Chain(4)}, "structure, engine: Chain does not branch off"),
        ({"verifier": RrswVerifier()}, "verifier, engine: RrswVerifier does not verify pending"),
        ({"branch_verifier": BlockVerifier()}, "engine.branch_verifier, engine: BlockVerifier"),
        (
            {"branch_verifier": SpecHubVerifier()},
            "structure, engine.branch_verifier: BranchPoint spawns up to 3",
        ),
        ({"stop": Fixed(2)}, "stop, engine: Fixed does not say how far"),
        (
            {"branch_verifier": "spechub"},
            "engine.branch_verifier, engine: str does not choose among candidates. Set ver",
        ),
        (
            {"pair": SimpleNamespace(target=PAIR.target, draft=ON_GPU), "draft_threads": 1},
            "engine.draft_threads, pair.draft_device: ",
        ),
    ],
)
def test_misfits_of_an_overlapped_engine_are_refused(parts: dict, said: str) -> None:
    fitting = {
        "pair": PAIR,
        "structure": BranchPoint(4, 3),
        "stop": Never(),
        "verifier": TokenVerifier(),
        "branch_verifier": RrswVerifier(),
    }
    OverlappedEngine(**fitting, warp=Warp(), draft_warp=Warp())
    with pytest.raises(UserError) as error:
        OverlappedEngine(**fitting | parts, warp=Warp(), draft_warp=Warp())
    assert str(error.value).startswith(said)


def test_classes_of_another_draft_length_are_refused(tmp_path: Path) -> None:
    learned = stop_rule("hrad", tmp_path, {}, gamma=2)
    with pytest.raises(
        UserError, match="structure.gamma_max, stop.checkpoint: .*Set structure.gamma_max=2"
    ):
        OverlappedEngine(
            PAIR, BranchPoint(4, 3), learned, TokenVerifier(), RrswVerifier(), Warp(), Warp()
        )


@pytest.mark.parametrize(("age", "fits"), [(0, {False, True}), (1, {True}), (2, set())])
def test_a_predictor_of_older_states_is_asked_a_priori_alone(
    tmp_path: Path, age: int, fits: set[bool]
) -> None:
    """Of age 0 both ways, as in the paper."""
    checkpoint = write_checkpoint(tmp_path, "hrad", 3, gamma=3, settings={"age": age})
    learned = HRADStop(checkpoint, Confidence(0.4))
    for a_priori in (False, True):
        parts = {
            **{"pair": PAIR, "structure": BranchPoint(3, 3), "stop": learned},
            **{"verifier": TokenVerifier(), "branch_verifier": RrswVerifier()},
            "a_priori": a_priori,
        }
        refused = (
            nullcontext()
            if a_priori in fits
            else pytest.raises(
                UserError, match=rf"^stop\.checkpoint: .*predictor\.age={a_priori:d}"
            )
        )
        with refused:
            OverlappedEngine(**parts, warp=Warp(), draft_warp=Warp())
        with refused:
            settings_of({**parts, "pre_verify": False})


def test_a_confidence_rule_that_cannot_cut_a_branch_is_refused(tmp_path: Path) -> None:
    learned = stop_rule("hrad", tmp_path, {})
    learned.confidence = Never()
    with pytest.raises(UserError, match="^stop.confidence, engine: Never cannot say"):
        OverlappedEngine(
            PAIR, BranchPoint(3, 3), learned, TokenVerifier(), RrswVerifier(), Warp(), Warp()
        )
