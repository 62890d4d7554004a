"""How many rows buffers have: those that are planned, or spare ones, so that a request grows its
cache once."""

import pytest
import torch

from decoding.models.kv_cache import SPARE, BufferCache
from decoding.sampling import Warp
from tests.helpers.device.device_report import ENGINES, pair_on
from tests.helpers.device.pretend_device import pretend
from tests.invariant.test_pretend_matrix import decoded


def put(cache: BufferCache, rows: int) -> torch.Tensor:
    states = torch.ones(1, 2, rows, 4)
    cache.update(states, states, 0)
    return cache.layers[0].keys


def test_planned_rows_are_allocated_once_and_no_more() -> None:
    cache = BufferCache(300)
    first = put(cache, 5)
    assert first.shape[2] == 300 and put(cache, 295) is first
    assert put(cache, 1).shape[2] == 301 + 301, "beyond the plan as without one"
    assert cache.layers[0].length == 301 and bool((cache.layers[0].keys[:, :, :301] == 1).all())


@pytest.mark.parametrize(("rows", "spare"), [(5, 256), (700, 700), (5000, SPARE)])
def test_others_have_spare_rows(rows: int, spare: int) -> None:
    cache = BufferCache()
    first = put(cache, rows)
    assert first.shape[2] == rows + spare
    assert put(cache, spare) is first and put(cache, 1) is not first


def test_a_decode_on_a_device_allocates_once_and_the_next_nothing() -> None:
    with pretend():
        pair = pair_on("cuda:0", "cuda:0")
        engine = ENGINES["chain x token"](pair, Warp())
        decoded(engine)
        buffers = [layer.keys for layer in pair.target._cache.layers]
        assert {buffer.shape[2] for buffer in buffers} <= {SPARE, *range(257, 300)}
        decoded(engine)
        after = [layer.keys for layer in pair.target._cache.layers]
        assert all(a is b for a, b in zip(after, buffers, strict=True))
