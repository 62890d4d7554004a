"""Tiny models of the classes that keep states besides keys and values, and what they should say."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.helpers.models.cached import without_cache
from tests.helpers.models.windowed import SMALL as WINDOWED

SMALL = {**WINDOWED, "initializer_range": 0.1}  # rounding grows with the weights
LINEAR, FULL = "linear_attention", "full_attention"
MIXED = {"layer_types": [LINEAR, FULL, LINEAR]}
DELTA = {  # gated delta nets
    **MIXED,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 16}
MAMBA2 = {
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,  # shorter than the texts
}
CONVOLUTIONS = {"layer_types": ["conv", FULL, "conv"]}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "Qwen3Next": {**DELTA, **SHARED},
    "Qwen3_5": DELTA,
    "Qwen3_5Moe": {**DELTA, **SHARED},
    "OlmoHybrid": DELTA,
    "KimiLinear": {
        **MIXED,
        "num_key_value_heads": 4,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "FalconH1": {**MAMBA2, "mamba_d_ssm": 64},
    "Bamba": {**MAMBA2, "attn_layer_indices": [1]},
    "GraniteMoeHybrid": {
        **MAMBA2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
        "layer_types": ["mamba", "attention", "mamba"],
    },
    "Mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    "Lfm2": {**CONVOLUTIONS, "conv_L_cache": 3},
    "Lfm2Moe": {**CONVOLUTIONS, **EXPERTS, "conv_L_cache": 3, "num_dense_layers": 1},
    "Lfm3": CONVOLUTIONS,
    "Zaya": {},
}


def stateful(kind: str, seed: int = 3, **more: Any) -> PreTrainedModel:
    """Random weights, float32: what these classes compute of states is so in any case."""
    torch.manual_seed(seed)
    name = f"{kind}Text" if kind.startswith("Qwen3_5") else kind
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **KINDS[kind], **more})
    model: PreTrainedModel = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for weights in model.parameters():
            if not weights.isfinite().all() or weights.abs().max() > 20:
                weights.normal_(0.5, 0.3)  # what is left uninitialised
    return model.eval()


def near(kind: str, **more: Any) -> PreTrainedModel:
    """Another one, most of the way to it: a draft that is right now and then."""
    model, theirs = stateful(kind, 4, **more), stateful(kind, **more).state_dict()
    ours = model.state_dict()
    model.load_state_dict({name: theirs[name].lerp(ours[name], 0.2) for name in ours})
    return model


@lru_cache
def reference(kind: str) -> PreTrainedModel:
    """The same model with its own attention."""
    model = stateful(kind)
    model.set_attn_implementation("eager")
    return model


def uncached(kind: str, tokens: torch.Tensor, hidden: bool = False) -> torch.Tensor:
    return without_cache(reference(kind), tokens, hidden)
