"""EAGLE-2's trees: the likeliest paths; of what is dropped nothing is left behind."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch

from decoding.engines.serial import SerialEngine
from decoding.models.table_lm import TableLM
from decoding.sampling import Sampler, Warp, top_tokens
from decoding.stopping.never import Never
from decoding.structures.reranked import Reranked
from decoding.verifiers.point_mass import PointMassVerifier
from tests.unit.decoding.structures.test_structures import COMMITTED, EOS, TABLE, check_sound, grown


def likeliest(width: int, depth: int, nodes: int) -> set[tuple[int, ...]]:
    """Of all paths, where every node may be expanded."""
    found = {}
    for length in range(1, depth + 1):
        for path in product(range(5), repeat=length):
            text, value = [*COMMITTED.tolist()], 1.0
            for token in path:
                value *= TABLE(tuple(text[-2:]))[token].item()
                text.append(token)
            found[path] = value
    return set(sorted(found, key=lambda path: -found[path])[:nodes])


@pytest.mark.parametrize("nodes", [1, 4, 9])
def test_the_likeliest_paths_are_kept(nodes: int) -> None:
    tree, draft = grown(Reranked(5, 3, nodes), top_tokens)
    assert {tuple(draft.path(row)) for row in range(1, len(draft) + 1)} == likeliest(5, 3, nodes)
    assert tree.forwards == 3 and len(draft) == nodes
    check_sound(draft, 19, EOS)


@pytest.mark.parametrize(("max_new", "longest"), [(1, 0), (2, 1), (3, 2)])
def test_ends_of_the_output_and_of_the_text(max_new: int, longest: int) -> None:
    _, draft = grown(Reranked(3, 4, 20), top_tokens, max_new=max_new, eos_ids=EOS)
    check_sound(draft, longest, EOS)


def test_the_draft_reads_what_was_accepted_and_nothing_else() -> None:
    pair = SimpleNamespace(target=TableLM(TABLE), draft=TableLM(TABLE))
    engine = SerialEngine(pair, Reranked(3, 3, 5), Never(), PointMassVerifier(), Warp(0.0), Warp())
    rounds = engine.decode([1, 2, 3, 1, 2], 24, Sampler.seeded(0)).rounds
    assert any(round_.accepted > 1 for round_ in rounds)
    for round_ in rounds:
        tokens, parents = round_.draft_tokens, round_.draft_parents
        assert len(tokens) <= 5 and all(parent <= row for row, parent in enumerate(parents))
    same = SerialEngine(pair, Reranked(3, 3, 5), Never(), PointMassVerifier(), Warp(), Warp())
    for trace in (same.decode([1, 2, 3], 24, Sampler.seeded(seed)) for seed in range(10)):
        for round_ in trace.rounds:
            known = zip(round_.draft_q, round_.draft_p, strict=True)
            assert all(p is None or q == pytest.approx(p) for q, p in known), "the same model"
    assert torch.equal(COMMITTED, torch.tensor([1, 0, 2, 1, 0]))
