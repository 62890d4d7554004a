"""A published EAGLE draft from its files, for a target that is loaded."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from decoding.models.cached_lm import CachedLM
from decoding.models.eagle.checkpoint import Checkpoint, read_tensors
from decoding.models.eagle.formats import (
    flavour_of,
    layer_config,
    no_llama,
    refuse_smaller_window,
    renamed,
)
from decoding.models.eagle.published import Flavour, PublishedDraft, PublishedModel, rotary_of
from decoding.models.options import (
    device_map_of,
    first_line,
    on_cpu,
    options_of,
    resolve_dtype,
    where_of,
)
from decoding.models.packing import pack_linears
from decoding.settings import ModelSettings
from runtime.errors import UserError

OTHER = "Give a draft that was trained for pair.target"


def load_published(
    checkpoint: Checkpoint, settings: ModelSettings, target: CachedLM
) -> PublishedDraft:
    """The draft of a pair. What its files leave out (embeddings, the output layer) is the target's.

    Raises UserError for damaged files, and for a draft of another target."""
    if more := sorted(options_of(settings).keys() - where_of(settings).keys()):
        raise UserError(
            f"pair.draft_options: expected none for an EAGLE draft, got {more[0]}. Leave it away"
        )
    refuse_smaller_window(checkpoint, target.max_length)
    tensors = renamed(read_tensors(checkpoint.weights))
    _refuse_packed(tensors, checkpoint)
    depth = target.hidden_states - 1
    flavour, config = flavour_of(checkpoint, tensors, depth), layer_config(checkpoint, tensors)
    _refuse_tied(tensors, checkpoint, target)
    _add_shared(tensors, config, target)
    vocabulary = _vocabulary(tensors, config.vocab_size)
    width = target.model.config.get_text_config().hidden_size
    model = _unfilled(config, flavour, len(tensors["lm_head.weight"]), width)
    _check(model, tensors, checkpoint)
    device, dtype = _place(settings, target, tensors)
    model.load_state_dict({n: x.to(device, dtype) for n, x in tensors.items()}, assign=True)
    model.rotary_emb = rotary_of(config).to(device)
    pack_linears(model.requires_grad_(False))
    sizes = {"vocab_size": target.vocab_size, "max_length": settings.max_length}
    return PublishedDraft(model, target, **sizes, vocabulary=vocabulary)


WHOLE = (torch.int64, torch.int32, torch.int16)
PLAIN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _refuse_packed(tensors: Mapping[str, Tensor], checkpoint: Checkpoint) -> None:
    """Raises UserError for weights that are not numbers as they are (quantised, say)."""
    for name, tensor in tensors.items():
        if name != "d2t" and (tensor.dtype not in PLAIN or not tensor.ndim):
            raise UserError(
                f"pair.draft: expected {name} in bfloat16, float16 or float32, got"
                f" {str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)} in"
                f" {checkpoint.weights}. Give a draft that is not quantised"
            )


def _add_shared(tensors: dict[str, Tensor], config: Any, target: CachedLM) -> None:
    """Take what is absent from the target. Raises UserError where it has another vocabulary, or
    another size."""
    wanted, found = target.model.config.get_text_config().vocab_size, config.vocab_size
    if found != wanted:
        raise UserError(
            f"pair.draft: expected vocab_size {wanted}, as of pair.target, got {found}. {OTHER}"
        )
    shared = {
        "embed_tokens.weight": target.model.get_input_embeddings(),
        "lm_head.weight": target.model.get_output_embeddings(),
    }
    for name, module in shared.items():
        if name in tensors:
            continue
        weight = module.weight.detach()
        if weight.shape[1] != config.hidden_size:
            raise UserError(
                f"pair.draft: expected hidden_size {weight.shape[1]}, as of pair.target, for it has"
                f" no {name}, got {config.hidden_size}. {OTHER}"
            )
        tensors[name] = weight


def _refuse_tied(tensors: dict[str, Tensor], checkpoint: Checkpoint, target: CachedLM) -> None:
    """Raises UserError where the output layer is said to be the embeddings and those are not the
    target's: without one of its own a draft has the target's."""
    says = checkpoint.config.get("transformer_layer_config") or checkpoint.config
    own, shared = tensors.get("embed_tokens.weight"), target.model.get_input_embeddings()
    if not says.get("tie_word_embeddings") or own is None or "lm_head.weight" in tensors:
        return
    weight = shared.weight.detach()
    if own.shape != weight.shape or not torch.allclose(own.to(weight), weight, rtol=1e-2):
        raise UserError(
            "pair.draft: expected tie_word_embeddings false in its config.json, or the embeddings"
            " of pair.target, got true and others. Give another draft"
        )


def _unfilled(config: Any, flavour: Flavour, says: int, width: int) -> PublishedModel:
    """The model, without memory. Raises UserError for a configuration of which none can be made."""
    try:
        with torch.device("meta"):
            return PublishedModel(config, flavour, says, width)
    except (RuntimeError, ValueError, ArithmeticError, TypeError) as error:
        raise no_llama(first_line(error)) from error


def _vocabulary(tensors: dict[str, Tensor], size: int) -> Tensor | None:
    """[k], the target's tokens that the output layer is about; None: all. Takes d2t away.

    Raises UserError where they are none of the target's."""
    offsets, says = tensors.pop("d2t", None), len(tensors["lm_head.weight"])
    if offsets is None:
        if says != size:
            raise UserError(
                f"pair.draft: expected d2t, for its output layer has {says} tokens and its target"
                f" {size}, got none. Give another draft"
            )
        return None
    if offsets.shape != (says,) or offsets.dtype not in WHOLE:
        raise UserError(
            f"pair.draft: expected d2t with {says} whole numbers, got {offsets.dtype} of shape"
            f" {list(offsets.shape)}. Give another draft"
        )
    tokens = offsets.long() + torch.arange(says)
    if len(tokens.unique()) < says or int(tokens.min()) < 0 or int(tokens.max()) >= size:
        raise UserError(
            f"pair.draft: expected d2t to name {says} different tokens from 0 to {size - 1}, got"
            " others. Give another draft"
        )
    return tokens


def _check(model: PublishedModel, tensors: Mapping[str, Tensor], checkpoint: Checkpoint) -> None:
    """Raises UserError where the tensors are not those of `model`."""
    wanted = {name: list(x.shape) for name, x in model.state_dict().items()}
    found = {name: list(x.shape) for name, x in tensors.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) == found.get(name):
            continue
        raise UserError(
            f"pair.draft: expected {name} of shape {wanted.get(name)} for pair.target, got"
            f" {found.get(name)} in {checkpoint.weights}. {OTHER}"
        )


def _place(
    settings: ModelSettings, target: CachedLM, tensors: Mapping[str, Tensor]
) -> tuple[torch.device, torch.dtype]:
    """Where the draft goes: one device, the target's where several are asked for."""
    asked: Any = device_map_of(settings)
    if on_cpu(asked):
        device = torch.device("cpu")
    else:
        one = isinstance(asked, str) and not asked.startswith(("auto", "balanced", "sequential"))
        device = torch.device(asked) if one else target.device
    stored = tensors["fc.weight"].dtype
    return device, resolve_dtype(settings.dtype, device.type, stored)
