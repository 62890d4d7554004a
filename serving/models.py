"""A model of plain transformers code and a draft for it, prepared for our engines.

The model itself is never changed: the engines run a view of it, with the same weights and its own
config. Each call has its own caches, so that any number of threads may generate at once."""

import copy
import sys
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property, partial
from os.path import expanduser
from pathlib import Path
from threading import RLock
from types import MethodType
from typing import Any

from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel

from decoding.models.cached_lm import CachedLM
from decoding.models.context import steady_length
from decoding.models.draft_vocabulary import with_ends
from decoding.models.eagle.checkpoint import find_checkpoint
from decoding.models.ends import end_ids
from decoding.models.identity import draft_fingerprint
from decoding.models.loading import ModelPair, check_same_vocabulary, draft_tokens, load_draft
from decoding.models.options import load_config
from decoding.models.recurrent import cached
from decoding.models.support import refuse_other_layers, text_part
from decoding.pair import pair_settings
from decoding.settings import Pair
from runtime.errors import UserError

SLOT = "_speculative"  # attribute of a model that holds its `Kept`
DRAFTS = 4  # drafts from folders that a target keeps: those used last
Draft = PreTrainedModel | str | Path | ModelPair
_making = RLock()


@dataclass(eq=False)
class Ready:
    """A model prepared for engines. It is not run itself: each call takes a `fresh` copy."""

    lm: CachedLM

    @cached_property
    def fingerprint(self) -> str:
        return draft_fingerprint(self.lm)


class Kept:
    """The prepared objects that a model keeps: its own view, as of `state`, and drafts from
    folders. With the model, an empty dict is copied and saved instead."""

    def __init__(self, ready: Ready, state: object) -> None:
        self.ready, self.state = ready, state
        self.drafts = OrderedDict[str, Ready]()
        self.compared = set[str]()  # folders of drafts with the same tokenizer as the model

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return dict, ()


@dataclass
class SpeculativePair:
    """Target and draft of one call. identity: that of the pair, which a predictor's must match,
    computed when it is asked for."""

    target: CachedLM
    draft: CachedLM
    sides: tuple[Ready, Ready]

    @property
    def identity(self) -> dict[str, str]:
        target, draft = self.sides
        return {"target": target.fingerprint, "draft": draft.fingerprint}


def opened(model: PreTrainedModel, draft: Draft) -> SpeculativePair:
    """Prepare model and draft, or reuse the preparation of an earlier call if neither has changed;
    caches are new.

    The models' layers are left as they are; only those of `decoding.pair.open_pair` are packed,
    which is faster on a CPU.

    Raises UserError for models that do not go together or that our engines cannot run."""
    if isinstance(draft, ModelPair):
        if draft.target.model is not model:
            raise UserError(
                "draft: this pair has another target than the model that generates. Write"
                " pair.target.model.generate(..., draft=pair)"
            )
        sides = vars(draft).get(SLOT)
        if sides is None or sides[0].lm is not draft.target or sides[1].lm is not draft.draft:
            sides = vars(draft)[SLOT] = Ready(draft.target), Ready(draft.draft)
    else:
        with _making:
            sides = _made(model, draft)
    target = sides[0].lm.fresh()
    pair = SpeculativePair(target, sides[1].lm.fresh(target), sides)
    size = target.model.config.get_text_config().vocab_size
    target.vocab_size = pair.draft.vocab_size = size  # all tokens that `generate` may sample
    return pair


def _made(model: PreTrainedModel, draft: PreTrainedModel | str | Path) -> tuple[Ready, Ready]:
    target, kept = _ready("model", model), vars(model)[SLOT]
    named = draft.name_or_path if isinstance(draft, PreTrainedModel) else draft
    source = expanduser(str(named or ""))
    if source not in kept.compared:  # if both have a tokenizer in their folders
        tokenizers = [_tokenizer(folder) for folder in (model.name_or_path, source)]
        if None not in tokenizers and not find_checkpoint(_settings(model, source).model("draft")):
            check_same_vocabulary(tokenizers[0], tokenizers[1], sys.maxsize, "draft")
        kept.compared.add(source)
    if isinstance(draft, PreTrainedModel):
        return target, _ready("draft", draft)
    if source not in kept.drafts:
        kept.drafts[source] = Ready(_loaded(source, target.lm))
    kept.drafts.move_to_end(source)
    while len(kept.drafts) > DRAFTS:
        kept.drafts.popitem(last=False)
    return target, kept.drafts[source]


