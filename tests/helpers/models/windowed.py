"""Tiny models of the classes whose layers see a window of the text, and what they should say."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.helpers.models.cached import SMALL as BASE
from tests.helpers.models.cached import VOCAB, without_cache

SMALL: dict[str, Any] = dict(
    BASE, max_position_embeddings=400, pad_token_id=0, bos_token_id=None, eos_token_id=None
)
SLIDE, FULL = "sliding_attention", "full_attention"
MIXED = {"layer_types": [SLIDE, FULL, SLIDE]}
GEMMA = {"query_pre_attn_scalar": 8, **MIXED}
SHARED = {  # the last layer reads the keys and values of the first
    "layer_types": [FULL, SLIDE, FULL],
    "num_kv_shared_layers": 1,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LLAMA4 = {
    **EXPERTS,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 48,
    "no_rope_layers": [1, 0, 1],
    "moe_layers": [1],
    "floor_scale": 7,  # the temperature of layers without rotation changes within the tests
}
TEXTS = ("Gemma3", "Gemma3n", "Gemma4", "Llama4")  # configs are those of a text part
KINDS: Mapping[str, Mapping[str, Any]] = {
    "Gemma2": GEMMA,
    "Gemma3": GEMMA,
    "Gemma3n": {**SHARED, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 3},
    "Gemma4": {**SHARED, "global_head_dim": 8},
    "Mistral": {},
    "Mixtral": EXPERTS,
    "Ministral": MIXED,
    "Qwen2": {"use_sliding_window": True, **MIXED},
    "Qwen3": {"use_sliding_window": True, "layer_types": [FULL, SLIDE, SLIDE]},
    "Qwen3Moe": {
        "use_sliding_window": True,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "Phi3": {"rms_norm_eps": 1e-6},
    "Cohere2": MIXED,
    "Olmo3": MIXED,
    "Starcoder2": {},
    "GptOss": {**EXPERTS, **MIXED},
    "Llama4": LLAMA4,
}


def windowed(kind: str, window: int, **more: Any) -> PreTrainedModel:
    """Random weights. window: tokens of a sliding window or of a chunk."""
    torch.manual_seed(3)
    name = f"{kind}Text" if kind in TEXTS else kind
    size = {"attention_chunk_size" if kind == "Llama4" else "sliding_window": window}
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **KINDS[kind], **size, **more})
    model: PreTrainedModel = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim < 2 or not weights.isfinite().all() or weights.abs().max() > 10:
                weights.normal_(0.5, 0.3)  # norms, biases, sinks, and what is left uninitialised
    alone = kind == "Llama4" or "num_experts_per_tok" not in KINDS[kind]
    return (model.double() if alone else model).eval()  # grouped products take no float64


@lru_cache
def reference(kind: str, window: int) -> PreTrainedModel:
    """The same model with its own attention."""
    model = windowed(kind, window)
    model.set_attn_implementation("eager")
    return model


def uncached(kind: str, window: int, tokens: torch.Tensor) -> torch.Tensor:
    return without_cache(reference(kind, window), tokens)
