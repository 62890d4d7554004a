"""Rotations that depend on the length of the text: exact up to where they begin to, refused beyond;
all others are taken at any length."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
)

from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.engines.serial import SerialEngine
from decoding.models.batched_lm import BatchedLM
from decoding.models.cached_lm import CachedLM
from decoding.pair import open_pair
from decoding.sampling import Sampler, Warp
from decoding.stopping.never import Never
from decoding.structures.chain import Chain
from decoding.verifiers.token import TokenVerifier
from runtime.errors import UserError
from serving.generate import speculate
from tests.helpers.models.tiny_pair import EOS, VOCAB, tiny_tokenizer

STEADY = 32
GREEDY = Warp(temperature=0)
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.35,
    bos_token_id=None,
    eos_token_id=EOS,
    pad_token_id=EOS,
)
LONG = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.3, 1.7, 2.0],
    "long_factor": [2.0, 3.0, 5.0, 9.0],
    "original_max_position_embeddings": STEADY,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
SLIDING = {
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"],
}
BY_TYPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "phi3": (
        Phi3ForCausalLM,
        Phi3Config,
        {"rope_parameters": LONG, "original_max_position_embeddings": STEADY},
    ),
    "llama": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LONG}),
    "phimoe": (
        PhimoeForCausalLM,
        PhimoeConfig,
        {
            "rope_parameters": LONG | {"short_mscale": 1.1, "long_mscale": 1.4},
            "num_local_experts": 2,
        },
    ),
    "dynamic": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": DYNAMIC, "max_position_embeddings": STEADY},
    ),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        SLIDING | {"rope_parameters": BY_TYPE | {"full_attention": LONG}},
    ),
}


def model_of(kind: str, seed: int = 1) -> PreTrainedModel:
    made, config, more = KINDS[kind]
    torch.manual_seed(seed)
    return made(config(**(SIZES | {"max_position_embeddings": 128} | more))).eval()


@pytest.fixture(params=KINDS)
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    for side, seed in (("target", 1), ("draft", 2)):
        model_of(request.param, seed).save_pretrained(tmp_path / side)
        tiny_tokenizer().save_pretrained(tmp_path / side)
    return str(tmp_path / "target"), str(tmp_path / "draft")


def prompt_of(n: int, seed: int) -> torch.Tensor:
    return torch.randint(1, VOCAB, (n,), generator=torch.Generator().manual_seed(seed))


def test_a_context_that_reaches_beyond_is_refused(folders: tuple[str, str]) -> None:
    fault = f"expected pair.max_length of at most {STEADY}, .* Set pair.max_length={STEADY}"
    with pytest.raises(UserError, match=f"pair.target: {fault}"):
        open_pair(*folders, dtype="float32")


def test_up_to_there_tokens_are_those_of_generate(folders: tuple[str, str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders[0]).eval()
    pair = open_pair(*folders, dtype="float32", max_length=STEADY)
    parts: Any = Chain(6), Never(), TokenVerifier(), GREEDY, GREEDY
    ends = {"eos_ids": frozenset({EOS})}
    for prompt in (prompt_of(STEADY - 4, 0), prompt_of(9, 1)):
        new = STEADY - len(prompt)
        options = {"max_new_tokens": new, "do_sample": False}
        right = model.generate(prompt[None], **options)[0]
        for engine in (
            AutoregressiveEngine(pair, GREEDY, **ends),
            SerialEngine(pair, *parts, **ends),
        ):
            trace = engine.decode(prompt, new, Sampler.seeded(0))
            assert trace.tokens == right[len(prompt) :].tolist()
        options |= {"custom_generate": speculate, "draft": folders[1]}
        assert torch.equal(model.generate(prompt[None], **options)[0], right)
    with pytest.raises(UserError, match=f"max_new_tokens: expected at most {STEADY} tokens"):
        model.generate(prompt[None], **options | {"max_new_tokens": STEADY})


@pytest.mark.filterwarnings("ignore:pair.draft. its context holds 32 tokens")
def test_a_draft_is_asked_as_well(tmp_path: Path) -> None:
    more = {"max_position_embeddings": 128}
    models = LlamaForCausalLM(LlamaConfig(**SIZES, **more)), model_of("phi3")
    for side, model in zip(("target", "draft"), models, strict=True):
        model.save_pretrained(tmp_path / side)
        tiny_tokenizer().save_pretrained(tmp_path / side)
    folders = str(tmp_path / "target"), str(tmp_path / "draft")
    with pytest.raises(UserError, match=f"pair.draft: .* Set pair.max_length={STEADY}"):
        open_pair(*folders, max_length=STEADY + 1)
    open_pair(*folders, max_length=STEADY)
    options: Any = {"max_new_tokens": 12, "do_sample": False}
    for prompt in (prompt_of(5, 0), prompt_of(STEADY - 4, 1), prompt_of(STEADY + 1, 2)):
        right = models[0].generate(prompt[None], **options)
        for draft in (folders[1], models[1]):
            found = models[0].generate(
                prompt[None], **options, custom_generate=speculate, draft=draft
            )
            assert torch.equal(found, right)


def test_a_batch_holds_no_longer_text() -> None:
    model = model_of("phi3")
    with pytest.raises(UserError, match=f"pair: expected pair.max_length of at most {STEADY}"):
        CachedLM(model)
    lm, long, short = CachedLM(model, max_length=STEADY), prompt_of(STEADY - 1, 0), prompt_of(5, 1)
    alone = BatchedLM(lm, [short], 2).step(torch.tensor([3])).logits
    batch = BatchedLM(lm, [short, long], 2)
    torch.testing.assert_close(batch.step(torch.tensor([3, 4])).logits[:1], alone)
    with pytest.raises(UserError, match="pair.max_length"):
        batch.step(torch.tensor([3, 4]))
    with pytest.raises(UserError, match="pair.max_length"):
        BatchedLM(lm, [short, prompt_of(STEADY + 1, 0)], 2)


@pytest.mark.parametrize("rope_type", ["default", "linear", "llama3", "yarn"])
def test_other_rotations_are_taken_at_any_length(rope_type: str) -> None:
    scaled = {"factor": 4.0, "original_max_position_embeddings": STEADY}
    scaled |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope_type == "llama3" else {}
    rope = {"rope_type": rope_type, "rope_theta": 100.0} | scaled
    more = {"max_position_embeddings": 128, "rope_parameters": rope}
    assert CachedLM(LlamaForCausalLM(LlamaConfig(**SIZES, **more))).max_length == 128