def _ready(key: str, model: PreTrainedModel) -> Ready:
    """Return the prepared model, prepared again if anything has changed since the last time."""
    kept, state = vars(model).get(SLOT), state_of(model)
    if isinstance(kept, Kept) and kept.state == state:
        return kept.ready
    if not hasattr(model, "hf_device_map") and any(part.is_meta for part in model.parameters()):
        raise UserError(
            f"{key}: expected weights, got {type(model).__name__} on the meta device, where there"
            " are none. Load it with from_pretrained"
        )
    part = text_part(key, view(model))
    refuse_other_layers(key, part)
    ready = Ready(cached(part, max_length=steady_length(part.config), joins=False))
    vars(model)[SLOT] = Kept(ready, state)
    return ready


def view(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model with the same weights, buffers and hooks, but its own config, modes and later
    registrations. Patched forwards are kept if they are methods, not closures."""
    modules = list(model.modules())
    inside = set(map(id, modules))

    def moves(value: Any) -> bool:
        if isinstance(value, MethodType):
            return id(value.__self__) in inside
        if isinstance(value, partial):
            return any(moves(part) for part in (value.func, *value.args))
        if isinstance(value, list | tuple):
            return any(moves(part) for part in value)
        return id(value) in inside or isinstance(value, PreTrainedConfig | Kept)

    shared: dict[int, Any] = {}
    for module in modules:
        for value in list(vars(module).values()):
            parts = value.values() if isinstance(value, dict) else [value]
            shared.update((id(part), part) for part in parts if not moves(part))
    return copy.deepcopy(model, shared)


def state_of(model: PreTrainedModel) -> object:
    """Return a value that changes with the config and with the modules' hooks, patched methods,
    tensors (except for writes that autograd does not track) and numbers; not with train and
    eval."""
    parts: list[Any] = [model.config.to_dict()]
    for module in model.modules():
        parts += id(module), type(module)
        for name, value in list(vars(module).items()):
            empty = isinstance(value, dict) and not value
            if name not in (SLOT, "training", "config") and not empty:
                parts.append((name, _mark(value)))
    return parts


def _mark(value: Any) -> Any:
    """Return a mark that is equal for equal values of plain types and for the same object of any
    other type."""
    if isinstance(value, Tensor):
        version = 0 if value.is_inference() else value._version
        return id(value), value.device, value.dtype, _address(value), version
    if isinstance(value, dict):
        return [(key, _mark(part)) for key, part in list(value.items())]
    if isinstance(value, list | tuple | set):
        return [_mark(part) for part in list(value)]
    return value if isinstance(value, bool | int | float | str | None) else id(value)


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # several tensors behind one have none
        return 0


def _tokenizer(folder: str | None) -> Any:
    """Load the tokenizer of a folder or hub id; None if there is none, here or in the cache."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True) if folder else None
    except Exception:  # other files make it raise anything
        return None


def _settings(model: PreTrainedModel, source: str) -> Pair:
    return pair_settings(target=model.name_or_path, draft=source)


def _loaded(source: str, target: CachedLM) -> CachedLM:
    """Load a draft of any kind from its folder or hub id, for texts up to the length at which its
    rotations begin to depend on their length."""
    settings = _settings(target.model, source)
    settings.draft_device, settings.max_length = str(target.device), target.max_length
    draft = settings.model("draft")
    if not find_checkpoint(draft) and (steady := steady_length(load_config(draft))):
        settings.max_length = min(steady, target.max_length)
    tokens = draft_tokens(settings, target.vocab_size)
    if tokens is not None:
        tokenizer = _tokenizer(target.model.name_or_path) or _tokenizer(source)
        tokens = with_ends(tokens, end_ids(target.model, tokenizer))
    return load_draft(settings, target.fresh(), tokens)
