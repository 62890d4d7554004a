"""Modelled time against counts small enough to price by hand, and the bound of the speed-up that a
draft's acceptance allows."""

import math
from itertools import product
from typing import Any

import pytest
import torch

from decoding.processors import processed, scored_after
from decoding.sampling import Warp
from decoding.trace import STAGES, RoundTrace, StageTrace, Trace
from evaluation.speedup_bound import expected_rounds, match, speedup_bound
from evaluation.table import compare, over, prompts, timed
from evaluation.timeline import Devices, branch_rows, modelled_seconds, priced
from tests.helpers.models.tiny_pair import tiny_pair

C5 = Devices.of_ratio(5)
HALVES = [(n, [[1]] * 2, s) for n, s in ((0, 5), (4, 5), (5, 5.5), (6, 6), (9, 9))]
BY_ROWS = Devices(draft=lambda rows: rows / 10, target=lambda rows: 10.0 + rows)
PIPELINE = Devices(C5.draft, C5.target, pipeline=True)


def trace(*rounds: RoundTrace) -> Trace:
    tokens = [token for round_ in rounds for token in round_.tokens]
    return Trace(3, tokens, list(rounds), 9.0, 99.0)


def chain(drafted: int, committed: int = 1, extra: int = 0, forwards: int = -1) -> RoundTrace:
    """A round in turn; prefill and measured seconds must not matter."""
    tokens, seconds = list(range(drafted)), dict.fromkeys(STAGES, 1.0)
    ran = drafted if forwards < 0 else forwards
    parts = (tokens, tokens, [0.5] * drafted, 0, 0, [7] * committed, [], ran, seconds)
    round_ = RoundTrace(*parts)
    round_.extra_rows = extra
    return round_


def overlapped(pending: int, alone: int, beside: int, branches: Any, committed: int = 1) -> Any:
    round_ = chain(pending, committed, forwards=alone + beside)
    steps = alone + beside
    round_.overlap = StageTrace("draft", 1, pending, steps, alone, branches, 0, 0, [])
    return round_


GROWING = overlapped(2, 1, 3, [[1, 2, 3], [1], [1, 2]])


@pytest.mark.parametrize(
    ("rounds", "devices", "seconds"),
    [
        ([chain(0), chain(3, 2)], C5, 5 + (3 + 5)),
        # side by side it is the longer of the two, after the draft stage
        *(([overlapped(2, 0, beside, [[1]] * 3)], C5, max(5, beside)) for beside in (0, 4, 7)),
        ([overlapped(2, 3, 4, [[1]] * 3)], C5, 3 + 5),
        # rows are priced: of a tree the nodes of its layer, those beyond the draft
        ([chain(3)], BY_ROWS, 3 * 0.1 + 14),
        ([chain(3, extra=20)], Devices(lambda rows: 0.0, float), 24),
        ([chain(6, forwards=2)], Devices(float, lambda rows: 100.0), 2 * 3 + 100),
        ([GROWING], BY_ROWS, 0.1 + 13),
        ([GROWING], Devices(BY_ROWS.draft, lambda rows: 0.0), 0.1 + 0.4),
        # whole draft steps in each half of 2.5: two and two fit, a fifth makes one half last 3
        *(([overlapped(1, 0, *steps)], PIPELINE, seconds) for *steps, seconds in HALVES),
    ],
)
def test_modelled_seconds(rounds, devices, seconds):
    assert modelled_seconds(trace(*rounds), devices) == pytest.approx(seconds)


def test_rows_of_branches():
    """The tip's own forward, then two that grow, then one."""
    assert branch_rows(GROWING.overlap, 3) == [1, 2, 1]


