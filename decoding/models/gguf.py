"""Models in the format of llama.cpp (GGUF)."""

import logging
import pathlib
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGMLQuantizationType
from safetensors import safe_open

from runtime.errors import UserError
from runtime.json_files import read_object

logging.getLogger("gguf").setLevel(logging.WARNING)
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(folder: pathlib.Path, tokenizer: pathlib.Path, out: pathlib.Path) -> None:
    """Write the Llama in a Hugging Face folder, in bfloat16 as llama.cpp reads it.

    tokenizer: a GGUF file with the same vocabulary, such as the target's, whose tokenizer is
    copied: llama.cpp drafts only with the target's. Raises UserError for other models."""
    config = read_object(folder / "config.json", "model", "Give a Hugging Face folder")
    rope = config.get("rope_parameters") or config
    plain = rope.get("rope_type", "default") == "default" and not config.get("rope_scaling")
    biased = config.get("attention_bias") or config.get("mlp_bias")
    if config.get("architectures") != ["LlamaForCausalLM"] or not plain or biased:
        raise UserError(
            f"model: {folder} is no plain Llama. Convert it with convert_hf_to_gguf.py of llama.cpp"
        )
    try:
        fields = GGUFReader(tokenizer).fields
    except (OSError, ValueError, IndexError) as error:
        raise UserError(
            f"tokenizer: {tokenizer} is no GGUF file ({error}). Give one of the target"
        ) from error
    if len(fields["tokenizer.ggml.tokens"].data) != config["vocab_size"]:
        raise UserError(
            f"tokenizer: {tokenizer} has another vocabulary than {folder}. Give its own"
        )
    writer = GGUFWriter(out, "llama")
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_name(folder.name)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    for name, field in fields.items():
        if name.startswith("tokenizer."):
            kind, *inner = field.types
            writer.add_key_value(name, field.contents(), kind, inner[0] if inner else None)
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                _add(writer, name, file.get_tensor(name), heads, kv_heads)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, name: str, tensor: torch.Tensor, heads: int, kv_heads: int) -> None:
    module, _, kind = name.rpartition(".")
    if module in OUTER:
        named = OUTER[module]
    else:
        _, _, layer, part = module.split(".", 3)
        named = f"blk.{layer}.{NAMES[part]}"
    for part, count in (("attn_q", heads), ("attn_k", kv_heads)):
        if named.endswith(part):  # pairs of rotated numbers lie side by side
            tensor = tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
    if tensor.ndim == 1:
        writer.add_tensor(f"{named}.{kind}", tensor.float().numpy())
        return
    bits = tensor.bfloat16().contiguous().view(torch.int16).numpy().view(np.uint8)
    writer.add_tensor(f"{named}.{kind}", bits, raw_dtype=GGMLQuantizationType.BF16)
