"""Published EAGLE drafts, small and random, as models and as the files of each format."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, Qwen3Config

from decoding.models.cached_lm import CachedLM
from decoding.models.eagle.checkpoint import FLAGS
from decoding.models.eagle.published import Flavour, PublishedDraft, PublishedModel
from decoding.models.loading import ModelPair
from tests.helpers.models.tiny_pair import tiny_models, tiny_tokenizer

FLAVOURS = {
    "plain": Flavour((1, 2, 3)),
    "residual": Flavour((1, 2, 3), norm_before_residual=True),
    "before_fc": Flavour((1, 3), norm_before_fc=True, norm_output=True),
    "each": Flavour((0, 2, 3), fc_norm=True, norm_output=True, norm_before_residual=True),
    "no_norm": Flavour((1, 2, 3), final_norm=False),
    "usual": Flavour((2, 2, 1)),  # of a target of four layers, where none are named
    "eagle1": Flavour(final_norm=False, fc_bias=True),
}
SAYS = torch.arange(0, 32, 2)  # a draft vocabulary
SHAPE = {  # of the layers
    "vocab_size": 32,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 96,
}
NAMED = "model_type hidden_act rms_norm_eps rope_parameters attention_bias mlp_bias"
KEPT = [*SHAPE, "num_hidden_layers", *NAMED.split()]  # of a configuration, in a draft's


def random_model(
    flavour: Flavour, *, says: int = 32, layers: int = 1, scale: float = 0.35, **more: Any
) -> PublishedModel:
    """For a target of `tests.helpers.models.tiny_pair`; float64. more: of its configuration."""
    qwen = more.pop("qwen", False)
    values = SHAPE | {"tie_word_embeddings": False}
    kind = Qwen3Config if qwen else LlamaConfig
    torch.manual_seed(11)
    wide = more.pop("target_width", 24)
    model = PublishedModel(
        kind(**(values | more), num_hidden_layers=layers), flavour, says, wide
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = scale * torch.randn_like(parameter)
            parameter.copy_(1 + noise if parameter.ndim == 1 else noise)
    return model.requires_grad_(False)


def published_pair(flavour: Flavour, vocabulary: torch.Tensor | None = None, **more: Any):
    """The tiny target and a random draft for it."""
    target = CachedLM(tiny_models()[0])
    says = 32 if vocabulary is None else len(vocabulary)
    model = random_model(flavour, says=says, **more)
    draft = PublishedDraft(model, target, vocabulary=vocabulary)
    return ModelPair(target, draft, tiny_tokenizer(), "tiny", (0,))


def write_speculators(folder: Path, model: PublishedModel, tokens: torch.Tensor | None) -> Path:
    """As speculators 0.9.0 has it."""
    folder.mkdir(parents=True, exist_ok=True)
    values, flavour = model.config.to_dict(), model.flavour
    state = dict(model.state_dict())
    if tokens is not None:
        state |= draft_vocabulary(model, tokens)
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "dtype": str(model.dtype).removeprefix("torch."),
        "draft_vocab_size": len(state["lm_head.weight"]),
        **{flag: getattr(flavour, flag) for flag in FLAGS},
        "eagle_aux_hidden_state_layer_ids": list(flavour.layers),
        "target_hidden_size": None,
        "embed_requires_grad": False,
        "transformer_layer_config": {key: values[key] for key in KEPT if key in values}
        | {"num_aux_hidden_states": len(flavour.layers)},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]},
        },
    }
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def draft_vocabulary(model: PublishedModel, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Token j of the draft is j + d2t[j] of the target; t2d[v]: whether the draft has token v."""
    return {
        "lm_head.weight": model.lm_head.weight[tokens].clone(),
        "d2t": tokens - torch.arange(len(tokens)),
        "t2d": torch.isin(torch.arange(model.config.vocab_size), tokens),
    }


def write_flat(folder: Path, model: PublishedModel, tokens: torch.Tensor, *, forge: bool) -> Path:
    """As SafeAILab (a pickled state, no embeddings) or SpecForge has it."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {k.replace("layers.0.", "midlayer."): v for k, v in model.state_dict().items()}
    state |= draft_vocabulary(model, tokens)
    values = model.config.to_dict()
    config = {key: values[key] for key in KEPT if key in values}
    config |= {"draft_vocab_size": len(tokens), "architectures": ["LlamaForCausalLM"]}
    flavour = model.flavour
    if forge:
        inner = [layer - 1 for layer in flavour.layers]
        config |= {flag: getattr(flavour, flag) for flag in FLAGS if flag != "norm_output"}
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "norm_output": flavour.final_norm,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": inner},
        }
        save_file(state, folder / "model.safetensors")
    else:
        del state["embed_tokens.weight"]
        torch.save(state, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_eagle1(folder: Path, model: PublishedModel) -> Path:
    """Without an output layer; its configuration is that of a Llama."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    torch.save(state, folder / "pytorch_model.bin")
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "bias": True}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
