"""A turn that begins with the caches of the one before decodes what one read from its beginning
does."""

from collections.abc import Callable
from typing import Any

import pytest

from decoding.engines.lookahead import LookaheadEngine
from decoding.models.cached_lm import CachedLM
from decoding.models.loading import ModelPair
from decoding.models.recurrent import cached
from decoding.sampling import Sampler, Warp
from tests.helpers.device.device_report import ENGINES
from tests.helpers.models.eagles import FLAVOURS, published_pair
from tests.helpers.models.stateful import stateful
from tests.helpers.models.tiny_pair import random_words, tiny_pair, tiny_tokenizer
from tests.helpers.models.windowed import windowed

PROMPT = random_words(12, 4)


def windows() -> ModelPair:
    models = (CachedLM(windowed("Qwen2", 5)) for _ in range(2))
    return ModelPair(*models, tiny_tokenizer(), "windows", ())


def states() -> ModelPair:
    models = (cached(stateful("Mamba2").double()) for _ in range(2))
    return ModelPair(*models, tiny_tokenizer(), "states", ())


PAIRS: dict[str, Callable[[], Any]] = {
    "EAGLE": lambda: published_pair(FLAVOURS["plain"]),
    "windows": windows,
    "states": states,
}


def same(pair: ModelPair, engine: Any) -> None:
    rows = list[int]()
    network = pair.target.network

    def counting(given: Any, *rest: Any) -> Any:
        rows.append(given.tokens.shape[1])
        return network(given, *rest)

    whole = engine.decode(PROMPT, 16, Sampler.seeded(3))
    pair.target.network = counting  # type: ignore[assignment]
    for kept in (1, 7, 10, 11, 12, 40):
        rows.clear()
        trace = engine.decode(PROMPT, 16, Sampler.seeded(3), kept=kept)
        assert trace.tokens == whole.tokens
        assert [each.draft_tokens for each in trace.rounds] == [
            each.draft_tokens for each in whole.rounds
        ]
        assert rows[:2] == [min(kept, 10), 11 - min(kept, 10)]
    pair.target.network = network


@pytest.mark.parametrize("name", ENGINES)
def test_outputs_are_those_without_kept_caches(name: str) -> None:
    pair = tiny_pair()
    same(pair, ENGINES[name](pair, Warp()))


@pytest.mark.parametrize("kind", PAIRS)
def test_so_they_are_with_other_models(kind: str) -> None:
    pair = PAIRS[kind]()
    same(pair, ENGINES["chain x token"](pair, Warp()))


def test_and_in_lookahead() -> None:
    pair = tiny_pair()
    same(pair, LookaheadEngine(pair, 4, 3, 3, True, Warp()))
