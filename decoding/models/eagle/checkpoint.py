"""Loading a published EAGLE draft from its files, for a target that is loaded.

The files themselves tell their format: speculators' (`speculators_model_type`), the flat ones of
SafeAILab and SpecForge (`midlayer.*`), or EAGLE-1 (`fc.weight` before ordinary layers). Their
content becomes a `Flavour` and tensors under one set of names; tensors that they leave out
(embeddings, the output layer) are the target's."""

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.utils.hub import cached_file

from decoding.models.cached_lm import CachedLM
from decoding.models.cpu_llama import FIXED_ROTATIONS
from decoding.models.eagle.published import Flavour, PublishedDraft, PublishedModel, rotary_of
from decoding.models.options import (
    device_map_of,
    first_line,
    on_cpu,
    options_of,
    resolve_dtype,
    source_of,
    where_of,
)
from decoding.models.packing import pack_linears
from decoding.settings import ModelSettings
from runtime.errors import UserError

KIND = "speculators_model_type"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
IDS = "eagle_aux_hidden_state_layer_ids"
UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")  # redundant tensors
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
# Keys that say how a layer computes, beyond what its weights show.
COMPUTES = re.compile(
    r"scal|multiplier|capping|soft_?cap|norm|clip|swiglu|alibi|parallel_residual|chunk|interleave"
    r"|rotary|rope_pct|no_rope|rope_local|temperature_tuning|dim_model_base|mup"
)
HONOURED = {"rms_norm_eps", "rope_scaling", "partial_rotary_factor", "norm_topk_prob"}
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
WHOLE = (torch.int64, torch.int32, torch.int16)
PLAIN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
UNREADABLE = (
    SafetensorError,
    pickle.UnpicklingError,
    OSError,
    EOFError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
Format = Literal["speculators", "flat", "eagle1"]
AGAIN = "Download it again, or give another draft"
OTHER = "Give a draft that was trained for pair.target"


def _refused(expected: str, got: object, remedy: str = "Give another draft") -> UserError:
    return UserError(f"pair.draft: expected {expected}, got {got}. {remedy}")


def _unlike(expected: str, value: object) -> UserError:
    return _refused(f"{expected} in its config.json", str(value)[:80])


def _no_llama(reason: str) -> UserError:
    return UserError(
        f"pair.draft: its config.json is none of a Llama's ({reason[:160]}). Give another draft"
    )


@dataclass(frozen=True)
class Checkpoint:
    """format: how `config` and the tensors in `weights` are to be read."""

    format: Format
    config: Mapping[str, Any]
    weights: Path

    @property
    def layer(self) -> Mapping[str, Any]:
        """The part of the configuration that describes the layers, with the keys of a Llama's."""
        layer = self.config.get("transformer_layer_config")
        return layer if layer and isinstance(layer, Mapping) else self.config


def find_checkpoint(draft: ModelSettings) -> Checkpoint | None:
    """Return the draft of a pair if it is a published EAGLE draft, else None.

    Raises UserError if its configuration says so but its weights do not or are damaged, and for a
    speculator of another kind."""
    where, source = where_of(draft), source_of(draft)
    if "gguf_file" in where:
        return None
    try:
        config, _ = PreTrainedConfig.get_config_dict(source, **where)
    except (OSError, ValueError, TypeError):
        return None  # the general loading of drafts reports errors here
    if not isinstance(config, dict):
        return None
    if (kind := config.get(KIND, "eagle3")) != "eagle3":
        got = f"{kind!r} in {source}"
        raise _refused("a speculator of kind eagle3", got, "Give an EAGLE-3 draft")
    named = KIND in config or "eagle3" in str(config.get("architectures")).lower()
    weights = _weights(source, where)
    if weights is None:
        if named:
            files = f"model.safetensors or pytorch_model.bin in {source}"
            raise _refused(files, "neither", AGAIN)
        return None
    format = "speculators" if KIND in config else _format_of(weights, named)
    if format is None and named:
        expected = "weights of an EAGLE draft, as its config.json says"
        raise _refused(expected, f"others in {weights}", AGAIN)
    return None if format is None else Checkpoint(format, config, weights)


def _format_of(weights: Path, named: bool) -> Format | None:
    """Return the format of weights beside a flat configuration, by their names; None if they are
    not of an EAGLE draft. Damaged weights are refused here if their configuration has `named` them
    one, else by the general loading of drafts."""
    try:
        if weights.suffix == ".safetensors":
            with safe_open(weights, "pt") as file:
                names = set(file.keys())
        else:
            names = set(_unpickled(weights, mmap=True))
    except UNREADABLE as error:
        if named:
            raise _damaged(weights, error) from error
        return None
    if any(name.startswith("midlayer.") for name in names):
        return "flat"
    if not {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names:
        return None
    return "flat" if "layers.0.hidden_norm.weight" in names else "eagle1"


def _weights(source: str, where: Mapping[str, Any]) -> Path | None:
    """Return the file of weights; None if there is none, or there are several."""
    quiet = {
        f"_raise_exceptions_for_{what}": False
        for what in ("gated_repo", "missing_entries", "connection_errors")
    }
    for name in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"):
        try:
            path = cached_file(source, name, **where, **quiet)
        except (OSError, ValueError):
            return None
        if path is not None:
            return None if name.endswith(".json") else Path(path)
    return None


def _unpickled(weights: Path, mmap: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a pickled file. mmap: read only tensors that are accessed, if the
    file's format allows it."""
    with open(weights, "rb") as file:
        zipped = file.read(2) == b"PK"
    state = torch.load(weights, "cpu", weights_only=True, mmap=mmap and zipped)
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(x, Tensor) for name, x in state.items()
    ):
        raise TypeError("it holds other things than tensors")
    return state


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"pair.draft: {path} is damaged ({first_line(error)}). {AGAIN}")


def load_published(
    checkpoint: Checkpoint, settings: ModelSettings, target: CachedLM
) -> PublishedDraft:
    """Load the draft of a pair.

    Raises UserError for damaged files, and for a draft of another target."""
    if more := sorted(options_of(settings).keys() - where_of(settings).keys()):
        raise UserError(
            f"pair.draft_options: expected none for an EAGLE draft, got {more[0]}. Leave it away"
        )
    _refuse_smaller_window(checkpoint.layer, target.max_length)
    tensors = _tensors(checkpoint.weights)
    flavour = _flavour(checkpoint, tensors, target.hidden_states - 1)
    config = _layer_config(checkpoint, tensors)
    _add_shared(tensors, checkpoint, config, target)
    tokens = len(tensors["lm_head.weight"])
    vocabulary = _vocabulary(tensors.pop("d2t", None), tokens, config.vocab_size)
    try:
        with torch.device("meta"):
            width = target.model.config.get_text_config().hidden_size
            model = PublishedModel(config, flavour, tokens, width)
    except (RuntimeError, ValueError, ArithmeticError, TypeError) as error:
        raise _no_llama(first_line(error)) from error
    wanted = {name: list(x.shape) for name, x in model.state_dict().items()}
    shapes = {name: list(x.shape) for name, x in tensors.items()}
    for name in sorted(wanted.keys() | shapes.keys()):
        if wanted.get(name) != shapes.get(name):
            expected = f"{name} of shape {wanted.get(name)} for pair.target"
            raise _refused(expected, f"{shapes.get(name)} in {checkpoint.weights}", OTHER)
    asked: Any = device_map_of(settings)  # one device; the target's where several are asked for
    if on_cpu(asked):
        device = torch.device("cpu")
    elif isinstance(asked, str) and not asked.startswith(("auto", "balanced", "sequential")):
        device = torch.device(asked)
    else:
        device = target.device
    dtype = resolve_dtype(settings.dtype, device.type, tensors["fc.weight"].dtype)
    model.load_state_dict({n: x.to(device, dtype) for n, x in tensors.items()}, assign=True)
    model.rotary_emb = rotary_of(config).to(device)
    pack_linears(model.requires_grad_(False))
    sizes = {"vocab_size": target.vocab_size, "max_length": settings.max_length}
    return PublishedDraft(model, target, **sizes, vocabulary=vocabulary)


def _tensors(weights: Path) -> dict[str, Tensor]:
    """Return the tensors of the file under the names of `PublishedModel`, and d2t, without unused
    ones. Raises UserError if it is damaged or holds other tensors or weights that are not plain
    numbers (quantised, say)."""
    try:
        state = load_file(weights) if weights.suffix == ".safetensors" else _unpickled(weights)
    except UNREADABLE as error:
        raise _damaged(weights, error) from error
    tensors = {
        name.replace("midlayer.", "layers.0.", 1): tensor
        for name, tensor in state.items()
        if name not in UNUSED and not name.endswith("inv_freq")
    }
    for name, tensor in tensors.items():
        if name != "d2t" and (tensor.dtype not in PLAIN or not tensor.ndim):
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise _refused(
                f"{name} in bfloat16, float16 or float32",
                f"{dtype} of shape {list(tensor.shape)} in {weights}",
                "Give a draft that is not quantised",
            )
    return tensors


def _flavour(checkpoint: Checkpoint, tensors: Mapping[str, Tensor], depth: int) -> Flavour:
    """Return the flavour of a checkpoint. depth: layers of the target. Raises UserError for layers
    that it does not have."""
    config = checkpoint.config
    if checkpoint.format == "eagle1":
        return Flavour(final_norm=False, fc_bias="fc.bias" in tensors)
    flags = dict[str, bool]()
    for name in FLAGS:
        value = config.get(name)
        if not isinstance(value, bool | None):
            raise _refused(f"{name} to be true or false in its config.json", repr(value))
        flags[name] = bool(value)
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise _refused("norm_before_fc or fc_norm in its config.json", "both")
    nested = config.get("eagle_config")
    # The hidden states that enter these layers; SpecForge names the layers that give them, one
    # before.
    layers, first = config.get(IDS) or None, 0
    if layers is None and isinstance(nested, Mapping):
        layers, first = nested.get(IDS), 1
    if layers is None:
        layers, first = [2, depth // 2, depth - 3], 0
    possible = range(-first, depth - first)
    if not isinstance(layers, list) or not all(type(x) is int and x in possible for x in layers):
        expected = f"{IDS} from {possible[0]} to {possible[-1]}, as pair.target has layers"
        raise _refused(expected, layers, "Give a draft for this target")
    joined = tuple(layer + first for layer in layers)
    if checkpoint.format == "speculators":
        return Flavour(joined, **flags)
    # SpecForge feeds back the states before the norm; `norm_output` false leaves the norm out.
    final_norm = config.get("norm_output") is not False
    return Flavour(joined, **(flags | {"norm_output": False}), final_norm=final_norm)


def _layer_config(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> Any:
    """Return the configuration of the draft's own layers, as many as there are. Raises UserError
    for layers of another kind, for positions that change with the length of a text, and for parts
    of a head that cannot be rotated."""
    config: Any = checkpoint.config
    if checkpoint.format == "speculators":
        config = config.get("transformer_layer_config")
        if not isinstance(config, Mapping):
            raise _refused("transformer_layer_config in its config.json", "none")
    normed = "layers.0.self_attn.q_norm.weight" in tensors
    _refuse_ignored(checkpoint, config, normed)
    ours = {"model_type", "architectures", "num_hidden_layers", "tie_word_embeddings"}
    values = {name: value for name, value in config.items() if name not in ours}
    count = len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    if (named := config.get("num_hidden_layers", count)) != count:
        raise _unlike(f"num_hidden_layers {count}, as its weights have", named)
    try:
        kind: Any = Qwen3Config if normed else LlamaConfig
        made = kind(**values, num_hidden_layers=count, tie_word_embeddings=False)
    except Exception as error:  # a damaged file makes it raise anything
        raise _no_llama(" ".join(str(error).split())) from error
    if small := [name for name in SIZES if not (getattr(made, name) or 1) > 0]:
        raise _no_llama(f"{small[0]} {getattr(made, small[0])}")
    rope = made.rope_parameters
    if rope["rope_type"] not in FIXED_ROTATIONS:
        raise _unlike(f"a rope_type of {', '.join(sorted(FIXED_ROTATIONS))}", rope["rope_type"])
    part = rope.get("partial_rotary_factor", 1)
    turned = made.head_dim * part if isinstance(part, int | float) else 0
    if not 1 < turned <= made.head_dim or int(turned) % 2:
        raise _unlike(f"partial_rotary_factor of an even number of {made.head_dim}", part)
    return made


def _refuse_ignored(checkpoint: Checkpoint, layer: Mapping[str, Any], normed: bool) -> None:
    """Raise UserError for settings of the configuration that the layers here do not implement.
    normed: queries and keys have norms."""
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
        other = "rope_scaling" if older else "rope_theta"
        raise _unlike("rope_parameters alone", f"other values in {other}")


def _refuse_smaller_window(layer: Mapping[str, Any], longest: int) -> None:
    """Raise UserError for layers that see less than a context of `longest` tokens."""
    window, types = layer.get("sliding_window"), layer.get("layer_types") or []
    full = isinstance(types, list) and {"full_attention"}.issuperset(map(str, types))
    uses = layer.get("use_sliding_window")
    slides = (window is not None if uses is None else uses) or not full
    if slides and not (isinstance(window, int) and window >= longest):
        raise _refused(
            f"layers that see the whole context of {longest} tokens",
            f"sliding_window {window}, layer_types {types} in its config.json",
            "Set pair.max_length to that or less, or give another draft",
        )


def _add_shared(
    tensors: dict[str, Tensor], checkpoint: Checkpoint, config: Any, target: CachedLM
) -> None:
    """Add the tensors that the file leaves out from the target. Raises UserError if the target has
    another vocabulary or another size, and if the configuration ties the output layer to embeddings
    that are not the target's: a draft without its own output layer has the target's."""
    embeddings = target.model.get_input_embeddings().weight.detach()
    own = tensors.get("embed_tokens.weight")
    tied = checkpoint.layer.get("tie_word_embeddings") and "lm_head.weight" not in tensors
    if tied and own is not None:
        same = own.shape == embeddings.shape
        if not same or not torch.allclose(own.to(embeddings), embeddings, rtol=1e-2):
            expected = "tie_word_embeddings false in its config.json, or the embeddings of"
            raise _refused(f"{expected} pair.target", "true and others")
    wanted = target.model.config.get_text_config().vocab_size
    if config.vocab_size != wanted:
        expected = f"vocab_size {wanted}, as of pair.target"
        raise _refused(expected, config.vocab_size, OTHER)
    output = target.model.get_output_embeddings().weight.detach()
    for name, weight in {"embed_tokens.weight": embeddings, "lm_head.weight": output}.items():
        if name not in tensors and weight.shape[1] != config.hidden_size:
            expected = f"hidden_size {weight.shape[1]}, as of pair.target, for it has no {name}"
            raise _refused(expected, config.hidden_size, OTHER)
        tensors.setdefault(name, weight)


def _vocabulary(offsets: Tensor | None, count: int, size: int) -> Tensor | None:
    """Return the target's tokens of the output layer, [k], from d2t; None: all.

    Raises UserError if they are not the target's."""
    if offsets is None:
        if count != size:
            has = f"d2t, for its output layer has {count} tokens and its target {size}"
            raise _refused(has, "none")
        return None
    if offsets.shape != (count,) or offsets.dtype not in WHOLE:
        got = f"{offsets.dtype} of shape {list(offsets.shape)}"
        raise _refused(f"d2t with {count} whole numbers", got)
    tokens = offsets.long() + torch.arange(count)
    if len(tokens.unique()) < count or int(tokens.min()) < 0 or int(tokens.max()) >= size:
        expected = f"d2t to name {count} different tokens from 0 to {size - 1}"
        raise _refused(expected, "others")
    return tokens
