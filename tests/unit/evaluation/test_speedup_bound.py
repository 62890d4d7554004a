"""The modelled bound of the speed-up, on known input."""

import math
from itertools import product

import pytest
import torch

from decoding.sampling import Warp
from evaluation.speedup_bound import expected_rounds, match, speedup_bound
from evaluation.timeline import Devices
from tests.helpers.models.tiny_pair import tiny_pair


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_expected_rounds_is_the_mean_over_all_coins(gamma: int) -> None:
    chance = [0.3, 0.0, 0.9, 1.0, 0.5]

    def rounds(coins: tuple[bool, ...]) -> int:
        place = count = 0
        while place < len(coins):
            kept = next(
                (n for n, coin in enumerate(coins[place : place + gamma]) if not coin), gamma
            )
            place, count = place + kept + 1, count + 1
        return count

    expected = sum(
        rounds(coins)
        * math.prod(a if coin else 1 - a for a, coin in zip(chance, coins, strict=True))
        for coins in product((False, True), repeat=len(chance))
    )
    assert expected_rounds([chance], gamma) == pytest.approx(expected)


def test_a_later_token_of_a_draft_has_its_own_chance() -> None:
    chance = [
        [1.0] * 6,
        [0.0] * 6,
    ]  # the first token of a draft is always the target's, the second never is
    assert [expected_rounds(chance, gamma) for gamma in (1, 2, 5)] == [3, 3, 3]


def test_the_bound_takes_the_best_length() -> None:
    devices = Devices(lambda rows: 0.1, lambda rows: 1.0)
    best = speedup_bound([torch.ones(1, 40)], devices, 3)
    assert (best.gamma, best.tokens_per_round) == (3, 4) and best.speedup == pytest.approx(4 / 1.3)
    worst = speedup_bound([torch.zeros(1, 40)], devices, 3)
    assert (worst.gamma, worst.tokens_per_round) == (1, 1) and worst.speedup == pytest.approx(
        1 / 1.1
    )


def test_a_draft_matches_itself_and_greedy_chances_are_agreements() -> None:
    pair, prompt = tiny_pair(), torch.tensor([3, 4, 5])
    greedy, warp = Warp(0.0), Warp(1.0)
    response = []
    for _ in range(12):
        pair.target.reset()
        text = torch.cat([prompt, torch.tensor(response, dtype=torch.long)])
        response.append(int(pair.target.forward(text).logits[-1].argmax()))
    found = match(pair, prompt, response, greedy, greedy)
    assert (
        found.chance[0].tolist() == found.greedy.double().tolist() and 0 < found.chance.mean() < 1
    )
    sampled = match(pair, prompt, response, warp, warp)
    assert ((sampled.overlap > 0) & (sampled.overlap < 1)).all() and sampled.chance.max() <= 1
    pair.draft = pair.target
    assert match(pair, prompt, response, warp, warp).overlap.allclose(torch.ones(12))
