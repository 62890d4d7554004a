"""Checks of the models that are supported: causal ones whose attention (full, with a sliding window
or in chunks) uses the transformers interface, some that keep states, and the text part of
multimodal models, i.e. decoder and output layer as a causal model.

On a text without pictures or sounds that part gives the same logits as the whole model. Its weights
are shared; the encoders of other inputs are left to the garbage collector."""

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
from decoding.models.context import CHUNKED, FULL, SLIDING
from decoding.models.recurrent import keeps_states, refuse_old_transformers
from runtime.errors import UserError

FROM_PADDING = "create_position_ids_from_input_ids"  # of embeddings whose positions begin there
# Without a causal class, but the whole model reads text like one.
WHOLE = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl"}
BOTH_WAYS = {"paligemma"}  # each token of a prompt sees all of it


def refuse_other_layers(key: str, model: PreTrainedModel) -> None:
    """Raise UserError for a model with other layers. key: config key of the model."""
    name, remedy = type(model).__name__, "Choose a Llama, Qwen2, Gemma, Mistral or similar model"
    types = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    attends = types <= {FULL, SLIDING, CHUNKED} and model._supports_attention_backend
    if not (attends and not model._is_stateful) and not keeps_states(model):
        raise UserError(
            f"{key}: {name} keeps other state than keys and values of full attention. {remedy}"
        )
    refuse_old_transformers(key, model)
    parts = list(model.get_decoder().modules())
    if any(getattr(part, "is_causal", True) is False for part in parts):
        raise UserError(
            f"{key}: expected a causal model, got {name} with tokens that see those after them."
            f" Set is_decoder in its config if it is trained as one, or choose another: {remedy}"
        )
    if any(hasattr(part, FROM_PADDING) for part in parts):
        raise UserError(
            f"{key}: expected positions that begin at 0, got {name}, where they begin behind the"
            f" pad token. {remedy}"
        )


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the auto class that loads a model of this config."""
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    pictured = not causal and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if pictured else AutoModelForCausalLM


def text_part(key: str, model: PreTrainedModel) -> PreTrainedModel:
    """Return the text part of a model, the model itself if it reads text only. key: config key of
    the model.

    Raises UserError if no causal model can be identified as its text part."""
    config = model.config.get_text_config()
    if config is model.config or model.config.model_type in WHOLE:
        return model
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    causal = kind is not None and model.config.model_type not in BOTH_WAYS
    if part := _causal_part(kind, model) if causal else None:
        return part
    raise UserError(
        f"{key}: expected a causal model, or one whose text part is a class of its own, got"
        f" {type(model).__name__}. Choose another, see docs/guides/own-pair.md"
    )


def _causal_part(kind: Any, model: PreTrainedModel) -> PreTrainedModel | None:
    """Return the decoder and output layer of `model` as a model of class `kind`; None if they do
    not fit it. Raises UserError if something is attached to a module around the decoder, which
    would be left out (accelerate's hooks, which only move tensors, are allowed)."""
    decoder: PreTrainedModel = model.get_decoder()
    for part in model.modules():
        around = part is not decoder and any(inner is decoder for inner in part.modules())
        if around and not (bare(part) or hasattr(part, "_hf_hook")):
            raise UserError(
                f"pair: expected hooks and patches on the text part of {type(model).__name__}"
                f" alone, got some on {type(part).__name__} around it. Attach them there"
            )
    if type(decoder) is kind:
        return decoder
    with torch.device("meta"):
        causal: PreTrainedModel = kind(model.config.get_text_config())
    names = [name for name, child in causal.named_children() if type(child) is type(decoder)]
    if len(names) != 1:
        return None
    setattr(causal, names[0], decoder)
    causal.set_output_embeddings(model.get_output_embeddings())
    causal.generation_config = model.generation_config
    return None if any(weights.is_meta for weights in causal.parameters()) else causal.eval()
