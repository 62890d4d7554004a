"""Our own forward of a Llama says what transformers says: chains, trees, masks; biases, grouped
heads, packing."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from decoding.interfaces import LMOutput
from decoding.models.cached_lm import CachedLM
from decoding.models.cpu_llama import LlamaForward, fits
from decoding.models.forward import TransformersForward
from decoding.models.packing import pack_linears
from tests.helpers.models.cached import SMALL, close, random_tokens

LAYERS = (-1, -2, 0)
BIASED = {"attention_bias": True, "mlp_bias": True}
SCALED = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 64, "rope_theta": 100.0}
MODELS: dict[str, PreTrainedModel] = {
    "grouped": LlamaForCausalLM(LlamaConfig(**SMALL)),
    "biased": LlamaForCausalLM(LlamaConfig(**SMALL, **BIASED, tie_word_embeddings=True)),
    "one key per query": LlamaForCausalLM(LlamaConfig(**{**SMALL, "num_key_value_heads": 4})),
    "scaled rotation": LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=SCALED)),
    "qwen2": Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "mistral": MistralForCausalLM(MistralConfig(**SMALL)),
}


def randomised(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with other weights, the same in each run; norms and biases are not all ones and
    zeros."""
    model, generator = deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                (parameter.dim() == 1) + 0.3 * torch.randn(parameter.shape, generator=generator)
            )
    return model


def both(model: PreTrainedModel, packed: bool) -> tuple[CachedLM, CachedLM]:
    """Our forward and transformers', same weights."""
    theirs = CachedLM(deepcopy(model))
    theirs.network = TransformersForward(theirs.model)
    if packed:
        pack_linears(model)
    ours = CachedLM(model)
    assert isinstance(ours.network, LlamaForward)
    return ours, theirs


def calls(lm: CachedLM) -> list[LMOutput]:
    """A prompt, a row, a chain, a tree in two steps, rows that see what they are told to, and rows
    of a batch."""
    outputs = list[LMOutput]()

    def forward(n: int, *parents: int, **asked: Any) -> None:
        tree = torch.tensor(parents) if parents else None
        outputs.append(lm.forward(random_tokens(n, len(outputs)), tree, hidden=LAYERS, **asked))

    forward(20)
    forward(1)
    forward(6, logits=[4, 1])
    lm.keep_path([0, 1, 2])
    forward(5, -1, -1, 0, 1, 1)
    forward(3, 2, 4, 4, extend=True, logits="last")
    lm.keep_path([1, 4, 7])
    forward(20)  # many rows after a prefix
    lm.crop(30)
    anchors = torch.tensor([2, 9, 26])
    visible = torch.cat([torch.arange(lm.length) <= anchors[:, None], torch.eye(3).bool()], 1)
    outputs.append(lm.forward_masked(random_tokens(3, 6), anchors + 1, visible, hidden=LAYERS))
    return outputs


@pytest.mark.smoke
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_float32(kind: str, packed: bool) -> None:
    for ours, theirs in zip(*map(calls, both(randomised(MODELS[kind]), packed)), strict=True):
        close(ours.logits, theirs.logits)
        close(ours.hidden, theirs.hidden)


@pytest.mark.parametrize("kind", MODELS)
def test_bfloat16_is_no_farther_from_float32_than_theirs(kind: str) -> None:
    exact = calls(both(randomised(MODELS[kind]).bfloat16().float(), packed=False)[1])
    ours, theirs = map(calls, both(randomised(MODELS[kind]).bfloat16(), packed=True))

    def error(outputs: list[LMOutput]) -> float:
        pairs = zip(outputs, exact, strict=True)
        errors = [(found.logits - right.logits).flatten() for found, right in pairs]
        return float(torch.cat(errors).square().mean().sqrt())

    assert error(ours) <= 1.3 * error(theirs)


def test_weights_are_shared_with_the_model() -> None:
    """What is written into a parameter reaches the forward, and each weight is there once."""
    model = randomised(MODELS["biased"])
    names = [name for name, _ in model.named_parameters()]
    ours, theirs = both(model, packed=False)
    assert [name for name, _ in ours.model.named_parameters()] == names
    for lm in (ours, theirs):
        with torch.no_grad():
            for parameter in lm.model.parameters():
                parameter.mul_(0.9)
    tokens = random_tokens(4, 0)
    close(ours.forward(tokens).logits, theirs.forward(tokens).logits)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}},
    ],
)
def test_other_models_are_left_to_transformers(change: dict[str, Any]) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SMALL, **change))
    assert not fits(model) and isinstance(CachedLM(model).network, TransformersForward)