def test_counts_and_prices_of_both_models_side_by_side():
    def round_(pending: int, accepted: int, branch: bool, steps: int, lost: int) -> RoundTrace:
        found = chain(pending + 1, accepted + 1, forwards=3)
        found.accepted, found.draft_parents = accepted + branch, [*range(pending), pending]
        found.row = pending + 1 if branch else accepted
        found.overlap = StageTrace("draft", 1, pending, steps, 1, [[0, 0]], lost, 0, [])
        return found

    first = trace(round_(2, 2, True, 4, 0), round_(2, 1, False, 5, 3))
    second = trace(round_(1, 0, False, 2, 2))
    second.prompt_id = "b"
    traces = {"m": [first, second, first]}
    rows = priced(timed(traces), traces, [4], None, [])
    each = prompts(rows, "emitted", "rounds", "steps", "lost", "run_tokens", "runs", "modelled c=4")
    assert each.to_numpy().tolist() == [[10, 4, 18, 6, 8, 2, 20], [1, 1, 2, 2, 0, 1, 5]]
    assert over(each, each, "lost", "steps") == (1, 1, 1)


def test_speedup_is_per_token():
    drafting = trace(overlapped(3, 0, 4, [[1]], committed=4))
    traces = {"autoregressive": [trace(*[chain(0)] * 6)], "m": [drafting], "nothing": [trace()]}
    found = compare(priced(timed(traces), traces, [5], None, []), below="modelled c=5")
    values = [found[name].value for name in traces]
    assert values == pytest.approx([1, 4, 0])


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_expected_rounds_is_the_mean_over_all_coins(gamma):
    chance = [0.3, 0.0, 0.9, 1.0, 0.5]

    def rounds(coins: tuple[bool, ...]) -> int:
        start = count = 0
        while start < len(coins):
            kept = [*coins[start : start + gamma], False].index(False)
            start, count = start + kept + 1, count + 1
        return count

    expected = sum(
        rounds(coins)
        * math.prod(a if coin else 1 - a for a, coin in zip(chance, coins, strict=True))
        for coins in product((False, True), repeat=len(chance))
    )
    assert expected_rounds([chance], gamma) == pytest.approx(expected)
    # the first token of a draft is always the target's, a later one never is
    assert expected_rounds([[1.0] * 6, [0.0] * 6], gamma) == 3


def test_the_bound_takes_the_best_length():
    devices = Devices(lambda rows: 0.1, lambda rows: 1.0)
    for chance, gamma, tokens, speedup in ((1.0, 3, 4, 4 / 1.3), (0.0, 1, 1, 1 / 1.1)):
        bound = speedup_bound([torch.full((1, 40), chance)], devices, 3)
        assert (bound.gamma, bound.tokens_per_round) == (gamma, tokens)
        assert bound.speedup == pytest.approx(speedup)


def test_a_draft_matches_itself_and_greedy_chances_are_agreements():
    pair, prompt = tiny_pair(), torch.tensor([3, 4, 5])
    greedy, warp, response = Warp(0.0), Warp(1.0), list[int]()
    for _ in range(12):
        pair.target.reset()
        text = torch.cat([prompt, torch.tensor(response, dtype=torch.long)])
        response.append(int(pair.target.forward(text).logits[-1].argmax()))
    found = match(pair, prompt, response, greedy, greedy)
    assert found.chance[0].tolist() == found.greedy.double().tolist()
    assert 0 < found.chance.mean() < 1
    sampled = match(pair, prompt, response, warp, warp)
    assert ((sampled.overlap > 0) & (sampled.overlap < 1)).all() and sampled.chance.max() <= 1
    penalised = processed(repetition_penalty=1.5, frequency_penalty=0.4)
    of_text = match(pair, prompt, response, penalised, warp).chance[0]
    text = torch.cat([prompt, torch.tensor(response)])
    for place, token in enumerate(response, len(prompt)):
        logits = []
        for lm in (pair.target, pair.draft):
            lm.reset()
            logits.append(lm.forward(text[:place]).logits[-1])
        p = scored_after(text[:place], len(prompt), penalised, logits[0], ()).softmax(-1)[token]
        expected = float(logits[1].softmax(-1)[token] / p)
        assert float(of_text[place - len(prompt)]) == pytest.approx(min(1.0, expected), rel=1e-4)
    pair.draft = pair.target
    assert match(pair, prompt, response, warp, warp).overlap.allclose(torch.ones(12))
