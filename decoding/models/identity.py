"""Fingerprints of models, by which harvests, checkpoints and cost tables know their pair.

Every value that takes part in the computation is hashed on its device: parameters and buffers,
frequencies of rotary embeddings, adapters. The hash of a chunk of 32-bit words x_i is the sum of
a_i x_i modulo 2^64 with fixed random a_i (multilinear hashing): the same on every device, and
3 GB/s on a processor's core, so that no hash is cached, which might be out of date."""

import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, cast

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.modules import module as every_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from decoding.models.cached_lm import CachedLM
from decoding.models.cpu_llama import FIXED_ROTATIONS
from decoding.models.draft_vocabulary import digest
from decoding.models.eagle.draft import EagleDraft
from decoding.models.mixed import MixedForward, mix_of

WORDS = 1 << 15  # of 32 bits in a chunk
CHUNK = 4 * WORDS  # bytes
# Keys of a configuration about a model's origin and execution, not about what it computes
SKIPPED = {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures"}
UNSTATED = {"base_model_name_or_path", "inference_mode", "revision", "peft_version", "auto_mapping"}
LIBRARIES = {"torch", "transformers", "accelerate", "peft"}  # their own hooks do not alter a model
# Libraries whose classes are described by their values: other kernels compute the same numbers
CODE = LIBRARIES | {"decoding", "transformers_modules", "fla", "mamba_ssm", "liger_kernel"}


def draft_fingerprint(draft: CachedLM) -> str:
    """Return the fingerprint of all that decides the draft's q: its model and, if it has them, its
    vocabulary, its maps of the target's states and its mix."""
    parts = [model_fingerprint(draft.model)]
    if draft.reads_target:
        maps = cast(EagleDraft, draft).maps
        parts.append(digest_of([maps.described, *map(content, maps.tensors)]))
    network = draft.network
    vocabulary = network.vocabulary if isinstance(network, MixedForward) else draft.vocabulary
    if vocabulary is not None:
        parts.append(digest(vocabulary))
    if (mix := mix_of(draft)) < 1:
        parts.append(f"mixed {mix}")
    return ", ".join(parts)


def model_fingerprint(model: PreTrainedModel) -> str:
    """Return the hash of the architecture's fields and of every value that the model computes with,
    the same for each device and floating-point dtype (floating-point values are hashed as bfloat16,
    others by their bytes).

    Functions run by hooks, patched `forward` methods and modules of other libraries are named after
    the hash, which covers only their source, constants, and the numbers and tensors that they hold,
    not the functions that they call.
    """
    fields = {k: v for k, v in model.config.to_dict().items() if k not in SKIPPED}
    adapters = {
        name: {k: v for k, v in config.to_dict().items() if v and k not in UNSTATED}
        for name, config in getattr(model, "peft_config", {}).items()
    }
    parts = [json.dumps(part, sort_keys=True, default=_plain) for part in (fields, adapters)]
    shared_once = {name for name, _ in model.named_parameters()}
    functions, runs = set(), []  # runs keep their order
    before, after = every_module._global_forward_pre_hooks, every_module._global_forward_hooks
    everywhere = [("before all", hook) for hook in before.values()]
    everywhere += [("after all", hook) for hook in after.values()]
    # Quantising libraries use another class on each device; the layers' values are hashed instead.
    quantised = getattr(model.config, "quantization_config", None) is not None
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        left_out = {n for n in module._parameters if f"{prefix}{n}" not in shared_once}
        with align_module_device(module):  # loads weights that are kept in CPU memory or on disk
            held = {f"{prefix}{n}": x for n, x in _values(module).items() if n not in left_out}
            parts += [f"{name}{tuple(x.shape)}{content(x)}" for name, x in sorted(held.items())]
        parts += _settings(path, module, model.config.get_text_config())
        own_class = () if quantised else _of_class(module)
        for when, function in [*_foreign(module), *own_class, *([] if path else everywhere)]:
            name, numbers = _function(function)
            functions.add(name)
            runs.append(f"{path} {when} {name} {numbers}")
    names = f", hooked {' '.join(sorted(functions))}" if functions else ""
    return f"whole {digest_of([*sorted(parts), *runs])}{names}"


def content(tensor: Tensor) -> str:
    """Return the hash of all values of a tensor of any shape and device, 16 hexadecimal digits."""
    if is_traceable_wrapper_subclass(tensor) or tensor.is_quantized:
        tensor = tensor.dequantize()  # a torchao tensor that wraps several
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    packed = str(flat.dtype).endswith("x2")  # two numbers in a byte
    dtype = torch.bfloat16 if flat.is_floating_point() and not packed else flat.dtype
    chunks = 4 if flat.device.type == "cpu" else 1024  # at a time: on a CPU as many as fit a cache
    factors = _factors(flat.device)
    sums = []
    for part in flat.split(chunks * CHUNK // dtype.itemsize):
        raw = part.to(dtype).contiguous().view(torch.uint8)
        raw = pad(raw, (0, -len(raw) % CHUNK)) if len(raw) % CHUNK else raw
        raw = raw.clone() if raw.storage_offset() % 4 else raw
        words = raw.view(torch.int32).reshape(len(raw) // CHUNK, WORDS)
        sums.append((words * factors).sum(1))
    return digest_of([str(dtype), str(torch.cat(sums).tolist())])


@functools.lru_cache(maxsize=8)
def _factors(device: torch.device) -> Tensor:
    """Return the factors a_i, [WORDS] int64."""
    random = hashlib.shake_256(b"factors of a chunk").digest(8 * WORDS)
    return torch.frombuffer(bytearray(random), dtype=torch.int64).to(device)


def _values(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own values: those in a state dict, and other buffers except those that
    change as texts get longer."""
    held: dict[str, Any] = {}
    module._save_to_state_dict(held, "", keep_vars=True)
    held = {name: x for name, x in held.items() if isinstance(x, Tensor)}
    for name, buffer in module._buffers.items():
        kept = not name.endswith(("original_inv_freq", "long_inv_freq", "_cached"))
        if buffer is not None and kept:
            held[name] = buffer
            if name.endswith("inv_freq"):
                kind = getattr(module, "rope_type", "default")
                kind = kind.get(name[: -len("_inv_freq")]) if isinstance(kind, dict) else kind
                if kind not in FIXED_ROTATIONS:  # angles depend on the length of a text
                    first = name.removesuffix("inv_freq") + "original_inv_freq"
                    held[name] = getattr(module, first, buffer)
    return held


def _settings(path: str, module: nn.Module, config: Any) -> list[str]:
    """Return the settings that a module computes with (of norms, attention, embeddings, rotary
    embeddings and adapters) and that neither its class nor the configuration determines."""
    size = vars(module).get("head_dim")
    usual = {
        "variance_epsilon": getattr(config, "rms_norm_eps", None),
        "scaling": size and size**-0.5,
        "max_norm": None,
    }
    settings = {n: x for n, x in vars(module).items() if n.endswith("attention_scaling")}
    settings |= {n: x for n, x in vars(module).items() if n in usual and x != usual[n]}
    if hasattr(module, "merged_adapters"):  # a layer of peft
        for name in ("active_adapters", "merged_adapters", "disable_adapters", "scaling"):
            settings[name] = getattr(module, name, None)
    if parametrized := getattr(module, "parametrizations", None):
        settings["parametrizations"] = [type(x).__qualname__ for x in parametrized.modules()]
    return [f"{path} {json.dumps(settings, sort_keys=True, default=_plain)}"] if settings else []


def _foreign(module: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the functions that were attached to the module's forward, and when they run: hooks, and
    forwards that are not its class's."""
    for when, hooks in (("before", module._forward_pre_hooks), ("after", module._forward_hooks)):
        yield from ((when, hook) for hook in hooks.values() if _library(hook) not in LIBRARIES)
    for name in ("forward", "_old_forward"):  # the second is what a hook of accelerate wraps
        given = vars(module).get(name)
        given = getattr(given, "_torchdynamo_orig_callable", given)  # compiled
        same = getattr(given, "__func__", given) is type(module).forward
        if given is not None and not same and _library(given) != "accelerate":
            yield name, given


def _of_class(module: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the forward of a class from outside the model libraries, and the numbers it may
    read."""
    kind = type(module)
    if not {_library(kind), _library(kind.forward)} <= CODE:
        held = ((n, x) for n, x in vars(module).items() if not n.startswith("_"))
        numbers = [f"{n}={x}" for n, x in held if isinstance(x, int | float) and n != "training"]
        yield " ".join(numbers), kind.forward


def _library(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    where = function if hasattr(function, "__qualname__") else type(function)
    return str(where.__module__).partition(".")[0]


def _function(function: Any) -> tuple[str, list[str]]:
    """Return the name of a function, and the numbers and tensors that it holds."""
    held: list[Any] = []
    while isinstance(function, functools.partial):
        held += [*function.args, *function.keywords.values()]
        function = function.func
    if inspect.ismethod(function):
        owner, function = function.__self__, function.__func__
        held += [] if isinstance(owner, nn.Module | type) else vars(owner).values()
    elif not inspect.isfunction(function) and not isinstance(function, nn.Module):
        held += getattr(function, "__dict__", {}).values()
    source = ""
    with suppress(OSError, TypeError):  # its source is not available
        source = inspect.getsource(function if inspect.isfunction(function) else type(function))
    if inspect.isfunction(function):
        with suppress(ValueError):  # of a cell that is empty yet
            outer = inspect.getclosurevars(function)
            held += [*outer.nonlocals.values(), *outer.globals.values()]
        held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        held += [x for x in function.__code__.co_consts if isinstance(x, float)]
    else:
        function = type(function)
    seen = set[int]()
    for value in held:  # grows
        if isinstance(value, list | tuple | dict) and id(value) not in seen:
            seen.add(id(value))
            held += [*value, *value.values()] if isinstance(value, dict) else value
    tensors = [content(x) for x in held if isinstance(x, Tensor) and not x.is_meta]
    numbers = [repr(x) for x in held if isinstance(x, bool | int | float)]
    return f"{function.__module__}.{function.__qualname__}", [source, *tensors, *numbers]


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it; sets are sorted, since their order changes."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def digest_of(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode())
    return digest.hexdigest()[:16]
