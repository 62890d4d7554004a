"""What the formats of published EAGLE drafts say, as one `Flavour` and tensors under one set of
names."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from decoding.models.cpu_llama import FIXED_ROTATIONS
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


# Keys that say how a layer computes, beyond what its weights show.
COMPUTES = re.compile(
    r"scal|multiplier|capping|soft_?cap|norm|clip|swiglu|alibi|parallel_residual|chunk|interleave"
    r"|rotary|rope_pct|no_rope|rope_local|temperature_tuning|dim_model_base|mup"
)
HONOURED = {"rms_norm_eps", "rope_scaling", "partial_rotary_factor", "norm_topk_prob"}
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")


def _refuse_ignored(checkpoint: Checkpoint, layer: Mapping[str, Any], normed: bool) -> None:
    """Raises UserError for what the configuration says and no layer here does. normed: queries and
    keys have norms."""
    honoured = HONOURED | (set() if checkpoint.format == "eagle1" else set(FLAGS))
    honoured |= {"qk_norm", "use_qk_norm"} if normed else set()
    for name, value in {**checkpoint.config, **layer}.items():
        neutral = not value or (value == 1 and value is not True)
        if name in ACTIVATIONS and value not in (None, "silu", "swish"):
            raise _unlike(f"{name} silu", value)
        if COMPUTES.search(name) and name not in honoured and not neutral:
            raise _unlike(f"no {name}", value)
    for name in ("rope_scaling", "rope_parameters"):
        rope = layer.get(name)
        if isinstance(rope, Mapping) and any(isinstance(x, Mapping) for x in rope.values()):
            raise _unlike(f"{name} that are the same for all layers", rope)
    rope, older = layer.get("rope_parameters") or {}, layer.get("rope_scaling") or {}
    theta = rope.get("rope_theta", layer.get("rope_theta")) if isinstance(rope, Mapping) else None
    if rope and (older not in ({}, rope) or layer.get("rope_theta", theta) != theta):
        raise _unlike(
            "rope_parameters alone", f"other values in {'rope_scaling' if older else 'rope_theta'}"
        )


def _check_rotation(config: Any) -> None:
    """Raises UserError for positions that change with the length of a text, and for parts of a head
    that cannot be rotated."""
    rope = config.rope_parameters
    if rope["rope_type"] not in FIXED_ROTATIONS:
        raise _unlike(f"a rope_type of {', '.join(sorted(FIXED_ROTATIONS))}", rope["rope_type"])
    part = rope.get("partial_rotary_factor", 1)
    turned = config.head_dim * part if isinstance(part, int | float) else 0
    if not 1 < turned <= config.head_dim or int(turned) % 2:
        raise _unlike(f"partial_rotary_factor of an even number of {config.head_dim}", part)


def refuse_smaller_window(checkpoint: Checkpoint, longest: int) -> None:
    """Raises UserError for layers that see less than a context of `longest` tokens."""
    config = checkpoint.config.get("transformer_layer_config") or checkpoint.config
    window, types = config.get("sliding_window"), config.get("layer_types") or []
    full = isinstance(types, list) and {"full_attention"}.issuperset(map(str, types))
    uses = config.get("use_sliding_window")
    slides = (window is not None if uses is None else uses) or not full
    if slides and not (isinstance(window, int) and window >= longest):
        raise UserError(
            f"pair.draft: expected layers that see the whole context of {longest} tokens, got"
            f" sliding_window {window}, layer_types {types} in its config.json. Set"
            " pair.max_length to that or less, or give another draft"
        )


def _unlike(expected: str, value: object) -> UserError:
    return UserError(
        f"pair.draft: expected {expected} in its config.json, got {str(value)[:80]}. Give another"
        " draft"
    )


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
    """Return the names of the draft's own layers, as many as there are. Raises UserError for layers
    of another kind."""
    config: Any = checkpoint.config
    if checkpoint.format == "speculators":
        config = config.get("transformer_layer_config")
        if not isinstance(config, Mapping):
            raise UserError(
                "pair.draft: expected transformer_layer_config in its config.json, got none. Give"
                " another draft"
            )
    normed = "layers.0.self_attn.q_norm.weight" in tensors
    kind = Qwen3Config if normed else LlamaConfig
    _refuse_ignored(checkpoint, config, normed)
    ours = {"model_type", "architectures", "num_hidden_layers", "tie_word_embeddings"}
    values = {name: value for name, value in config.items() if name not in ours}
    count = len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    if (named := config.get("num_hidden_layers", count)) != count:
        raise _unlike(f"num_hidden_layers {count}, as its weights have", named)
    try:
        found = kind(**values, num_hidden_layers=count, tie_word_embeddings=False)
    except Exception as error:  # a damaged file makes it raise anything
        raise no_llama(" ".join(str(error).split())) from error
    if small := [name for name in SIZES if not (getattr(found, name) or 1) > 0]:
        raise no_llama(f"{small[0]} {getattr(found, small[0])}")
    _check_rotation(found)
    return found
