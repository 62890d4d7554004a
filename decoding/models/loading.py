"""The pair (target, draft) that decoding works on: loading, checking and identifying it."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.quantizers import AutoQuantizationConfig
from transformers.utils import ADAPTER_CONFIG_NAME, is_peft_available

from decoding.models.cached_lm import CachedLM
from decoding.models.context import configured_limit, refuse_unsteady
from decoding.models.draft_vocabulary import KEY as VOCABULARY
from decoding.models.draft_vocabulary import keep_rows, own_vocabulary, read_vocabulary, with_ends
from decoding.models.eagle.checkpoint import find_checkpoint, load_published
from decoding.models.eagle.draft import EagleDraft, GivenStates, read_maps
from decoding.models.ends import end_ids
from decoding.models.identity import digest_of, draft_fingerprint, model_fingerprint
from decoding.models.mixed import mix_in
from decoding.models.options import (
    REMEDY,
    device_map_of,
    dtype_of,
    first_line,
    load_config,
    on_cpu,
    options_of,
    source_of,
    where_of,
)
from decoding.models.packing import pack_linears
from decoding.models.recurrent import cached
from decoding.models.support import auto_class, refuse_other_layers, text_part
from decoding.settings import ModelSettings, Pair
from runtime.errors import UserError
from runtime.files import checked_folder


@dataclass
class ModelPair:
    """Target, draft and the tokenizer they share. ``name``: the pair's name in tables and
    manifests."""

    target: CachedLM
    draft: CachedLM
    tokenizer: PreTrainedTokenizerBase
    name: str
    eos_ids: tuple[int, ...]


def load_pair(settings: Pair) -> ModelPair:
    """Load both models of a pair after checking that they exist and share one vocabulary.

    Raises UserError naming ``pair.target`` or ``pair.draft`` for a missing folder, an unsupported
    architecture or different vocabularies, ``pair.draft_vocabulary`` for a file of another
    vocabulary, and ``pair.draft_mix`` for a number that is no share."""
    published = find_checkpoint(settings.model("draft"))  # which has neither config nor tokenizer
    sides = [settings.model(side) for side in (("target",) if published else ("target", "draft"))]
    configs, tokenizers = [*map(load_config, sides)], [*map(load_tokenizer, sides)]
    vocab_size = min(config.get_text_config().vocab_size for config in configs)
    check_same_vocabulary(tokenizers[0], tokenizers[-1], vocab_size)
    tokens = draft_tokens(settings, vocab_size)
    model = _load_model(sides[0])
    target = cached(model, vocab_size=vocab_size, max_length=settings.max_length)
    eos_ids = end_ids(model, tokenizers[0])
    draft = load_draft(settings, target, None if tokens is None else with_ends(tokens, eos_ids))
    mix_in(draft, target, settings.draft_mix)
    return ModelPair(target, draft, tokenizers[0], settings.name, eos_ids)


def load_draft(settings: Pair, target: CachedLM, vocabulary: torch.Tensor | None) -> CachedLM:
    """Load the draft of a pair, of the kind that its files tell, for a target that is loaded.
    vocabulary: [k], the tokens it may propose (`draft_tokens`); None: all."""
    files = settings.model("draft")
    if checkpoint := find_checkpoint(files):
        if vocabulary is not None:
            raise UserError(
                f"{VOCABULARY}: expected null, for pair.draft says which tokens it has, got a file."
                f" Set {VOCABULARY}=null"
            )
        return load_published(checkpoint, files, target)
    return _draft(settings, vocabulary, target.vocab_size, target.model.config, target)


def load_draft_alone(
    settings: Pair, config: PreTrainedConfig, eos_ids: Collection[int], states: GivenStates
) -> CachedLM:
    """Load the draft of a pair whose target runs in another engine. config: of that target;
    eos_ids: its end tokens; states: what a draft reads that reads its target's.

    Raises UserError for a published EAGLE draft, and one of another vocabulary."""
    files, target = settings.model("draft"), settings.model("target")
    if find_checkpoint(files):
        raise UserError(
            f"pair.draft: expected a draft of transformers' own classes, got {source_of(files)} in"
            " EAGLE's form. The engine has a method for those"
        )
    vocab_size = min(config.vocab_size, load_config(files).get_text_config().vocab_size)
    check_same_vocabulary(load_tokenizer(target), load_tokenizer(files), vocab_size)
    tokens = draft_tokens(settings, vocab_size)
    vocabulary = None if tokens is None else with_ends(tokens, eos_ids)
    return _draft(settings, vocabulary, vocab_size, config, states)


def _draft(
    settings: Pair,
    vocabulary: torch.Tensor | None,
    vocab_size: int,
    config: PreTrainedConfig,
    target: CachedLM | GivenStates,
) -> CachedLM:
    """Return an ordinary draft, or one that reads the states of `target`, whose `config` it is."""
    files = settings.model("draft")
    model = _load_model(files, vocabulary)
    maps = read_maps(Path(source_of(files)), model, config)
    options: Any = {
        "vocab_size": vocab_size,
        "max_length": settings.max_length,
        "vocabulary": vocabulary,
    }
    if maps is None:
        return cached(model, **options)
    return EagleDraft(model, target, maps, **options)


def draft_tokens(settings: Pair, vocab_size: int) -> torch.Tensor | None:
    """Return the tokens that the draft may propose, [k]; None: all."""
    given = settings.draft_vocabulary
    if given == "auto":
        file = own_vocabulary(source_of(settings.model("draft")))
    else:
        file = None if given is None else checked_folder(VOCABULARY, given, "file").expanduser()
    return None if file is None else read_vocabulary(file, vocab_size)


def check_same_vocabulary(
    target: PreTrainedTokenizerBase,
    draft: PreTrainedTokenizerBase,
    vocab_size: int,
    key: str = "pair.draft",
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
            f"{key}: its vocabulary differs from the target's (sizes {len(theirs)} and"
            f" {len(ours)}; token {index} is {b!r} there, {a!r} here). Choose a draft that shares"
            " the target's tokenizer."
        )


def load_llama(settings: ModelSettings) -> LlamaForCausalLM:
    """Load one model of a pair as a transformers model, to read its states or to train it. Raises
    UserError if it is missing or no Llama."""
    source, device = source_of(settings), settings.device
    try:
        dtype = dtype_of(settings, str(device))
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, device_map=device).eval()
    except (OSError, ValueError, RuntimeError, AssertionError, SafetensorError) as error:
        raise UserError(
            f"pair.{settings.side}: cannot load {source} ({first_line(error)}). {REMEDY}"
        ) from error
    if not isinstance(model, LlamaForCausalLM):
        raise UserError(
            f"pair.{settings.side}: {type(model).__name__} is no Llama model, the only kind this"
            " recipe knows"
        )
    return model


def context_of(settings: Pair) -> int:
    """Return the most tokens of a context as far as the configurations of a pair's models say,
    before they are loaded; those of a published EAGLE draft are its target's."""
    target, draft = settings.model("target"), settings.model("draft")
    read = [target] if find_checkpoint(draft) else [target, draft]
    return min(configured_limit(load_config(each), settings.max_length) for each in read)


