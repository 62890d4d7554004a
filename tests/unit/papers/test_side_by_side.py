"""The overlapped step and the memory of branches, measured on a pair small enough to know what must
come out."""

import gc
from collections.abc import Iterator

import pytest
import torch

from decoding.models.loading import ModelPair
from papers.specbranch.side_by_side import StepSeconds, branch_bytes, measure_step, tensor_bytes
from tests.helpers.models.tiny_pair import VOCAB, tiny_pair

CONTEXT = torch.arange(1, 13)


@pytest.fixture(autouse=True)
def out_of_sight() -> Iterator[None]:
    """What other tests have left is not to be walked: that takes seconds."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return tiny_pair()


def test_a_step_takes_time_and_leaves_the_models_as_they_were(pair):
    threads = torch.get_num_threads()
    found = measure_step(pair, CONTEXT, 3, 4, 1, 2)
    assert 0 < min(found) and found.slowdown > 0, "however busy the machine is"
    assert torch.get_num_threads() == threads
    assert pair.target.length == pair.draft.length == len(CONTEXT) - 1
    assert StepSeconds(2.0, 1.0, 3.0).slowdown == 1.5, "over the slower one"


def test_every_branch_holds_its_rows(pair):
    """At least the logits (float64 here) and the cache rows of gamma - 1 forwards for every branch,
    in proportion."""
    found = branch_bytes(pair, CONTEXT, 4, [1, 2, 8])
    assert pair.draft.row_bytes == 2 * 4 * 2 * 6 * 8  # keys and values, layers, heads, size, bytes
    assert found[1] >= 3 * (VOCAB * 8 + pair.draft.row_bytes)
    assert found[8] - found[2] == pytest.approx(6 * (found[2] - found[1]), rel=0.3)


def test_shared_storage_counts_once():
    before = tensor_bytes()
    whole = torch.zeros(1000, dtype=torch.float64)
    part = whole[:10]
    sparse = torch.eye(3).to_sparse()  # is left out
    assert tensor_bytes() - before == 8000
    del whole, part, sparse
