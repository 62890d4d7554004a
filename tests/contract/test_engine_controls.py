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


class DroppingChain(Chain):
    """SpecBranch's class 1 as printed: a drawn token with q < eps is looked at and taken back."""

    def grow(self, tree, context, stop, siblings, sampler) -> None:
        super().grow(tree, context, stop, siblings, sampler)
        if tree.token and tree.q(tree.parent[-1])[tree.token[-1]] < 0.4:
            tree.token.pop()
            tree.parent.pop()
            tree.drawn.pop()


def test_engine_that_drops_an_unsure_token_is_caught(tmp_path: Path) -> None:
    """Published total variation: 6e-2 to 2e-1 per round."""
    pair = toy_pair(2, seed=9)
    stop = stop_rule("confidence", tmp_path, {"threshold": 0.4})
    check_biased(SerialEngine(pair, DroppingChain(3), stop, TokenVerifier(), OFF, OFF), 4)


class PruningDySpec(DySpecHeap):
    """Draws, then keeps the most valuable half of the nodes by their own probability."""

    def grow(self, tree, context, stop, siblings, sampler) -> None:
        super().grow(tree, context, stop, siblings, sampler)
        reach = [1.0]
        for token, parent in zip(tree.token, tree.parent, strict=True):
            reach.append(reach[parent] * tree.q(parent)[token].item())
        least = sorted(reach, reverse=True)[: 1 + len(tree.token) // 2][-1]
        kept = [
            row for row in range(len(reach)) if reach[row] >= least
        ]  # a parent is worth more than its children
        tree.parent = [kept.index(tree.parent[row - 1]) for row in kept if row]
        tree.token = [tree.token[row - 1] for row in kept if row]
        tree.drawn = [tree.drawn[row - 1] for row in kept if row]
        tree._distributions = {
            new: tree._distributions[old]
            for new, old in enumerate(kept)
            if old in tree._distributions
        }
        tree._cached = {
            new: tree._cached[old] for new, old in enumerate(kept) if old in tree._cached
        }


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
