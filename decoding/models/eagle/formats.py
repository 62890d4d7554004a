"""What the formats of published EAGLE drafts say, as one `Flavour` and tensors under one set of
names."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from decoding.models.eagle.checkpoint import Checkpoint
from decoding.models.eagle.published import Flavour
from decoding.models.eagle.speculators import FLAGS
from runtime.errors import UserError

IDS = "eagle_aux_hidden_state_layer_ids"
UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")  # what others say, or know


def renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Under the names of `PublishedModel`, and d2t; without what nothing is computed from."""
    names = {name: name.replace("midlayer.", "layers.0.", 1) for name in tensors}
    kept = (name for name in names if name not in UNUSED and not name.endswith("inv_freq"))
    return {names[name]: tensors[name] for name in kept}


def flavour_of(checkpoint: Checkpoint, tensors: Mapping[str, Tensor], depth: int) -> Flavour:
    """depth: layers of the target. Raises UserError for layers it has not."""
    config = checkpoint.config
    if checkpoint.format == "eagle1":
        return Flavour(final_norm=False, fc_bias="fc.bias" in tensors)
    flags = {name: _flag(config, name, False) for name in FLAGS}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise UserError(
            "pair.draft: expected norm_before_fc or fc_norm in its config.json, got both. Give"
            " another draft"
        )
    layers = _layers(config, depth)
    if checkpoint.format == "speculators":
        return Flavour(layers, **flags)
    # SpecForge feeds back what comes before the norm, which `norm_output` leaves out if false.
    final_norm = _flag(config, "norm_output", True)
    return Flavour(layers, **(flags | {"norm_output": False}), final_norm=final_norm)


def _flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    value = config.get(name)
    if not isinstance(value, bool | None):
        raise UserError(
            f"pair.draft: expected {name} to be true or false in its config.json, got {value!r}."
            " Give another draft"
        )
    return default if value is None else value


def _layers(config: Mapping[str, Any], depth: int) -> tuple[int, ...]:
    """The target's hidden states that are joined: those that enter these layers. SpecForge names
    the layers that give them, one before."""
    below = config.get("eagle_config")
    nested = below.get(IDS) if isinstance(below, Mapping) else None
    layers, first = config.get(IDS) or nested, 0 if config.get(IDS) else 1
    if layers is None:
        layers, first = [2, depth // 2, depth - 3], 0
    known = range(-first, depth - first)
    if not isinstance(layers, list) or not all(type(x) is int and x in known for x in layers):
        raise UserError(
            f"pair.draft: expected {IDS} from {known[0]} to {known[-1]}, as pair.target has layers,"
            f" got {layers}. Give a draft for this target"
        )
    return tuple(layer + first for layer in layers)


SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


def no_llama(reason: str) -> UserError:
    return UserError(
        f"pair.draft: its config.json is none of a Llama's ({reason[:160]}). Give another draft"
    )


def layer_config(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> Any:
    """Of the draft's own layers, as many as there are. Raises UserError for layers of another
    kind."""
    config: Any = checkpoint.config
    if checkpoint.format == "speculators":
        config = config.get("transformer_layer_config")
        if not isinstance(config, Mapping):
            raise UserError(
                "pair.draft: expected transformer_layer_config in its config.json, got none. Give"
                " another draft"
            )
    kind = Qwen3Config if "layers.0.self_attn.q_norm.weight" in tensors else LlamaConfig
    ours = {"model_type", "architectures", "num_hidden_layers", "tie_word_embeddings"}
    values = {name: value for name, value in config.items() if name not in ours}
    count = len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    try:
        found = kind(**values, num_hidden_layers=count, tie_word_embeddings=False)
    except Exception as error:  # a damaged file makes it raise anything
        raise no_llama(" ".join(str(error).split())) from error
    if small := [name for name in SIZES if not (getattr(found, name) or 1) > 0]:
        raise no_llama(f"{small[0]} {getattr(found, small[0])}")
    if found.hidden_act != "silu":
        raise UserError(
            f"pair.draft: expected hidden_act silu in its config.json, got {found.hidden_act}. Give"
            " another draft"
        )
    return found
