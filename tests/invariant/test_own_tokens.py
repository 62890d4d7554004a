"""A harvest that looks at a draft's own tokens alone, all others together, records what it would
record of the whole vocabulary."""

from dataclasses import replace

import pytest
import torch

from data_gen.columns import OwnTokens, may_merge
from data_gen.harvest import Progress, label_chunk, outputs_on
from data_gen.requests import Request
from data_gen.settings import HarvestSettings
from decoding.models.cached_lm import CachedLM
from decoding.models.loading import ModelPair
from decoding.sampling import Warp
from tests.helpers.device.device_report import harvested
from tests.helpers.device.pretend_device import pretend
from tests.helpers.models.eagles import FLAVOURS, SAYS, published_pair
from tests.helpers.models.tiny_pair import EOS, VOCAB, tiny_models, tiny_pair
from tests.invariant.test_harvest import RECIPE, some_requests
from tests.invariant.test_joined import assert_same

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
    known = torch.tensor(tokens)
    head = torch.nn.Linear(model.config.hidden_size, len(tokens), bias=False)
    head.weight = torch.nn.Parameter(model.get_output_embeddings().weight[known])
    model.set_output_embeddings(head)
    draft = CachedLM(model.to(place), vocab_size=VOCAB, vocabulary=known)
    return replace(tiny_pair(), target=CachedLM(target.to(place)), draft=draft)


def assert_merged_as_spread(
    pair: ModelPair, requests: list[Request], recipe: HarvestSettings
) -> None:
    expected = label_chunk(pair, requests, recipe, Progress())
    with outputs_on(pair, pair.target.device):
        assert OwnTokens.of(pair.draft).columns < VOCAB
        found = label_chunk(pair, requests, recipe, Progress())
    for kind, rows in found.items():
        assert_same(rows, expected[kind])


@pytest.mark.parametrize("warps", WARPS, ids=str)
@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("gamma", [1, 4])
def test_records_are_the_same(warps: tuple[Warp, Warp], stride: int, gamma: int) -> None:
    recipe = replace(RECIPE, warp=warps[0], draft_warp=warps[1], stride=stride, gamma=gamma)
    assert_merged_as_spread(narrow(SOME), some_requests(5), recipe)


@pytest.mark.parametrize("tokens", [[EOS], [0, EOS], [*range(VOCAB - 2)]], ids=len)
@pytest.mark.parametrize("warps", WARPS[:4], ids=str)
def test_of_one_token_two_and_nearly_all(tokens: list[int], warps: tuple[Warp, Warp]) -> None:
    recipe = replace(RECIPE, warp=warps[0], draft_warp=warps[1], stride=1, gamma=3)
    assert_merged_as_spread(narrow(sorted(set(tokens))), some_requests(4), recipe)


@pytest.mark.parametrize("name", FLAVOURS)
@pytest.mark.parametrize("warps", WARPS[:4], ids=str)
def test_published_drafts(name: str, warps: tuple[Warp, Warp]) -> None:
    pair = published_pair(FLAVOURS[name], SAYS)
    recipe = replace(RECIPE, warp=warps[0], draft_warp=warps[1], stride=1)
    assert_merged_as_spread(pair, some_requests(4), recipe)


@pytest.mark.parametrize("warps", WARPS[:3], ids=str)
@pytest.mark.slow
def test_on_a_device(warps: tuple[Warp, Warp]) -> None:
    recipe = replace(RECIPE, warp=warps[0], draft_warp=warps[1], stride=2)
    expected, _ = harvested(narrow(SOME), recipe)
    with pretend():
        found, _ = harvested(narrow(SOME, "cuda:0"), recipe)
    for kind, rows in found.items():
        assert_same(rows, expected[kind])


def test_given_responses() -> None:
    requests = [replace(each, response=torch.tensor([4, 5, 14])) for each in some_requests(3)]
    assert_merged_as_spread(narrow(SOME), requests, replace(RECIPE, stride=1))


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
