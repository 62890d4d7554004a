"""The pair (target, draft) that decoding works on: loading, checking and identifying it."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import align_module_device
from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.quantizers import AutoQuantizationConfig

from decoding.models.cached_lm import CachedLM
from decoding.models.draft_vocabulary import KEY as VOCABULARY
from decoding.models.draft_vocabulary import (
    digest,
    keep_rows,
    own_vocabulary,
    read_vocabulary,
    with_ends,
)
from decoding.models.eagle import EagleDraft, FeatureMaps, read_maps
from decoding.models.packing import fast_bfloat16, pack_linears
from runtime.errors import UserError
from runtime.files import checked_folder


@dataclass
class ModelPair:
    """Target, draft and the tokenizer they share. ``name`` is what tables and manifests call the
    pair."""

    target: CachedLM
    draft: CachedLM
    tokenizer: PreTrainedTokenizerBase
    name: str
    eos_ids: tuple[int, ...]


def load_pair(cfg: DictConfig) -> ModelPair:
    """Load both models of a ``conf/pair`` group after checking that they exist and share one
    vocabulary.

    Raises UserError naming ``pair.target`` or ``pair.draft`` for a missing folder, an unsupported
    architecture or different vocabularies, and ``pair.draft_vocabulary`` for a file that is not
    about this vocabulary."""
    configs = {side: _load_config(side, cfg) for side in ("target", "draft")}
    tokenizers = {side: load_tokenizer(side, cfg) for side in ("target", "draft")}
    vocab_size = min(config.get_text_config().vocab_size for config in configs.values())
    check_same_vocabulary(tokenizers["target"], tokenizers["draft"], vocab_size)
    tokens = _vocabulary(cfg, vocab_size)
    target, sizes = (
        _load_model("target", cfg),
        {"vocab_size": vocab_size, "max_length": cfg.max_length},
    )
    eos_ids = _eos_ids(target, tokenizers["target"])
    vocabulary = None if tokens is None else with_ends(tokens, eos_ids)
    target_lm, model = CachedLM(target, **sizes), _load_model("draft", cfg, vocabulary)
    maps = read_maps(Path(_source("draft", cfg)), model, target)
    options = {"vocabulary": vocabulary, **sizes}
    draft = (
        CachedLM(model, **options)
        if maps is None
        else EagleDraft(model, target_lm, maps, **options)
    )
    return ModelPair(target_lm, draft, tokenizers["target"], cfg.name, eos_ids)


def _vocabulary(cfg: DictConfig, vocab_size: int) -> torch.Tensor | None:
    """[k], the tokens the draft may propose; None: all."""
    given = cfg.get("draft_vocabulary")
    if given == "auto":
        file = own_vocabulary(_source("draft", cfg))
    else:
        file = None if given is None else checked_folder(VOCABULARY, given, "file").expanduser()
    return None if file is None else read_vocabulary(file, vocab_size)


def check_same_vocabulary(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, vocab_size: int
) -> None:
    """Refuse a pair whose tokenizers disagree on any token id, or use ids beyond the smaller
    model's ``vocab_size``.

    Output layers may be padded to different widths (Qwen2.5 does this); the unused tail is cut off.
    """
    ours, theirs = (
        {index: token for token, index in t.get_vocab().items()} for t in (target, draft)
    )
    for index in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(index), theirs.get(index)
        if a == b and index < vocab_size:
            continue
        if None in (a, b) and index < vocab_size:
            continue  # one tokenizer leaves an id unnamed: both models still have it
        raise UserError(
            f"pair.draft: its vocabulary differs from pair.target's (sizes {len(theirs)} and"
            f" {len(ours)}; token {index} is {b!r} there, {a!r} here). Choose a draft that shares"
            " the target's tokenizer."
        )


def _load_config(side: str, cfg: DictConfig) -> PreTrainedConfig:
    source = _source(side, cfg)
    try:
        return AutoConfig.from_pretrained(
            source, trust_remote_code=cfg.trust_remote_code, **_where(side, cfg)
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"pair.{side}: cannot read a model from {source} ({_first_line(error)}). {_REMEDY}"
        ) from error


def load_llama(side: str, cfg: DictConfig) -> LlamaForCausalLM:
    """One model of a ``conf/pair`` group as transformers has it, to read states of or to train.
    Raises UserError where it is missing or no Llama."""
    source = _source(side, cfg)
    try:
        device = cfg[f"{side}_device"]
        dtype = _dtype(side, cfg, device)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, device_map=device).eval()
    except (OSError, ValueError, RuntimeError, AssertionError, SafetensorError) as error:
        raise UserError(
            f"pair.{side}: cannot load {source} ({_first_line(error)}). {_REMEDY}"
        ) from error
    if not isinstance(model, LlamaForCausalLM):
        raise UserError(
            f"pair.{side}: {type(model).__name__} is no Llama model, the only kind this recipe"
            " knows"
        )
    return model


def load_tokenizer(side: str, cfg: DictConfig) -> PreTrainedTokenizerBase:
    """Raises UserError where it is missing."""
    source = _source(side, cfg)
    try:
        return AutoTokenizer.from_pretrained(
            source, trust_remote_code=cfg.trust_remote_code, **_where(side, cfg)
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"pair.{side}: no tokenizer in {source} ({_first_line(error)}). {_REMEDY}"
        ) from error


def _load_model(
    side: str, cfg: DictConfig, vocabulary: torch.Tensor | None = None
) -> PreTrainedModel:
    """vocabulary: tokens its output layer is left with; None: all."""
    model = load_plain(side, cfg)
    if not has_plain_attention(model):
        raise UserError(
            f"pair.{side}: {type(model).__name__} keeps other state than keys and values of full"
            " attention. Choose a Llama, Qwen2, Gemma, Mistral or similar model."
        )
    if vocabulary is not None:
        keep_rows(model, vocabulary)
    pack_linears(model)
    return model


def load_plain(side: str, cfg: DictConfig) -> PreTrainedModel:
    """One model of a ``conf/pair`` group as `from_pretrained` gives it. Raises UserError naming its
    key."""
    source, device_map, options = _source(side, cfg), _device_map(side, cfg), _options(side, cfg)
    device = "cpu" if _on_cpu(device_map) else str(device_map)
    remedy = f"Check pair.{side}_options={options}" if options else _REMEDY
    try:
        if isinstance(quantization := options.get("quantization_config"), dict):
            options["quantization_config"] = AutoQuantizationConfig.from_dict(quantization)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=_dtype(side, cfg, device),
            device_map=device_map,
            trust_remote_code=cfg.trust_remote_code,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, RuntimeError, ImportError, TypeError, SafetensorError) as error:
        raise UserError(
            f"pair.{side}: cannot load {source} ({_first_line(error)}). {remedy}"
        ) from error
    model, loading = loaded
    if loading["missing_keys"]:
        lost = sorted(loading["missing_keys"])
        raise UserError(
            f"pair.{side}: {source} lacks {len(lost)} weights, {lost[0]} among them. {_REMEDY}"
        )
    return model


def _device_map(side: str, cfg: DictConfig) -> Any:
    """A device, "auto" or another of the strategies of accelerate, or a device for each part of the
    model."""
    found = cfg[f"{side}_device"]
    device_map = OmegaConf.to_container(found) if isinstance(found, DictConfig) else str(found)
    if not _on_cpu(device_map) and not torch.accelerator.is_available():
        raise UserError(
            f"pair.{side}_device: {found} needs a GPU and there is none here. Set"
            f" pair.{side}_device=cpu"
        )
    return device_map


def _on_cpu(device_map: Any) -> bool:
    return set(device_map.values() if isinstance(device_map, dict) else [device_map]) <= {
        "cpu",
        "disk",
    }


def _options(side: str, cfg: DictConfig) -> dict[str, Any]:
    """Further keyword arguments of `from_pretrained`. Raises UserError for those that have a key of
    their own."""
    options: Any = OmegaConf.to_container(
        cfg.get(f"{side}_options") or OmegaConf.create(), resolve=True
    )
    for name, key in _OWN_KEYS.items():
        if name in options:
            raise UserError(
                f"pair.{side}_options: {name} cannot be given there. {key.format(side=side)}"
            )
    return dict(options)


_OWN_KEYS = {
    "device_map": "Set pair.{side}_device",
    "dtype": "Set pair.{side}_dtype",
    "torch_dtype": "Set pair.{side}_dtype",
    "trust_remote_code": "Set pair.trust_remote_code",
    "attn_implementation": "Leave it out: the caches here need their own attention",
    "output_loading_info": "Leave it out",
}


def _where(side: str, cfg: DictConfig) -> dict[str, Any]:
    """The options that say which file or revision is meant, for config and tokenizer as well."""
    options = _options(side, cfg)
    return {
        name: options[name] for name in ("gguf_file", "revision", "subfolder") if name in options
    }


def has_plain_attention(model: PreTrainedModel) -> bool:
    """Whether every layer is attention behind the transformers interface, full or with a sliding
    window."""
    layer_types = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    known = layer_types <= {"full_attention", "sliding_attention"}
    return known and model._supports_attention_backend and not model._is_stateful


_REMEDY = (
    "Run `python scripts/build_pair.py` for the embedded pair, or give a hub id or an existing"
    " folder."
)


def _source(side: str, cfg: DictConfig) -> str:
    """The folder or hub id of one side; a path that does not exist is refused before the hub is
    asked."""
    source = str(cfg[side])
    path = Path(source).expanduser()
    looks_like_path = source.startswith(("~", ".", "/")) or source.count("/") > 1
    where = _where(side, cfg)
    if (
        looks_like_path
        and not (
            path / where.get("subfolder", "") / where.get("gguf_file", "config.json")
        ).is_file()
    ):
        raise UserError(f"pair.{side}: no model in {source}. {_REMEDY}")
    return str(path) if path.exists() else source


def _dtype(side: str, cfg: DictConfig, device: str) -> torch.dtype | str:
    name = cfg[f"{side}_dtype"]
    stored = (
        _load_config(side, cfg).get_text_config().dtype
        if name == "auto" and device == "cpu"
        else None
    )
    return resolve_dtype(name, device, stored)


def resolve_dtype(
    name: str, device: str, stored: torch.dtype | str | None = None
) -> torch.dtype | str:
    """``auto`` is the dtype of the files; on a CPU only where that is bfloat16 and the processor
    multiplies it, else float32. Other names are torch dtypes. stored: what the files have; None:
    not known.

    What depends on it (a harvest's plan, costs, thresholds, results) records what it became, not
    "auto"."""
    if name == "auto":
        if device != "cpu":
            return "auto"
        return (
            torch.bfloat16
            if stored in (torch.bfloat16, "bfloat16") and fast_bfloat16()
            else torch.float32
        )
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(
            f"pair.dtype: {name} is not a torch dtype. Use auto, float32, bfloat16 or float16."
        )
    return dtype


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a response: the generation config's, the model config's and the
    tokenizer's."""
    found: set[int] = set()
    for value in (
        model.generation_config.eos_token_id,
        model.config.eos_token_id,
        tokenizer.eos_token_id,
    ):
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(found))


