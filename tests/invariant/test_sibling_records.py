"""What a harvest records of siblings where the target is greedy: the response says it."""

from dataclasses import replace

import pytest

from data_gen.answers import read_answers
from data_gen.harvest import draws
from data_gen.records import label
from data_gen.room import ON_A_CORE
from decoding.models.loading import ModelPair
from decoding.sampling import Warp
from tests.helpers.data.datasets import RECIPE, some_requests
from tests.helpers.models.tiny_pair import tiny_pair


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return tiny_pair()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_siblings_of_a_greedy_target(pair: ModelPair, temperature: float) -> None:
    recipe = replace(RECIPE, stride=1, warp=Warp(0.0), draft_warp=Warp(temperature), gamma=4)
    requests, seconds, thirds = some_requests(20), 0, 0
    coins = draws(requests, recipe)
    prompts = [request.tokens for request in requests]
    for answer in read_answers(pair, prompts, coins, recipe):
        response = answer.distributions.response.tolist()
        row = label(pair, [requests[answer.index]], [answer], recipe, ON_A_CORE)[0]["rounds"]
        for anchor in range(len(response)):
            for depth in range(4):
                place = anchor + depth
                reached = place < len(response) and all(row["accept_prob"][anchor, :depth] == 1)
                said = response[place] if reached else -2
                first = int(row["token"][anchor, depth])
                top, drawn = (
                    row[f"{law}_token"][anchor, depth].tolist() for law in ("top", "rrsw")
                )
                assert row["top_accept"][anchor, depth].tolist() == [token == said for token in top]
                assert row["accept_prob"][anchor, depth] == (first == said)
                more = row["rrsw_accept"][anchor, depth].tolist()
                if temperature == 0:
                    assert top[0] == first and drawn == [-1, -1] and more == [0, 0]
                elif reached and first != said:
                    assert len({first, *drawn}) == 3 and more == [t == said for t in drawn]
                    thirds += more[1]
                seconds += reached and first != said and top[1] == said
    assert seconds > 0 and (temperature == 0 or thirds > 0)