def load_tokenizer(settings: ModelSettings) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model. Raises UserError if it is missing."""
    source = source_of(settings)
    try:
        return AutoTokenizer.from_pretrained(
            source, trust_remote_code=settings.trust_remote_code, **where_of(settings)
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"pair.{settings.side}: no tokenizer in {source} ({first_line(error)}). {REMEDY}"
        ) from error


def ends_of(settings: ModelSettings, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return `end_ids` of a model before it is loaded."""
    try:
        generation = GenerationConfig.from_pretrained(source_of(settings), **where_of(settings))
    except (OSError, ValueError):  # it has none
        generation = None
    found: Any = SimpleNamespace(config=load_config(settings), generation_config=generation)
    return end_ids(found, tokenizer)


def _load_model(settings: ModelSettings, vocabulary: torch.Tensor | None = None) -> PreTrainedModel:
    """Load one model. vocabulary: tokens that its output layer keeps; None: all."""
    key = f"pair.{settings.side}"
    model = text_part(key, load_plain(settings))
    refuse_other_layers(key, model)
    refuse_unsteady(key, model, settings.max_length)
    if vocabulary is not None:
        keep_rows(model, vocabulary)
    pack_linears(model)
    return model


def load_plain(settings: ModelSettings) -> PreTrainedModel:
    """Load one model of a pair with `from_pretrained`. Raises UserError naming its key."""
    key, source = f"pair.{settings.side}", source_of(settings)
    device_map, options = device_map_of(settings), options_of(settings)
    if (Path(source) / ADAPTER_CONFIG_NAME).is_file() and not is_peft_available():
        raise UserError(
            f"{key}: expected peft to be installed, for {source} holds an adapter, which"
            f" transformers would leave out, got none. Install it, or remove {ADAPTER_CONFIG_NAME}"
        )
    device = "cpu" if on_cpu(device_map) else str(device_map)
    remedy = f"Check {key}_options={options}" if options else REMEDY
    try:
        if isinstance(quantization := options.get("quantization_config"), dict):
            options["quantization_config"] = AutoQuantizationConfig.from_dict(quantization)
        loaded: Any = auto_class(load_config(settings)).from_pretrained(
            source,
            dtype=dtype_of(settings, device),
            device_map=device_map,
            trust_remote_code=settings.trust_remote_code,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, RuntimeError, ImportError, TypeError, SafetensorError) as error:
        raise UserError(f"{key}: cannot load {source} ({first_line(error)}). {remedy}") from error
    model, loading = loaded
    if loading["missing_keys"]:
        lost = sorted(loading["missing_keys"])
        what = f"{len(lost)} weights, {lost[0]} among them"
        raise UserError(f"{key}: {source} lacks {what}. {REMEDY}")
    return model


def pair_identity(pair: ModelPair) -> dict[str, Any]:
    """Return the identity of a pair, to which harvests and checkpoints belong: its name, a content
    fingerprint of each model and of the tokenizer, and the ids that end a response.

    The fingerprints do not depend on the files' location or on the dtype they were loaded in.
    """
    return {
        "name": pair.name,
        "target": model_fingerprint(pair.target.model),
        "draft": draft_fingerprint(pair.draft),
        "eos_ids": list(pair.eos_ids),
        "tokenizer": digest_of([json.dumps(sorted(pair.tokenizer.get_vocab().items()))]),
    }
