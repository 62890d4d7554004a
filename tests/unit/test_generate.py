"""transformers' own generation as an engine: its warp, its seed, its rounds."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import utils

from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.engines.generate import GenerateEngine, warp_settings
from decoding.sampling import Sampler, Warp
from tests.tiny_pair import tiny_models, tiny_pair

PROMPT = torch.tensor([3, 4, 5, 3, 4])
TWO = {
    "num_assistant_tokens": 2,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.0,
}
METHODS: list[tuple[bool, dict[str, Any]]] = [(False, {}), (True, TWO), (False, {"prompt_lookup_num_tokens": 3})]


def engine(warp: Warp, assistant: bool, settings: dict[str, Any], eos: frozenset[int]) -> GenerateEngine:
    target, draft = tiny_models()
    for model in (target, draft):  # what a model folder may say must not count
        model.generation_config = GenerationConfig(do_sample=True, top_k=3, temperature=0.2, eos_token_id=7)
    return GenerateEngine(target.eval(), draft.eval() if assistant else None, warp, eos, settings)


@pytest.mark.parametrize(("assistant", "settings"), METHODS)
def test_greedy_output_is_that_of_our_plain_decoding(assistant: bool, settings: dict[str, Any]) -> None:
    ours = AutoregressiveEngine(tiny_pair(), Warp(0.0), frozenset()).decode(PROMPT, 20, Sampler.seeded(0))
    found = engine(Warp(0.0), assistant, settings, frozenset()).decode(PROMPT, 20, Sampler.seeded(0))
    assert found.tokens == ours.tokens and found.prompt_tokens == 5 and found.seconds > 0
    assert [token for round_ in found.rounds for token in round_.tokens] == found.tokens
    most = max(round_.accepted for round_ in found.rounds)
    assert most == 0 if not settings else 0 < most <= 3
    stop = frozenset([found.tokens[4]])
    ended = engine(Warp(0.0), assistant, settings, stop).decode(PROMPT, 20, Sampler.seeded(0))
    assert ended.tokens == found.tokens[: found.tokens.index(found.tokens[4]) + 1]


@pytest.mark.parametrize(("assistant", "settings"), METHODS)
@pytest.mark.parametrize("warp", [Warp(1.0), Warp(0.7, 6, 0.9)])
def test_the_law_is_the_target_after_our_warp(
    warp: Warp, assistant: bool, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every law that it samples or verifies by, row by row: a row goes with one more token than the one before."""
    seen: list[torch.Tensor] = []
    multinomial, speculative = torch.multinomial, utils._speculative_sampling

    def drawn(law: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append(law)
        return multinomial(law, **options)

    def verified(ids: Any, q: Any, length: Any, logits: torch.Tensor, **options: Any) -> Any:
        seen.append(logits[0].softmax(-1))
        return speculative(ids, q, length, logits, **options)

    if assistant:
        monkeypatch.setattr(utils, "_speculative_sampling", verified)
    else:
        monkeypatch.setattr(torch, "multinomial", drawn)
    found = engine(warp, assistant, settings, frozenset()).decode(PROMPT, 20, Sampler.seeded(1))
    pair, place = tiny_pair(), 0
    for law, round_ in zip(seen, found.rounds, strict=False):
        kept = len(round_.tokens)
        pair.target.reset()
        text = torch.cat([PROMPT, torch.tensor(found.tokens[: place + kept - 1], dtype=torch.long)])
        expected = warp.probs(pair.target.forward(text).logits[-kept:])
        assert law[:kept].double().allclose(expected.double(), atol=1e-6)
        place += kept
    assert place > 15


def test_a_seed_is_a_response() -> None:
    used = engine(Warp(1.0), True, TWO, frozenset())
    again = [used.decode(PROMPT, 12, Sampler.seeded(seed)).tokens for seed in (1, 1, 2)]
    assert again[0] == again[1] != again[2]


def test_no_filter_is_no_filter() -> None:
    assert warp_settings(Warp(1.0)) == {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    assert warp_settings(Warp(0.0, 5)) == {"do_sample": False}
    with pytest.raises(ValueError, match="cache_implementation"):
        engine(Warp(1.0), False, {"cache_implementation": "none"}, frozenset())
