"""A draft that is its target with coarser weights: a second network that agrees with it often, as
drafts of served pairs do. It saves no time, so what is said of its time is modelled."""

from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM


def write_rounded_draft(target: Path, bits: int, group: int, folder: Path) -> None:
    """Save the Llama in `target` to `folder` in bfloat16, the matrices of its layers `rounded`;
    embeddings, output layer and norms stay."""
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    for parameter in model.model.layers.parameters():
        if parameter.ndim == 2:
            parameter.data = rounded(parameter.data, bits, group)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(target).save_pretrained(folder)


def rounded(weights: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """`weights` [out, in] with every `group` neighbours of a row (the last ones may be fewer) on
    2**bits evenly spaced values, from the lowest of them to the highest."""
    parts = []
    for part in weights.float().split(group, dim=1):
        lowest, highest = part.aminmax(dim=1, keepdim=True)
        step = ((highest - lowest) / (2**bits - 1)).clamp(min=torch.finfo(torch.float32).tiny)
        parts.append(lowest + step * ((part - lowest) / step).round())
    return torch.cat(parts, dim=1).to(weights.dtype)
