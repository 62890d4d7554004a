"""transformers' own generation as an engine: its warp, its seed, its rounds."""

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch._inductor import config as inductor
from transformers import CompileConfig, GenerationConfig
from transformers.generation import utils

from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.sampling import Sampler, Warp
from decoding.trace import Trace
from evaluation.baselines import generate
from runtime.errors import UserError
from tests.helpers.models.tiny_pair import tiny_models, tiny_pair

PROMPT = torch.tensor([3, 4, 5, 3, 4])
NONE: dict[str, Any] = {}
TWO: Any = {"num_assistant_tokens": 2, "num_assistant_tokens_schedule": "constant"}
TWO |= {"assistant_confidence_threshold": 0.0}
DYNAMIC = {**TWO, "num_assistant_tokens": 20, "assistant_confidence_threshold": 0.4}
HEURISTIC = {**TWO, "num_assistant_tokens_schedule": "heuristic_transient"}
METHODS: Any = [(False, {}), (True, TWO), (False, {"prompt_lookup_num_tokens": 3})]


def engine(
    warp: Warp, assistant: bool = False, settings: Any = NONE, eos: frozenset[int] = frozenset()
) -> generate.GenerateEngine:
    target, draft = tiny_models()
    for model in (target, draft):  # what a model folder may say must not count
        said = {"do_sample": True, "top_k": 3, "temperature": 0.2, "eos_token_id": 7}
        model.generation_config = GenerationConfig(**said)
    models = target.eval(), draft.eval() if assistant else None
    return generate.GenerateEngine(*models, warp, eos, settings)


def decoded(used: Any, prompt: torch.Tensor = PROMPT, count: int = 20, seed: int = 1) -> Trace:
    return used.decode(prompt, count, Sampler.seeded(seed))


@pytest.mark.parametrize(("assistant", "settings"), METHODS)
def test_greedy_output_is_that_of_our_plain_decoding(assistant, settings):
    ours = decoded(AutoregressiveEngine(tiny_pair(), Warp(0.0), frozenset()))
    found = decoded(engine(Warp(0.0), assistant, settings))
    assert found.tokens == ours.tokens and found.prompt_tokens == 5 and found.seconds > 0
    assert [token for round_ in found.rounds for token in round_.tokens] == found.tokens
    most = max(round_.accepted for round_ in found.rounds)
    assert most == 0 if not settings else 0 < most <= 3
    ended = decoded(engine(Warp(0.0), assistant, settings, frozenset([found.tokens[4]])))
    assert ended.tokens == found.tokens[: found.tokens.index(found.tokens[4]) + 1]


@pytest.mark.parametrize(("assistant", "settings"), [*METHODS, (True, DYNAMIC), (True, HEURISTIC)])
@pytest.mark.parametrize("warp", [Warp(0.0), Warp(1.0)])
def test_a_round_is_a_forward_and_no_forward_is_for_the_prompt_alone(warp, assistant, settings):
    """So accepted tokens per round are those per verified draft: where there are drafts, the first
    forward has one."""
    used, rows = engine(warp, assistant, settings), list[int]()
    used.target.register_forward_hook(
        lambda _, args, given, out: rows.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    rounds = decoded(used).rounds
    drafted = [rows[0] - len(PROMPT), *(count - 1 for count in rows[1:])]
    assert len(rows) == len(rounds) and (drafted[0] > 0 if settings else not any(drafted))
    assert all(round_.accepted <= count for round_, count in zip(rounds, drafted, strict=True))


@pytest.mark.parametrize(("assistant", "settings"), METHODS)
@pytest.mark.parametrize("warp", [Warp(1.0), Warp(0.7, 6, 0.9)])
def test_the_distribution_is_the_target_after_our_warp(warp, assistant, settings, monkeypatch):
    """Every distribution that it samples or verifies by, row by row: a row goes with one more token
    than the one before."""
    seen: list[torch.Tensor] = []
    multinomial, speculative = torch.multinomial, utils._speculative_sampling

    def drawn(distribution: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append(distribution)
        return multinomial(distribution, **options)

    def verified(ids: Any, q: Any, length: Any, logits: torch.Tensor, **options: Any) -> Any:
        seen.append(logits[0].softmax(-1))
        return speculative(ids, q, length, logits, **options)

    if assistant:
        monkeypatch.setattr(utils, "_speculative_sampling", verified)
    else:
        monkeypatch.setattr(torch, "multinomial", drawn)
    found = decoded(engine(warp, assistant, settings))
    pair, place = tiny_pair(), 0
    for distribution, round_ in zip(seen, found.rounds, strict=False):
        kept = len(round_.tokens)
        pair.target.reset()
        text = torch.cat([PROMPT, torch.tensor(found.tokens[: place + kept - 1], dtype=torch.long)])
        expected = warp.probs(pair.target.forward(text).logits[-kept:])
        assert distribution[:kept].double().allclose(expected.double(), atol=1e-6)
        place += kept
    assert place > 15


@pytest.mark.parametrize("warp", [Warp(0.0), Warp(1.0)])
@pytest.mark.slow
def test_a_compiled_forward_gives_the_same_and_is_compiled_once(warp, monkeypatch):
    """Prompts and responses of several lengths share the cache's length, so nothing is compiled
    after the first."""
    # torch.compile traces and guards, but writes no code: quick, and no C++ compiler is asked
    monkeypatch.setattr(generate, "CompileConfig", lambda: CompileConfig(backend="eager"))
    plain, compiled = engine(warp), engine(warp, settings=generate.compiled_settings(30))
    assert generate.not_compiled(compiled, PROMPT) is None
    for prompt, count in ((PROMPT, 20), (PROMPT.repeat(2), 20), (PROMPT[:2], 3)):
        with torch.compiler.set_stance("fail_on_recompile"):
            found = decoded(compiled, prompt, count)
        assert found.tokens == decoded(plain, prompt, count).tokens and len(found.tokens) == count


@pytest.mark.slow
def test_code_is_compiled_or_a_line_says_why_not():
    def why(settings: Any) -> str | None:
        return generate.not_compiled(engine(Warp(0.0), settings=settings), PROMPT)

    assert why(generate.compiled_settings(20)) is None
    torch.compiler.reset()
    with inductor.patch({"force_disable_caches": True, "cpp.cxx": ("none-such",)}):
        line = why(generate.compiled_settings(20))
    assert line is not None and "C++ compiler" in line and "\n" not in line
    line = why({})  # transformers goes on without a word
    assert line is not None and "transformers" in line


def test_a_seed_is_a_response():
    used = engine(Warp(1.0), True, TWO)
    again = [decoded(used, count=12, seed=seed).tokens for seed in (1, 1, 2)]
    assert again[0] == again[1] != again[2]


def test_no_filter_is_no_filter():
    sampled = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    assert generate.warp_settings(Warp(1.0)) == sampled
    assert generate.warp_settings(Warp(0.0, 5)) == {"do_sample": False}
    with pytest.raises(UserError, match="engine.settings: .*cache_implementation"):
        engine(Warp(1.0), settings={"cache_implementation": "none"})


@pytest.mark.parametrize("models", [{}, {"target": "a", "draft": "b"}])
def test_models_that_are_no_pair_are_refused_in_a_line(models):
    with pytest.raises(UserError, match=r"^engine\.models: expected the settings of a pair, got"):
        generate.plain(OmegaConf.create(models), *(None,) * 4)  # type: ignore[arg-type]
