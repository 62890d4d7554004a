"""Lookahead on a real model: the one call gives what a fresh cache gives for the text each row
stands for."""

from unittest.mock import patch

import pytest
import torch

from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.engines.lookahead import LookaheadEngine
from decoding.models.cached_lm import CachedLM
from decoding.models.loading import ModelPair
from decoding.sampling import Sampler, Warp
from tests.helpers.models.tiny_pair import tiny_pair

PROMPT = [3, 4, 5, 3, 4]


class WatchedEngine(LookaheadEngine):
    """Compares the logits of draft and window with a plain forward of the committed text and each
    row's path."""

    def _round(self, request, *rest):
        target, forward = self.pair.target, self.pair.target.forward
        assert target.length == len(request.committed) - 1
        committed = request.committed[:-1].tolist()

        def watched(tokens, parents, logits):
            output, texts = forward(tokens, parents, logits=logits), list[list[int]]()
            for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
                texts.append([*(committed if parent < 0 else texts[parent]), token])
            for row, following in zip(logits, output.logits, strict=True):
                text = torch.tensor(texts[row])
                plain = CachedLM(target.model).forward(text, logits="last").logits[-1]
                torch.testing.assert_close(following, plain, atol=1e-4, rtol=1e-4)
            return output

        with patch.object(target, "forward", watched):
            return super()._round(request, *rest)


@pytest.fixture(scope="module")
def llamas() -> ModelPair:
    return tiny_pair()


@pytest.mark.parametrize("warp", [Warp(0.0), Warp()], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "settings", [(1, 2, 1), (5, 2, 3), (1, 4, 2), (4, 4, 4), (7, 5, 7)], ids=str
)
@pytest.mark.few(3)
def test_rows_equal_plain_forwards(
    settings: tuple[int, int, int], warp: Warp, llamas: ModelPair
) -> None:
    engine = WatchedEngine(llamas, *settings, prompt_pool=True, warp=warp)
    trace = engine.decode(PROMPT, 24, Sampler.seeded(1))
    assert len(trace.tokens) == 24 and llamas.target.length == len(PROMPT) + 23
    assert llamas.target.forwards == len(trace.rounds) + 1 and llamas.draft.forwards == 0
    plain = AutoregressiveEngine(llamas, warp).decode(PROMPT, 24, Sampler.seeded(0))
    assert warp.temperature or trace.tokens == plain.tokens


@pytest.mark.parametrize("prompt_pool", [True, False])
def test_greedy_to_the_end_of_the_context(prompt_pool: bool, llamas: ModelPair) -> None:
    greedy = Warp(0.0)
    expected = AutoregressiveEngine(llamas, greedy).decode(PROMPT, 200, Sampler.seeded(0))
    engine = LookaheadEngine(llamas, 7, 5, 7, prompt_pool, greedy)
    trace = engine.decode(PROMPT, 200, Sampler.seeded(0))
    assert trace.tokens == expected.tokens
    assert len(PROMPT) + len(trace.tokens) == llamas.target.max_length
    assert sum(round_.accepted for round_ in trace.rounds) > 10
