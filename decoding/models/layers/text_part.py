"""The text part of a multimodal model: its decoder and output layer as a causal model of their own.

On a text without pictures or sounds the two say the same. The weights are shared, the towers of
the other kinds of input are left to the garbage collector."""

from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from decoding.models.bare import bare
from runtime.errors import UserError

# Without a causal class, but the whole model reads text as one does.
WHOLE = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl"}
BOTH_WAYS = {"paligemma"}  # each token of a prompt sees all of it


def auto_class(config: PreTrainedConfig) -> Any:
    """What loads a model of this config."""
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    pictured = not causal and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if pictured else AutoModelForCausalLM


def text_part(key: str, model: PreTrainedModel) -> PreTrainedModel:
    """The model itself where it reads nothing but text. key: what the user calls it.

    Raises UserError where the text part is no causal model that can be told."""
    config = model.config.get_text_config()
    if config is model.config or model.config.model_type in WHOLE:
        return model
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    causal = kind is not None and model.config.model_type not in BOTH_WAYS
    if found := _joined(kind, model) if causal else None:
        return found
    raise UserError(
        f"{key}: expected a causal model, or one whose text part is a class of its own, got"
        f" {type(model).__name__}. Choose another, see docs/guides/own-pair.md"
    )


def _joined(kind: Any, model: PreTrainedModel) -> PreTrainedModel | None:
    """The decoder and output layer of `model` as one of the class `kind`, where they are made for
    it."""
    decoder: PreTrainedModel = model.get_decoder()
    _refuse_hooks_around(decoder, model)
    if type(decoder) is kind:
        return decoder
    with torch.device("meta"):
        part: PreTrainedModel = kind(model.config.get_text_config())
    names = [name for name, child in part.named_children() if type(child) is type(decoder)]
    if len(names) != 1:
        return None
    setattr(part, names[0], decoder)
    part.set_output_embeddings(model.get_output_embeddings())
    part.generation_config = model.generation_config
    return None if any(weights.is_meta for weights in part.parameters()) else part.eval()


def _refuse_hooks_around(decoder: PreTrainedModel, model: PreTrainedModel) -> None:
    """Raises UserError where something is attached to a module around the decoder, which is left
    out; accelerate's hooks only move tensors."""
    for part in model.modules():
        around = part is not decoder and any(inner is decoder for inner in part.modules())
        if around and not (bare(part) or hasattr(part, "_hf_hook")):
            raise UserError(
                f"pair: expected hooks and patches on the text part of {type(model).__name__}"
                f" alone, got some on {type(part).__name__} around it. Attach them there"
            )
