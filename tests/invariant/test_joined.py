"""Responses that are labelled together get the labels that each gets alone; a harvest that looks at
a draft's own tokens alone, all others together, records what it would record of the whole
vocabulary."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from data_gen.columns import OwnTokens, may_merge
from data_gen.harvest import Progress, label_chunk, outputs_on
from data_gen.records import Row
from data_gen.requests import Request
from data_gen.room import ON_A_DEVICE, Room, free_bytes, room_of
from data_gen.settings import HarvestSettings
from decoding.models.cached_lm import CachedLM
from decoding.models.loading import ModelPair
from decoding.models.mixed import mix_in
from decoding.sampling import Warp
from runtime.errors import UserError
from tests.helpers.data.datasets import SAMPLED, some_requests
from tests.helpers.device.device_report import harvested
from tests.helpers.device.pretend_device import pretend
from tests.helpers.models.eagles import FLAVOURS, SAYS, published_pair
from tests.helpers.models.tiny_pair import EOS, VOCAB, tiny_models, tiny_pair
from tests.invariant.test_eagle_draft import eagle_pair
from tests.invariant.test_windows import windowed

ALONE = Room(1 << 20, 0, 0)
TOGETHER = [
    *(Room(1 << 20, 1 << 20, 1 << 20), Room(3, 1 << 20, 1 << 20), Room(7, 20, 1 << 20)),
    Room(1, 1 << 20, 30),  # few rows
]


def mixed_pair() -> ModelPair:
    pair = tiny_pair()
    mix_in(pair.draft, pair.target, 0.5)
    return pair


def windowed_pair() -> ModelPair:
    target, draft = (CachedLM(windowed(kind, 4)) for kind in ("Gemma3", "Gemma4"))
    return replace(tiny_pair(), target=target, draft=draft)


def labelled(
    pair: ModelPair, requests: list[Request], recipe: HarvestSettings, room: Room | None
) -> dict[str, list[Row]]:
    return label_chunk(pair, requests, recipe, Progress(), room)


def assert_same(found: list[Row], expected: list[Row], within: float = 1e-5) -> None:
    for row, other in zip(found, expected, strict=True):
        assert row.keys() == other.keys()
        for name, values in row.items():
            if isinstance(values, np.ndarray):  # the bits of bfloat16
                bits = (torch.from_numpy(each) for each in (values, other[name]))
                a, b = (each.view(torch.bfloat16).float() for each in bits)
                torch.testing.assert_close(a, b, atol=within, rtol=0.01)
            elif isinstance(values, torch.Tensor) and values.is_floating_point():
                torch.testing.assert_close(values, other[name], atol=within, rtol=0)
            elif isinstance(values, torch.Tensor):
                assert torch.equal(values, other[name]), name
            else:
                assert values == other[name], name


def assert_together_as_alone(
    pair: ModelPair, requests: list[Request], recipe: HarvestSettings, rooms: list[Room] = TOGETHER
) -> None:
    expected = labelled(pair, requests, recipe, ALONE)
    for room in rooms:
        for kind, rows in labelled(pair, requests, recipe, room).items():
            assert_same(rows, expected[kind])


CASES = [
    pytest.param(make, warps, stride, marks=() if (a + b + c) % 3 == 0 else pytest.mark.full)
    for a, make in enumerate([tiny_pair, eagle_pair, mixed_pair, windowed_pair])
    for b, warps in enumerate([(1.0, 1.0), (0.0, 0.0), (0.0, 0.8), (0.7, 0.0)])
    for c, stride in enumerate([1, 3, 50])
]
"""Each pair with each warp at one of the strides; the others are full."""


@pytest.mark.parametrize(("make", "warps", "stride"), CASES)
@pytest.mark.few(6, rest="slow")
def test_together_as_alone(
    make: Callable[[], ModelPair], warps: tuple[float, float], stride: int
) -> None:
    target, draft = map(Warp, warps)
    recipe = replace(SAMPLED, warp=target, draft_warp=draft, stride=stride, batch_size=9)
    assert_together_as_alone(make(), some_requests(9), recipe)


@pytest.mark.parametrize("warp", [1.0, 0.0])
@pytest.mark.parametrize("gamma", [1, 2])
def test_given_and_short_responses(warp: float, gamma: int) -> None:
    """Of one token, of an end token alone, of nothing that is kept."""
    responses = [[EOS], [4], [4, 5], [6, EOS], [3, 4, 5, 6], [7]]
    given = [
        replace(request, response=torch.tensor(response))
        for request, response in zip(some_requests(6), responses, strict=True)
    ]
    recipe = replace(SAMPLED, warp=Warp(warp), draft_warp=Warp(warp), gamma=gamma, stride=1)
    for some in (given, given[:1]):
        assert_together_as_alone(tiny_pair(), some, recipe)


def test_joining_saves_forwards() -> None:
    recipe, counts = replace(SAMPLED, batch_size=9), []
    for room in (ALONE, TOGETHER[0]):
        pair = tiny_pair()
        for lm in (pair.draft, pair.target):
            lm.reset()
        assert len(labelled(pair, some_requests(9), recipe, room)["rounds"]) == 9
        counts.append(pair.draft.forwards + pair.target.forwards)
    assert counts[1] * 5 < counts[0]


def test_what_does_not_fit_is_refused_in_a_line() -> None:
    pair, requests = tiny_pair(), some_requests(4)
    with pytest.raises(UserError, match=r"label_gb: expected at least .*, got 1e-06\. Raise it"):
        labelled(pair, requests, replace(SAMPLED, label_gb=1e-6), None)
    needed = room_of(pair, requests, replace(SAMPLED, label_gb=1.0)).bytes / 1e9
    tight = room_of(pair, requests, replace(SAMPLED, label_gb=needed / 4))
    assert tight.rollouts in (1, 2, 4, 8, 16, 32, 64) and tight.bytes <= needed / 4 * 1e9
    assert_together_as_alone(pair, requests, SAMPLED, [tight])


def test_memory_that_is_only_counted_is_without_end() -> None:
    assert free_bytes(torch.device("meta")) > 1e15 > free_bytes(torch.device("cpu")) > 0
    assert ON_A_DEVICE.rollouts >= ON_A_DEVICE.joined


# A draft's own tokens -----------------------------------------------------------------------------

SOME = [EOS, 3, 4, 9, 11, 17]
WARPS = [
    (Warp(), Warp()),
    (Warp(0.0), Warp(0.0)),
    (Warp(0.0), Warp(0.8)),
    (Warp(0.7, top_k=3), Warp(0.0)),
    (Warp(1.3, top_p=0.7), Warp(0.9, top_k=2, top_p=0.9)),
]


def narrow(tokens: list[int], place: str = "cpu") -> ModelPair:
    """A pair in float32 whose draft may propose these."""
    target, model = (each.requires_grad_(False).float() for each in tiny_models())
    vocabulary = torch.tensor(tokens)
    head = torch.nn.Linear(model.config.hidden_size, len(tokens), bias=False)
    head.weight = torch.nn.Parameter(model.get_output_embeddings().weight[vocabulary])
    model.set_output_embeddings(head)
    draft = CachedLM(model.to(place), vocab_size=VOCAB, vocabulary=vocabulary)
    return replace(tiny_pair(), target=CachedLM(target.to(place)), draft=draft)


def warped(warps: tuple[Warp, Warp], **changed: int) -> HarvestSettings:
    return replace(SAMPLED, warp=warps[0], draft_warp=warps[1], **{"stride": 1, **changed})


def assert_merged_as_spread(
    pair: ModelPair, requests: list[Request], recipe: HarvestSettings
) -> None:
    expected = labelled(pair, requests, recipe, None)
    with outputs_on(pair, pair.target.device):
        assert OwnTokens.of(pair.draft).columns < VOCAB
        found = labelled(pair, requests, recipe, None)
    for kind, rows in found.items():
        assert_same(rows, expected[kind])


@pytest.mark.parametrize("warps", WARPS, ids=str)
@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("gamma", [1, 4])
def test_records_are_the_same(warps: tuple[Warp, Warp], stride: int, gamma: int) -> None:
    recipe = warped(warps, stride=stride, gamma=gamma)
    assert_merged_as_spread(narrow(SOME), some_requests(5), recipe)


@pytest.mark.parametrize("tokens", [[EOS], sorted({0, EOS}), [*range(VOCAB - 2)]], ids=len)
@pytest.mark.parametrize("warps", WARPS[:4], ids=str)
def test_of_one_token_two_and_nearly_all(tokens: list[int], warps: tuple[Warp, Warp]) -> None:
    assert_merged_as_spread(narrow(tokens), some_requests(4), warped(warps, gamma=3))


@pytest.mark.parametrize("name", FLAVOURS)
@pytest.mark.parametrize("warps", WARPS[:4], ids=str)
def test_published_drafts(name: str, warps: tuple[Warp, Warp]) -> None:
    pair = published_pair(FLAVOURS[name], SAYS)
    assert_merged_as_spread(pair, some_requests(4), warped(warps))


@pytest.mark.parametrize("warps", WARPS[:3], ids=str)
@pytest.mark.slow
def test_on_a_device(warps: tuple[Warp, Warp]) -> None:
    recipe = warped(warps, stride=2)
    expected, _ = harvested(narrow(SOME), recipe)
    with pretend():
        found, _ = harvested(narrow(SOME, "cuda:0"), recipe)
    for kind, rows in found.items():
        assert_same(rows, expected[kind])


def test_own_tokens_of_given_responses() -> None:
    requests = [replace(each, response=torch.tensor([4, 5, 14])) for each in some_requests(3)]
    assert_merged_as_spread(narrow(SOME), requests, replace(SAMPLED, stride=1))


def test_only_what_is_in_order_is_merged() -> None:
    """Ties go to the lowest id, and a number stands for the same token."""
    assert may_merge(narrow(SOME).draft)
    for pair in (narrow(SOME[::-1]), tiny_pair()):
        assert not may_merge(pair.draft)
        with outputs_on(pair, pair.target.device):
            assert OwnTokens.of(pair.draft).columns == VOCAB


def test_columns() -> None:
    own = OwnTokens(torch.tensor([1, 4, 5]), 7)
    probs = torch.rand(2, 7).softmax(-1)
    merged = own.merged(probs)
    assert own.columns == 4 and merged.shape == (2, 4)
    assert torch.equal(merged[:, :3], probs[:, [1, 4, 5]])
    torch.testing.assert_close(merged[:, 3], probs[:, [0, 2, 3, 6]].sum(-1))
    ids = torch.tensor([[1, -1], [5, 4]])
    assert torch.equal(own.columns_of(ids), torch.tensor([[0, -1], [2, 1]]))
    assert torch.equal(own.ids(own.columns_of(ids)), ids)
    every = OwnTokens(None, 7)
    assert every.columns == 7 and every.merged(probs) is probs and every.ids(ids) is ids
