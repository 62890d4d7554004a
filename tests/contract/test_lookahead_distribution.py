"""Lookahead decoding, several rounds, enumerated: its distribution is the target's, whatever it
guesses."""

import pytest

from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.engines.lookahead import LookaheadEngine
from decoding.interfaces import Pair
from decoding.sampling import Sampler, Warp
from decoding.trace import Trace
from tests.contract.engines import OFF, PROMPT, checked, toy_pair

WARPS = [Warp(0.0), Warp(0.7), OFF]
FILTERS = [Warp(0.7, top_k=2), Warp(top_p=0.8)]
SIZES = [(2, 5), (3, 4), (4, 3)]  # vocabulary, tokens decoded
SETTINGS = [(1, 2, 1), (3, 2, 2), (2, 3, 1), (3, 3, 2), (2, 4, 3)]  # window, ngram, guesses


def lookahead(
    pair: Pair, settings: tuple[int, int, int], prompt_pool: bool = True, **kw
) -> LookaheadEngine:
    window, ngram, guesses = settings
    return LookaheadEngine(pair, window, ngram, guesses, prompt_pool, **{"warp": OFF, **kw})


def drafted(traces: list[Trace]) -> list[int]:
    return [len(round_.draft_tokens) for trace in traces for round_ in trace.rounds]


@pytest.mark.parametrize("warp", WARPS + FILTERS, ids=str)
@pytest.mark.parametrize(("vocab", "length"), SIZES)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.few(16)
def test_distribution_is_the_targets(
    settings: tuple[int, int, int], vocab: int, length: int, warp: Warp
) -> None:
    traces = checked(lookahead(toy_pair(vocab, seed=31), settings, warp=warp), length)
    assert max(len(trace.rounds) for trace in traces) > 1
    if warp.temperature == 0:
        pair = toy_pair(vocab, seed=31)
        expected = AutoregressiveEngine(pair, warp).decode(PROMPT, length, Sampler.seeded(0)).tokens
        assert [trace.tokens for trace in traces] == [expected]
    else:
        assert max(drafted(traces)) >= min(settings[1] - 1, length - 2)


@pytest.mark.parametrize("warp", WARPS, ids=str)
@pytest.mark.parametrize("settings", [(3, 2, 2), (3, 3, 2)], ids=str)
def test_distribution_of_n_grams_from_the_window_alone(
    settings: tuple[int, int, int], warp: Warp
) -> None:
    """Nothing is known at first; what is drafted later the window has guessed."""
    traces = checked(lookahead(toy_pair(2, seed=9), settings, prompt_pool=False, warp=warp), 6)
    assert not any(trace.rounds[0].draft_tokens for trace in traces) and max(drafted(traces)) > 0
    if warp.temperature > 0:
        rounds = [round_ for trace in traces for round_ in trace.rounds]
        assert {round_.accepted > 0 for round_ in rounds if round_.draft_tokens} == {True, False}
        parents = [round_.draft_parents for round_ in rounds]
        assert any(len(set(found)) < len(found) for found in parents), (
            "no two candidates at one position"
        )


@pytest.mark.parametrize("eos", [0, 1])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_distribution_with_eos_inside_n_grams(settings: tuple[int, int, int], eos: int) -> None:
    """Both tokens are in the prompt, so the pool has n-grams that go on after them."""
    ids = frozenset({eos})
    traces = checked(lookahead(toy_pair(3, seed=3), settings, eos_ids=ids), 4)
    for trace in traces:
        assert not set(trace.tokens[:-1]) & ids
        for round_ in trace.rounds:
            assert (
                not {round_.draft_tokens[parent - 1] for parent in round_.draft_parents if parent}
                & ids
            )
    if settings[1] > 2 or eos == 1:
        assert any(ids & set(round_.draft_tokens) for trace in traces for round_ in trace.rounds)


@pytest.mark.slow
@pytest.mark.parametrize("warp", WARPS, ids=str)
@pytest.mark.parametrize(("vocab", "length"), [(2, 8), (3, 6)])
def test_distribution_over_more_rounds(vocab: int, length: int, warp: Warp) -> None:
    checked(lookahead(toy_pair(vocab, seed=7), (3, 3, 2), warp=warp), length)
