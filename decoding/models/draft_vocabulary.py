"""Draft vocabularies: a draft that proposes only the most frequent tokens of its target.

With a few layers, most of a draft's forward is its output layer: one row of weights for each token.
FR-Spec (2502.14856) leaves rare tokens out, EAGLE-3 (2503.01840) trains its drafts so. No other
part is affected: the logits of all other tokens are -inf, so q is the distribution the tokens are
drawn from, and every verification rule stays exact. Tokens outside the draft's vocabulary come from
the target, as residual or bonus tokens."""

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import align_module_device
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from decoding.models.bare import bare
from decoding.models.draft_model import beside
from decoding.models.packing import PackedLinear
from runtime.errors import UserError
from runtime.files import write_atomically

KEY = "pair.draft_vocabulary"
FILE = "draft_vocabulary.safetensors"  # beside a draft; used by pair.draft_vocabulary=auto
_REMEDY = "Make one: python pairs/draft_vocabulary.py, or set pair.draft_vocabulary=null"
_NARROW = 1 << 16  # ids below it are stored in 16 bits


def write_vocabulary(path: Path, tokens: Tensor, facts: Mapping[str, Any]) -> None:
    """Write a vocabulary. tokens: [k] ids, the most frequent first; facts: on what they were
    counted."""
    dtype = torch.uint16 if int(tokens.max()) < _NARROW else torch.int32
    metadata = {name: json.dumps(value) for name, value in facts.items()}
    write_atomically(
        path, lambda partial: save_file({"tokens": tokens.to(dtype)}, partial, metadata=metadata)
    )


def read_vocabulary(path: Path, vocab_size: int, key: str = KEY) -> Tensor:
    """Return the tokens of a file, [k] int64, the most frequent first. key: config key named in
    errors.

    Raises UserError if it is missing or damaged, or does not hold distinct tokens of a vocabulary
    of `vocab_size`."""
    remedy = f"Make one: python pairs/draft_vocabulary.py, or set {key}=null"
    if not path.is_file():
        raise UserError(f"{key}: no file {path}. {remedy}")
    try:
        with safe_open(path, "pt") as file:
            tokens = file.get_tensor("tokens")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{key}: {path} holds no draft vocabulary ({error}). {remedy}") from error
    fault = None
    if tokens.dim() != 1 or tokens.is_floating_point() or tokens.dtype == torch.bool:
        fault = f"{tokens.dtype} of shape {list(tokens.shape)}, not a list of token ids"
    elif not len(tokens := tokens.long()):
        fault = "no tokens"
    elif (wrong := tokens[(tokens < 0) | (tokens >= vocab_size)]).numel():
        fault = f"token {int(wrong[0])}, the pair's vocabulary ends at {vocab_size - 1}"
    else:
        distinct, times = tokens.unique(return_counts=True)
        if len(distinct) < len(tokens):
            fault = f"token {int(distinct[times.argmax()])} {int(times.max())} times"
    if fault:
        raise UserError(f"{key}: {path} holds {fault}. {remedy}")
    return tokens


def own_vocabulary(draft: str | Path) -> Path | None:
    """Return the vocabulary file in the folder of a draft; None if there is none, or `draft` is no
    folder."""
    return beside(Path(draft).expanduser(), FILE)


def with_ends(tokens: Tensor, eos_ids: Collection[int]) -> Tensor:
    """Return `tokens` [k] with the end tokens added (else no draft would propose an end),
    increasing."""
    return torch.cat([tokens, torch.tensor(sorted(eos_ids), dtype=torch.long)]).unique()


def among_all(logits: Tensor, tokens: Tensor, vocab_size: int) -> Tensor:
    """Return logits [..., k] of `tokens` [k] as [..., V], with -inf for all other tokens."""
    full = logits.new_full((*logits.shape[:-1], vocab_size), -math.inf)
    return full.index_copy_(-1, tokens, logits)


def digest(tokens: Tensor) -> str:
    """Return the part of a pair's identity that stands for a vocabulary [k]."""
    ids = json.dumps(sorted(tokens.tolist()))
    return f"{len(tokens)} tokens {hashlib.sha256(ids.encode()).hexdigest()[:16]}"


def keep_rows(model: PreTrainedModel, tokens: Tensor) -> None:
    """Give `model` an output layer for `tokens` [k] alone, in this order. Raises UserError if it
    has no plain one."""
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        raise UserError(
            f"{KEY}: pair.draft is on several devices. Set pair.draft_device to one, or {KEY}=null"
        )
    head = model.get_output_embeddings()
    if (
        type(head) not in (nn.Linear, PackedLinear)
        or not (bare(head) or hasattr(head, "_hf_hook"))
        or type(head.weight) is not nn.Parameter
        or not head.weight.is_floating_point()
    ):
        raise UserError(
            f"{KEY}: the output layer of pair.draft is a {type(head).__name__}, or has hooks."
            f" {_REMEDY}"
        )
    model.set_output_embeddings(rows_of(head, tokens))


def rows_of(head: nn.Linear, tokens: Tensor) -> nn.Linear:
    """Return the rows of an output layer for `tokens` [k] as a layer with its own weights, packed
    if the layer is."""
    with align_module_device(head):  # loads weights that are kept in CPU memory or on disk
        index = tokens.to(head.weight.device)
        part = nn.Linear(head.in_features, len(tokens), head.bias is not None, device="meta")
        part.weight = nn.Parameter(head.weight.detach()[index])
        if head.bias is not None:
            part.bias = nn.Parameter(head.bias.detach()[index])
    return (PackedLinear(part) if isinstance(head, PackedLinear) else part).eval()
