"""Responses that are labelled together get the labels that each gets alone."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from data_gen import harvest
from data_gen.harvest import Progress, label_chunk
from data_gen.records import Row
from data_gen.requests import Request
from data_gen.room import ON_A_DEVICE, Room, free_bytes, room_of
from data_gen.settings import HarvestSettings
from decoding.models.cached_lm import CachedLM
from decoding.models.loading import ModelPair
from decoding.models.mixed import mix_in
from decoding.sampling import Warp
from runtime.errors import UserError
from tests.helpers.models.tiny_pair import EOS, tiny_pair
from tests.invariant.test_eagle_draft import eagle_pair
from tests.invariant.test_harvest import RECIPE, some_requests
from tests.invariant.test_windows import windowed

ALONE = Room(1 << 20, 0, 0)
TOGETHER = [Room(1 << 20, 1 << 20, 1 << 20), Room(3, 1 << 20, 1 << 20), Room(7, 20, 1 << 20)]
TOGETHER.append(Room(1, 1 << 20, 30))  # few rows
WARPS = [(1.0, 1.0), (0.0, 0.0), (0.0, 0.8), (0.7, 0.0)]


def mixed_pair() -> ModelPair:
    pair = tiny_pair()
    mix_in(pair.draft, pair.target, 0.5)
    return pair


def windowed_pair() -> ModelPair:
    target, draft = (CachedLM(windowed(kind, 4)) for kind in ("Gemma3", "Gemma4"))
    return replace(tiny_pair(), target=target, draft=draft)


PAIRS = [tiny_pair, eagle_pair, mixed_pair, windowed_pair]


def labelled(
    pair: ModelPair, requests: list[Request], recipe: HarvestSettings, room: Room
) -> dict[str, list[Row]]:
    return label_chunk(pair, requests, recipe, Progress(), room)


def assert_same(found: list[Row], expected: list[Row]) -> None:
    for row, other in zip(found, expected, strict=True):
        assert row.keys() == other.keys()
        for name, values in row.items():
            if isinstance(values, np.ndarray):  # the bits of bfloat16
                ours, theirs = (
                    torch.from_numpy(x).view(torch.bfloat16).float() for x in (values, other[name])
                )
                torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0.01)
            elif isinstance(values, torch.Tensor) and values.is_floating_point():
                torch.testing.assert_close(values, other[name], atol=1e-5, rtol=0)
            elif isinstance(values, torch.Tensor):
                assert torch.equal(values, other[name]), name
            else:
                assert values == other[name], name


CASES = [
    pytest.param(make, warps, stride, marks=() if (a + b + c) % 3 == 0 else pytest.mark.slow)
    for a, make in enumerate(PAIRS)
    for b, warps in enumerate(WARPS)
    for c, stride in enumerate([1, 3, 50])
]
"""By default each pair with each warp, at one of the strides."""


@pytest.mark.parametrize(("make", "warps", "stride"), CASES)
@pytest.mark.few(6)
def test_together_as_alone(
    make: Callable[[], ModelPair], warps: tuple[float, float], stride: int
) -> None:
    pair, requests = make(), some_requests(9)
    target, draft = map(Warp, warps)
    recipe = replace(RECIPE, warp=target, draft_warp=draft, stride=stride, batch_size=9)
    expected = labelled(pair, requests, recipe, ALONE)
    for room in TOGETHER:
        for kind, rows in labelled(pair, requests, recipe, room).items():
            assert_same(rows, expected[kind])


@pytest.mark.parametrize("warp", [1.0, 0.0])
@pytest.mark.parametrize("gamma", [1, 2])
def test_given_and_short_responses(warp: float, gamma: int) -> None:
    """Of one token, of an end token alone, of nothing that is kept."""
    pair, requests = tiny_pair(), some_requests(6)
    responses = [[EOS], [4], [4, 5], [6, EOS], [3, 4, 5, 6], [7]]
    given = [
        replace(request, response=torch.tensor(response))
        for request, response in zip(requests, responses, strict=True)
    ]
    recipe = replace(RECIPE, warp=Warp(warp), draft_warp=Warp(warp), gamma=gamma, stride=1)
    for some in (given, given[:1]):
        expected = labelled(pair, some, recipe, ALONE)
        for room in TOGETHER:
            for kind, rows in labelled(pair, some, recipe, room).items():
                assert_same(rows, expected[kind])


def test_joining_saves_forwards() -> None:
    recipe, requests = replace(RECIPE, batch_size=9), some_requests(9)
    counts = []
    for room in (ALONE, TOGETHER[0]):
        pair = tiny_pair()
        for lm in (pair.draft, pair.target):
            lm.reset()
        assert len(labelled(pair, requests, recipe, room)["rounds"]) == 9
        counts.append(pair.draft.forwards + pair.target.forwards)
    assert counts[1] * 5 < counts[0]


def test_what_does_not_fit_is_refused_in_a_line() -> None:
    pair, requests = tiny_pair(), some_requests(4)
    small = replace(RECIPE, label_gb=1e-6)
    with pytest.raises(UserError, match=r"label_gb: expected at least .*, got 1e-06\. Raise it"):
        harvest.label_chunk(pair, requests, small, Progress())
    needed = room_of(pair, requests, replace(RECIPE, label_gb=1.0)).bytes / 1e9
    tight = room_of(pair, requests, replace(RECIPE, label_gb=needed / 4))
    assert tight.rollouts in (1, 2, 4, 8, 16, 32, 64) and tight.bytes <= needed / 4 * 1e9
    expected = labelled(pair, requests, RECIPE, ALONE)
    for kind, rows in label_chunk(
        pair, requests, replace(RECIPE, label_gb=needed / 4), Progress()
    ).items():
        assert_same(rows, expected[kind])


def test_memory_that_is_only_counted_is_without_end() -> None:
    assert free_bytes(torch.device("meta")) > 1e15 > free_bytes(torch.device("cpu")) > 0
    assert ON_A_DEVICE.rollouts >= ON_A_DEVICE.joined
