"""The harvest's labels are those of the serial engine, one round at a time with the same coins."""

from dataclasses import replace

import pytest
import torch

from data_gen.requests import Request
from data_gen.settings import HarvestSettings
from decoding.models.loading import ModelPair
from decoding.sampling import Warp
from papers.plain_harvest import (
    ALL,
    ONE,
    Agreement,
    OneByOne,
    agreed,
    all_positions,
    report,
    take_turns,
)
from predictors.features.draft_statistics import Q_STATS
from predictors.features.layers import RecordedLayers
from tests.helpers.data import datasets
from tests.helpers.models.tiny_pair import VOCAB, tiny_pair

SAMPLED = replace(
    datasets.SAMPLED, gamma=6, max_new_tokens=14, stride=1, layers=RecordedLayers([-1], [-1])
)


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    return [
        Request(f"p{n}", "toy", torch.randint(1, VOCAB, (n + 2,), generator=generator), "train")
        for n in range(4)
    ]


def with_one_by_one(pair: ModelPair, recipe: HarvestSettings) -> Agreement:
    """Compare a harvest with the serial engine."""
    harvested, engine = all_positions(pair, requests(), recipe), OneByOne(pair, recipe)
    plain = {}
    for request in requests():
        columns = harvested[request.prompt_id]
        plain[request.prompt_id] = engine.rounds(request, columns["response_tokens"])
        assert len(plain[request.prompt_id]) == len(columns["anchor"])
    return agreed(harvested, plain)


@pytest.mark.parametrize(
    ("warp", "draft_warp"),
    [
        *((Warp(), Warp()), (SAMPLED.warp, SAMPLED.draft_warp)),
        *((Warp(0.0), Warp(0.0)), (Warp(), Warp(0.0))),
    ],
)
def test_all_positions_at_once_give_the_labels_of_one_at_a_time(
    warp: Warp, draft_warp: Warp
) -> None:
    agreement = with_one_by_one(tiny_pair(), replace(SAMPLED, warp=warp, draft_warp=draft_warp))
    assert agreement.rounds == agreement.same_tokens == agreement.same_accepted >= 30
    assert agreement.difference < 1e-5


def test_disagreement_is_seen() -> None:
    ours = {"known": 3, "drafted": 2, "accepted": 1, "token": torch.tensor([4, 5, 6])}
    floats = dict.fromkeys(("q", *Q_STATS, "accept_prob"), torch.tensor([0.5, 0.5, 0.5]))
    shifted = {name: values[:2] + 0.25 for name, values in floats.items()}
    theirs = {"accepted": 2, "token": torch.tensor([4, 5]), **shifted}
    agreement = Agreement()
    agreement.add({**ours, **floats}, theirs)
    agreement.add({**ours, **floats}, {**theirs, "token": torch.tensor([4, 6])})
    assert (agreement.rounds, agreement.same_tokens, agreement.same_accepted) == (2, 1, 0)
    assert agreement.difference == pytest.approx(0.75**2 - 0.25)


def test_ways_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    order: list[str] = []
    seconds = take_turns({name: lambda name=name: order.append(name) for name in "ab"}, 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert [len(values) for values in seconds.values()] == [3, 3]
    seconds = {ALL: [1.0, 2.0, 4.0], ONE: [1.0, 4.4, 6.0]}
    text = report(seconds, {ALL: 500, ONE: 50}, Agreement())
    assert "15.0 times as many draft tokens a second" in text
    assert "(10.0 to 22.0, 3 paired repeats)" in text