def pair_identity(pair: ModelPair) -> dict[str, Any]:
    """What a harvest or a checkpoint belongs to: the pair's name and a content fingerprint of each
    model.

    The fingerprint does not depend on where the files lie or on the dtype they were loaded in.
    """
    return {
        "name": pair.name,
        "target": model_fingerprint(pair.target.model),
        "draft": _draft_identity(pair.draft),
        "tokenizer": _digest([json.dumps(sorted(pair.tokenizer.get_vocab().items()))]),
    }


def _draft_identity(draft: CachedLM) -> str:
    """With another vocabulary, or other maps of the target's states, a draft has other
    distributions q: what belongs to one does not belong to the other."""
    parts = [model_fingerprint(draft.model)]
    if isinstance(draft, EagleDraft):
        parts.append(_maps_fingerprint(draft.maps))
    if draft.vocabulary is not None:
        parts.append(digest(draft.vocabulary))
    return ", ".join(parts)


def _maps_fingerprint(maps: FeatureMaps) -> str:
    picked = [str(_picked(weights, 64)) for weights in (maps.from_states, maps.from_own)]
    return _digest([json.dumps(maps.layers), *picked])


def model_fingerprint(model: PreTrainedModel, samples: int = 64) -> str:
    """Hash of the architecture fields and of up to ``samples`` evenly spaced entries of every
    parameter (as bf16)."""
    skipped = {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures"}
    fields = {k: v for k, v in model.config.to_dict().items() if k not in skipped}
    parts = [json.dumps(fields, sort_keys=True, default=str)]
    for name in sorted(name for name, _ in model.named_parameters()):
        parent, _, attribute = name.rpartition(".")
        module = model.get_submodule(parent)
        with align_module_device(module):  # what is kept in CPU memory or on disk is read
            parameter = getattr(module, attribute)
            parts.append(f"{name}{tuple(parameter.shape)}{_picked(parameter, samples)}")
    return _digest(parts)


def _picked(parameter: torch.Tensor, samples: int) -> list[int]:
    if is_traceable_wrapper_subclass(parameter):  # several tensors behind one, as torchao quantises
        parameter = parameter.dequantize()
    flat = parameter.detach().reshape(-1)
    picked = flat[:: max(1, flat.numel() // samples)][:samples]
    numbers: list[int] = picked.to(torch.bfloat16).view(torch.int16).tolist()
    return numbers


def _digest(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode())
    return digest.hexdigest()[:16]
