"""Fingerprints of models: what a harvest, a checkpoint or a cost table belongs to."""

import hashlib
import json
from collections.abc import Iterable
from typing import cast

import torch
from accelerate.utils import align_module_device
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from decoding.models.cached_lm import CachedLM
from decoding.models.draft_vocabulary import digest
from decoding.models.eagle.draft import EagleDraft, Reader
from decoding.models.mixed import MixedForward, mix_of


def draft_fingerprint(draft: CachedLM) -> str:
    """With another vocabulary, other maps of the target's states or another mix, a draft has other
    distributions q: what belongs to one does not belong to the other."""
    parts = [model_fingerprint(draft.model)]
    if draft.reads_target:
        parts.append(_reader_fingerprint(cast(EagleDraft, draft).maps))
    network = draft.network
    vocabulary = network.vocabulary if isinstance(network, MixedForward) else draft.vocabulary
    if vocabulary is not None:
        parts.append(digest(vocabulary))
    if (mix := mix_of(draft)) < 1:
        parts.append(f"mixed {mix}")
    return ", ".join(parts)


def _reader_fingerprint(reader: Reader) -> str:
    return digest_of([reader.described, *(str(_picked(w, 64)) for w in reader.tensors)])


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
    return digest_of(parts)


def _picked(parameter: torch.Tensor, samples: int) -> list[int]:
    if is_traceable_wrapper_subclass(parameter):  # several tensors behind one, as torchao quantises
        parameter = parameter.dequantize()
    flat = parameter.detach().reshape(-1)
    picked = flat[:: max(1, flat.numel() // samples)][:samples]
    numbers: list[int] = picked.to(torch.bfloat16).view(torch.int16).tolist()
    return numbers


def digest_of(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode())
    return digest.hexdigest()[:16]
