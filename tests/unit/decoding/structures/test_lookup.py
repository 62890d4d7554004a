"""Prompt lookup: which tokens it copies, and that it needs nothing of the draft model."""

from types import SimpleNamespace

import pytest
import torch

from decoding.engines.serial import SerialEngine
from decoding.interfaces import DraftStructure
from decoding.models.table_lm import TableLM
from decoding.sampling import Sampler, Warp
from decoding.stopping.never import Never
from decoding.structures.chain import Chain
from decoding.structures.lookup import Lookup, continuation
from decoding.verifiers.token import TokenVerifier
from tests.unit.decoding.structures.test_structures import EOS, TABLE, grown


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 2, [3, 4]),  # two tokens match
        ([1, 2, 3, 4, 1, 2], 6, [3, 4, 1, 2, 3, 4]),  # beyond the end: what was copied goes on
        ([5, 2, 9, 1, 2, 3, 4, 1, 2], 1, [3]),  # the longer match before the later one
        ([1, 2, 7, 1, 2, 8, 0, 1, 2], 1, [8]),  # the latest of two
        ([0, 0, 0], 4, [0, 0, 0, 0]),
        ([1, 2, 3], 3, []),
        ([1], 3, []),
        ([1, 2, 1], 0, []),
    ],
)
def test_lookup_copies_what_followed(text: list[int], count: int, expected: list[int]) -> None:
    assert continuation(torch.tensor(text), range(3, 0, -1), count) == expected


def test_lookup_looks_for_n_grams_of_the_lengths_asked_for() -> None:
    text = torch.tensor([5, 1, 2, 7, 0, 2])
    assert continuation(text, range(3, 0, -1), 1) == [7]
    assert continuation(text, range(3, 1, -1), 1) == []


def test_lookup_is_a_chain_of_point_masses_without_forwards() -> None:
    tree, draft = grown(Lookup(3, 1, 4), committed=torch.tensor([1, 2, 3, 4, 1, 2]))
    assert draft.is_chain and draft.token == [3, 4, 1, 2] and tree.forwards == 0
    assert all(q[token] == 1 == q.sum() for q, token in zip(draft.q[:4], draft.token, strict=True))
    _, ended = grown(Lookup(3, 1, 4), committed=torch.tensor([1, 2, 3, 4, 1, 2]), eos_ids=EOS)
    assert ended.token == [3, 4]
    assert len(grown(Lookup(3, 2, 4))[1]) == 4 and len(grown(Lookup(3, 3, 4))[1]) == 0


@pytest.mark.filterwarnings("ignore:pair.draft. its context holds")
@pytest.mark.parametrize("structure", [Lookup(3, 1, 4), Chain(4)])
def test_no_draft_limits_the_output(structure: DraftStructure) -> None:
    pair = SimpleNamespace(target=TableLM(TABLE, max_length=32), draft=TableLM(TABLE, max_length=8))
    engine = SerialEngine(pair, structure, Never(), TokenVerifier(), Warp(), Warp())
    trace = engine.decode([1, 2, 1, 2], 99, Sampler.seeded(0))
    assert len(trace.tokens) == 28
    assert pair.draft.forwards == 0 or isinstance(structure, Chain)
    if isinstance(structure, Lookup):
        assert engine.decode([1, 2] * 8, 5, Sampler.seeded(0)).rounds[0].draft_tokens == [
            1,
            2,
            1,
            2,
        ]
