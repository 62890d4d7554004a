"""Checks of the arguments of `generate` that `speculate` supports; others are refused in a line."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from runtime.errors import UserError
from serving.models import Draft


def _offers(method: str) -> Callable[[Any], bool]:
    return lambda value: hasattr(value, method) and not isinstance(value, type)


KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "stop": (_offers("should_stop"), "a stop rule, such as Confidence(0.4)"),
    "structure": (_offers("grow"), "a structure, such as Chain(8)"),
    "verifier": (_offers("distribution"), "a verifier, such as TokenVerifier()"),
    "draft_warp": (_offers("probs"), "a warp, such as Warp(temperature=0.5)"),
    "stream": (_offers("put"), "a streamer, such as TextStreamer(tokenizer)"),
    "engine": (callable, "the class of an engine, such as SerialEngine"),
    "predictor": (lambda x: isinstance(x, str | Path) and x != "", "its folder or hub id"),
    "threshold": (lambda x: isinstance(x, float | int) and 0 <= x <= 1, "a number from 0 to 1"),
    "draft": (lambda x: isinstance(x, Draft), "a model, its folder or hub id"),
}
"""What each argument has to be, and what to write."""
TAKEN = {"generation_config", "logits_processor", "stopping_criteria", "input_ids"} | {
    *("attention_mask", "position_ids", "past_key_values", "cache_params", "use_cache"),
    *("logits_to_keep", "labels", "output_attentions", "output_hidden_states", "return_dict"),
}
"""What `generate` hands over and is looked at elsewhere, or says nothing of the next token."""


def refuse_other_kinds(own: Mapping[str, Any]) -> None:
    """Raise UserError naming the first argument of an unexpected kind."""
    for name, (fits, what) in KINDS.items():
        value = own.get(name)
        if (value is not None or name == "draft") and not fits(value):
            raise UserError(f"{name}: expected {what}, got {value!r}. Give one")


def refuse_unsupported(
    input_ids: Tensor, config: GenerationConfig, given: Mapping[str, Any]
) -> None:
    """Raise UserError naming the first argument of `generate` that is not supported."""
    cache, states = given.get("past_key_values"), given.get("cache_params")
    unsupported = {
        "num_beams": (config.num_beams or 1) > 1,
        "penalty_alpha": config.penalty_alpha,
        "token_healing": config.token_healing,
        "dola_layers": getattr(config, "dola_layers", None) is not None,
        "inputs_embeds": given.get("inputs_embeds") is not None,
        "past_key_values": cache is not None and cache.get_seq_length() > 0,
        "cache_params": states is not None and states.has_previous_state(),
        "cache_implementation": config.cache_implementation == "quantized",
        **{
            name: config.return_dict_in_generate and getattr(config, name)
            for name in ("output_scores", "output_logits", "output_attentions")
        },
        "output_hidden_states": config.return_dict_in_generate and config.output_hidden_states,
    }
    for name, asked in unsupported.items():
        if asked:
            raise UserError(f"{name}: not supported by speculate. Leave it away")
    if input_ids.is_meta:
        raise UserError("input_ids: expected tokens, got a tensor on the meta device. Give some")
    if not input_ids.shape[0]:
        raise UserError("input_ids: expected at least one prompt, got a batch of none. Give one")
    if not input_ids.shape[1]:
        raise UserError("input_ids: expected a prompt of at least one token, got none. Give one")


def refuse_other_inputs(input_ids: Tensor, given: Mapping[str, Any], vocab_size: int) -> None:
    """Raise UserError naming the first input of the model that our engines would ignore, or prompts
    with tokens that it does not have."""
    if not 0 <= int(input_ids.min()) <= int(input_ids.max()) < vocab_size:
        raise UserError(
            f"input_ids: expected tokens from 0 to {vocab_size - 1}, got {int(input_ids.min())} to"
            f" {int(input_ids.max())}. Take the tokenizer of the model"
        )
    for name, value in given.items():
        nothing = value is None or (isinstance(value, dict) and not value)
        if name not in TAKEN and not nothing:
            raise UserError(f"{name}: not supported by speculate. Leave it away")
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if positions is None:
        return
    seen = torch.ones_like(input_ids).bool() if mask is None else mask.bool()
    if positions.shape[-2:] != seen.shape or bool(
        ((positions != seen.long().cumsum(-1) - 1) & seen).any()
    ):
        raise UserError(
            "position_ids: expected those that follow from the attention mask, got others. Leave"
            " them away"
        )


def prompts_of(input_ids: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Return the prompt [n] of each row, without the padding on its left."""
    if mask is None:
        return list(input_ids.cpu())
    if mask.shape != input_ids.shape:
        raise UserError(
            f"attention_mask: expected shape {list(input_ids.shape)}, as of the prompts, got"
            f" {list(mask.shape)}. Give the tokenizer's"
        )
    rows = [(ids[seen], seen) for ids, seen in zip(input_ids.cpu(), mask.cpu().bool(), strict=True)]
    if not all(bool(seen[len(seen) - len(ids) :].all()) for ids, seen in rows):
        raise UserError(
            "attention_mask: expected padding on the left alone. Set padding_side='left' in the"
            " tokenizer; where a prompt itself holds the pad token, give a mask that says so"
        )
    return [ids for ids, _ in rows]
