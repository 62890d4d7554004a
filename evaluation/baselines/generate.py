"""`generate` of transformers as engines of a comparison: plain, compiled, assisted, prompt lookup.

What `conf/engine/{generate,generate_compiled,assisted*,prompt_lookup}.yaml` name. The models are
loaded apart from ours, as `from_pretrained` gives them; the engines of a run share them. An
assistant keeps its whole vocabulary."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf
from transformers import PreTrainedModel

from decoding.models.loading import ModelPair, load_plain
from decoding.models.mixed import refuse_mixed
from decoding.sampling import Warp
from evaluation.baselines.generate_engine import CompiledGenerateEngine, GenerateEngine
from runtime.errors import UserError
from runtime.settings.kinds import Count, Group, Path, Probability, Text

Settings = Mapping[str, Any]


class Generation(Group):
    """Fields of a GenerationConfig that leave the distribution as it is."""

    num_assistant_tokens: Annotated[Count | None, "tokens of a draft"]
    num_assistant_tokens_schedule: Annotated[
        Literal["constant", "heuristic", "heuristic_transient"] | None,
        "how that number changes with what was accepted",
    ]
    assistant_confidence_threshold: Annotated[
        Probability | None, "a draft ends after a token less probable than this"
    ]
    prompt_lookup_num_tokens: Annotated[Count | None, "tokens copied from the text so far"]
    max_matching_ngram_size: Annotated[Count | None, "longest n-gram that is looked up"]
    cache_implementation: Annotated[Text | None, "such as static"]


def plain(
    models: Annotated[Mapping[str, Any], "the pair, loaded as from_pretrained gives it"],
    warp: Annotated[Warp, "of the target"],
    settings: Annotated[Generation, "further fields of its GenerationConfig"],
    pair: ModelPair,
    eos_ids: frozenset[int],
) -> GenerateEngine:
    """The target alone, with prompt lookup where `settings` ask for it.

    Raises UserError for settings that transformers refuses."""
    return _engine(target(models), None, warp, eos_ids, settings)


def compiled(
    models: Annotated[Mapping[str, Any], "the pair, loaded as from_pretrained gives it"],
    warp: Annotated[Warp, "of the target"],
    pair: ModelPair,
    eos_ids: frozenset[int],
) -> CompiledGenerateEngine:
    """The target alone, its forward compiled before anything is timed."""
    return CompiledGenerateEngine(target(models), None, warp, eos_ids, {})


def assisted(
    models: Annotated[Mapping[str, Any], "the pair, loaded as from_pretrained gives it"],
    assistant: Annotated[
        Path | None, "folder or hub id of an ordinary draft; null: that of the pair"
    ],
    warp: Annotated[Warp, "of the target"],
    settings: Annotated[Generation, "further fields of its GenerationConfig"],
    pair: ModelPair,
    eos_ids: frozenset[int],
) -> GenerateEngine:
    """The target with an ordinary draft model.

    Raises UserError as `plain`, and where no draft is given that transformers can use."""
    draft, whole = assistant_model(assistant_of(assistant, models, pair), models), target(models)
    sizes = [model.config.get_text_config().vocab_size for model in (draft, whole)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"assistant: expected {sizes[1]} tokens, as the target has, got {sizes[0]}. Give"
            " another, or leave the assisted methods out of `methods`"
        )
    return _engine(whole, draft, warp, eos_ids, settings)


def assistant_of(assistant: Path | None, models: Settings, pair: ModelPair) -> Path | None:
    """Folder or hub id of the draft of assisted generation; None: it is `pair.draft`.

    Raises UserError where that one reads its target and there is no other, or is mixed with it."""
    if assistant is not None:
        return assistant
    if not pair.draft.reads_target:
        refuse_mixed(pair.draft)
        return None
    if (ordinary := models.get("assistant")) is None:
        raise UserError(
            "assistant: expected an ordinary draft, got none: pair.draft is EAGLE-style, which"
            " transformers cannot use. Give one: assistant=<folder or hub id>"
        )
    return str(ordinary)


def target(models: Settings) -> PreTrainedModel:
    return _loaded("target", _as_text(models))


def assistant_model(assistant: Path | None, models: Settings) -> PreTrainedModel:
    """`assistant`, or `pair.draft` where that is None. Raises UserError where it is missing."""
    if assistant is None:
        return _loaded("draft", _as_text(models))
    try:
        return _loaded("draft", _as_text(OmegaConf.merge(models, {"draft": str(assistant)})))
    except UserError as error:
        raise UserError(str(error).replace("pair.draft", "assistant", 1)) from error


def _as_text(models: Any) -> str:
    return json.dumps(OmegaConf.to_container(models, resolve=True), sort_keys=True)


@lru_cache(maxsize=4)
def _loaded(side: str, models: str) -> PreTrainedModel:
    return load_plain(side, OmegaConf.create(json.loads(models))).eval()


def _engine(
    whole: PreTrainedModel,
    draft: PreTrainedModel | None,
    warp: Warp,
    eos_ids: frozenset[int],
    settings: Any,
) -> GenerateEngine:
    given = {key: value for key, value in settings.items() if value is not None}
    try:
        return GenerateEngine(whole, draft, warp, eos_ids, given)
    except ValueError as error:
        raise UserError(f"engine.settings: {str(error).splitlines()[0]}. Mend them") from error
