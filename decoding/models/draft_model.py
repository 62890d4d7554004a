"""A small draft for a Llama target: a few transformer layers of its own, everything else taken from
the target.

What is trained and shipped is a dict of tensors named as in the draft itself: ``model.layers.0.*``
... ``model.layers.{n-1}.*`` and ``model.norm.weight``. Embeddings and head are the target's, tied
where it ties them."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from runtime.errors import UserError

BESIDE = "speculation"  # in a draft's folder: engines load every safetensors file above it
LAYERS = "model.layers."
NORM = "model.norm.weight"


def beside(folder: Path, name: str) -> Path | None:
    """Return the file of this name beside the weights of the draft in a folder; None if there is
    none. Earlier versions put it next to the weights."""
    places = (folder / BESIDE / name, folder / name)
    return next((path for path in places if path.is_file()), None)


def to_write_beside(folder: Path, name: str) -> Path:
    """Return where to write that file; makes its folder."""
    (folder / BESIDE).mkdir(exist_ok=True)
    return folder / BESIDE / name


def copied_layers(target: LlamaForCausalLM, sources: Sequence[int]) -> dict[str, Tensor]:
    """Return the target's layers `sources`, renumbered 0, 1, ..., and its final norm: the start of
    distillation."""
    layers = {NORM: target.model.norm.weight.detach().clone()}
    for number, source in enumerate(sources):
        for name, tensor in target.model.layers[source].state_dict().items():
            layers[f"{LAYERS}{number}.{name}"] = tensor.clone()
    return layers


def own_layers(draft: LlamaForCausalLM) -> dict[str, Tensor]:
    """Return the tensors that a draft does not share with its target, as `draft_from_layers` takes
    them."""
    return {name: tensor for name, tensor in draft.state_dict().items() if is_own(name)}


def draft_from_layers(target: LlamaForCausalLM, layers: Mapping[str, Tensor]) -> LlamaForCausalLM:
    """Return a LlamaForCausalLM with `layers` between the target's embeddings and head, in the
    target's dtype and on its device.

    Raises UserError when `layers` does not fit the target (wrong names or shapes).
    """
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = len(
        {name.split(".")[2] for name in layers if name.startswith(LAYERS)}
    )
    with target.device:
        draft = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    shared = {name: tensor for name, tensor in target.state_dict().items() if not is_own(name)}
    try:
        draft.load_state_dict(shared | dict(layers))
    except RuntimeError as error:
        raise UserError(
            f"draft_layers: these layers do not fit the target: {error}. Distill them again"
        ) from error
    draft.generation_config = copy.deepcopy(target.generation_config)
    return draft


def is_own(name: str) -> bool:
    """Return whether a tensor of a draft is its own, not its target's."""
    return name == NORM or name.startswith(LAYERS)
