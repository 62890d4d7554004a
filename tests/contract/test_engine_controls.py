"""Structures that take drawn tokens back: the enumerated distribution of the engine shows the bias,
by the amounts published."""

from pathlib import Path

from decoding.engines.serial import SerialEngine
from decoding.stopping.never import Never
from decoding.structures.chain import Chain
from decoding.structures.dyspec import DySpecHeap
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
from tests.contract.lossy import Pruning


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


def check_biased(engine: SerialEngine, length: int) -> None:
    distribution, traces = decoded_distribution(engine, length)
    exact = target_distribution(engine.pair, OFF, length)
    name = type(engine.structure).__name__
    print(
        f"{name}: total variation {total_variation(distribution, exact):.3f} over {len(traces)}"
        " paths"
    )
    assert largest_error(distribution, exact) > 1e-2
    assert 0.03 < total_variation(distribution, exact) < 0.4
