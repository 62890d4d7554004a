"""`generate` of transformers as engines of a comparison: plain, compiled, assisted, prompt lookup.

They are made by `conf/engine/{generate,generate_compiled,assisted*,prompt_lookup}.yaml`. Their
models are loaded separately, with `from_pretrained`; the engines of a run share them. An assistant
keeps its whole vocabulary."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from time import perf_counter
from typing import Annotated, Any, Literal

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from transformers import CompileConfig, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from decoding.models.loading import ModelPair, load_plain
from decoding.models.mixed import refuse_mixed
from decoding.sampling import Sampler, Warp
from decoding.settings import Pair
from decoding.trace import STAGES, RoundTrace, Trace
from runtime.errors import UserError
from runtime.settings.kinds import Count, Group, Path, Probability, Text, alternatives


class GenerateEngine:
    """`generate` of transformers: plain, compiled, assisted by the draft, or with prompt lookup.

    target, assistant: plainly loaded models, the latter None if `settings` do not need it;
    settings: further fields of the GenerationConfig, None where unset. The models' own generation
    configs are ignored, so the distribution is the target's after `warp`. The assistant's
    distribution follows from the same warp; transformers 5.23 applies it to an assistant twice,
    which changes nothing at temperature 1 or 0, and elsewhere costs acceptance, not exactness.
    Raises UserError for settings that transformers refuses."""

    records_drafts = False
    caution = ""

    def __init__(
        self,
        target: PreTrainedModel,
        assistant: PreTrainedModel | None,
        warp: Warp,
        eos_ids: frozenset[int],
        settings: Any,
    ) -> None:
        self.target, self.assistant = target, assistant
        self.settings = {key: value for key, value in settings.items() if value is not None}
        self.distribution = {
            **warp_settings(warp),
            "eos_token_id": sorted(eos_ids),
            "pad_token_id": min(eos_ids, default=0),
        }
        try:
            self._config(1).validate()
        except ValueError as error:
            raise UserError(f"engine.settings: {str(error).splitlines()[0]}. Mend them") from error

    @torch.inference_mode()
    def decode(self, prompt_ids: Tensor, max_new_tokens: int, sampler: Sampler) -> Trace:
        """Continue `prompt_ids` [n] until EOS or `max_new_tokens`. One number of `sampler` seeds
        torch.

        A round is one target forward and the tokens it adds. Assisted or with prompt lookup, the
        first forward runs prompt and draft together and is an ordinary round; otherwise it is the
        prefill, which adds a token without a draft. Draft tokens are not known (`records_drafts`),
        so `draft_tokens` is empty."""
        self.target.generation_config = GenerationConfig()
        if self.assistant is not None:  # anew: `generate` may move them
            self.assistant.generation_config = GenerationConfig(**self.settings)
        torch.manual_seed(int(torch.randint(1 << 62, (), generator=sampler.generator)))
        ids, rounds = prompt_ids[None].to(self.target.device), Rounds()
        generate: Any = self.target.generate
        start = perf_counter()
        generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=self._config(max_new_tokens),
            assistant_model=self.assistant,
            streamer=rounds,
        )
        seconds = perf_counter() - start
        tokens = [token for added in rounds.added for token in added]
        idle = dict.fromkeys(STAGES, 0.0)
        traced = [
            RoundTrace([], [], [], 0, len(added) - 1, added, [], 0, dict(idle))
            for added in rounds.added
        ]
        return Trace(len(prompt_ids), tokens, traced, 0.0, seconds)

    def _config(self, max_new_tokens: int) -> GenerationConfig:
        return GenerationConfig(max_new_tokens=max_new_tokens, **self.distribution, **self.settings)


class Rounds(BaseStreamer):
    """Receives the prompt and then the tokens that each target forward adds."""

    def __init__(self) -> None:
        self.added: list[list[int]] = []
        self._prompt = True

    def put(self, value: Tensor) -> None:
        if not self._prompt:
            self.added.append(value.reshape(-1).tolist())
        self._prompt = False

    def end(self) -> None:
        pass


class CompiledGenerateEngine(GenerateEngine):
    """`generate` with a compiled forward on a static cache; `make_ready` compiles it."""

    def make_ready(self, prompts: Sequence[Tensor], max_new_tokens: int) -> str | None:
        """Compile, with a cache for the longest of `prompts` [n] and its response.

        Returns None, or in a line why it does not compile here (`not_compiled`)."""
        self.settings = compiled_settings(max(map(len, prompts)) + max_new_tokens)
        return not_compiled(self, min(prompts, key=len))


def compiled_settings(length: int) -> dict[str, Any]:
    """Return fields of a GenerationConfig for a compiled forward on a static cache of `length`
    tokens, on a CPU as well.

    Prefill is not compiled, by transformers' choice. `length` is that of the longest request: a
    call with a longer one would compile again. transformers compiles on a CPU only where
    `_compile_all_devices` is set."""
    config: Any = CompileConfig()
    config._compile_all_devices = True
    return {"cache_implementation": "static", "max_cache_len": length, "compile_config": config}


def not_compiled(engine: GenerateEngine, prompt_ids: Tensor) -> str | None:
    """Compile the forward of an engine with `compiled_settings` by decoding a few tokens after
    `prompt_ids` [n].

    Returns None, or in a line why there is no compiled forward: no C++ compiler, another fault of
    torch.compile, or a model that transformers does not compile."""
    vars(engine.target).pop("_compiled_call", None)
    try:
        engine.decode(prompt_ids, 4, Sampler.seeded(0))
    except TorchDynamoException as error:
        return next(line for line in str(error).splitlines() if line.strip())
    compiles = hasattr(engine.target, "_compiled_call")
    return None if compiles else "transformers compiles no model that is loaded so"


def warp_settings(warp: Warp) -> dict[str, Any]:
    """Return a warp as fields of a GenerationConfig (transformers' default is top-k 50)."""
    fields = warp.fields()
    if warp.temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, **fields}


# Made by configs ----------------------------------------------------------------------------------


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


Models = Annotated[Mapping[str, Any], "the pair, loaded as from_pretrained gives it"]
OfTarget = Annotated[Warp, "of the target"]
Further = Annotated[Generation, "further fields of its GenerationConfig"]


def plain(
    models: Models, warp: OfTarget, settings: Further, pair: ModelPair, eos_ids: frozenset[int]
) -> GenerateEngine:
    """Return an engine of the target alone, with prompt lookup if `settings` ask for it."""
    return GenerateEngine(_loaded("target", models), None, warp, eos_ids, settings)


def compiled(
    models: Models, warp: OfTarget, pair: ModelPair, eos_ids: frozenset[int]
) -> CompiledGenerateEngine:
    """Return an engine of the target alone, whose forward is compiled before anything is timed."""
    return CompiledGenerateEngine(_loaded("target", models), None, warp, eos_ids, {})


def assisted(
    models: Models,
    assistant: Annotated[
        Path | None, "folder or hub id of an ordinary draft; null: that of the pair"
    ],
    warp: OfTarget,
    settings: Further,
    pair: ModelPair,
    eos_ids: frozenset[int],
) -> GenerateEngine:
    """Return an engine of the target with an ordinary draft model.

    Raises UserError if no draft is given that transformers can use."""
    folder = assistant_of(assistant, models, pair)
    given = models if folder is None else OmegaConf.merge(models, {"draft": str(folder)})
    try:
        draft, target = _loaded("draft", given), _loaded("target", models)
    except UserError as error:
        if folder is None:
            raise
        raise UserError(str(error).replace("pair.draft", "assistant", 1)) from error
    sizes = [model.config.get_text_config().vocab_size for model in (draft, target)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"assistant: expected {sizes[1]} tokens, as the target has, got {sizes[0]}. Give"
            " another, or leave the assisted methods out of `methods`"
        )
    return GenerateEngine(target, draft, warp, eos_ids, settings)


def assistant_of(
    assistant: Path | None, models: Mapping[str, Any], pair: ModelPair
) -> Path | str | None:
    """Return folder or hub id of the draft of assisted generation; None: it is `pair.draft`.

    Raises UserError if none is given and the pair's draft reads its target or is mixed with it."""
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


def _loaded(side: str, models: Any) -> PreTrainedModel:
    """Load a model of a pair's settings, once for all engines. Raises UserError if settings are
    missing."""
    needed = {
        n for n, one in Pair.described().items() if type(None) not in alternatives(one.annotation)
    }
    if lacking := sorted(needed - set(models)):
        raise UserError(
            f"engine.models: expected the settings of a pair, got none for {lacking[0]}. Leave it"
            " as it is, ${pair}"
        )
    return _loaded_once(
        side, json.dumps(OmegaConf.to_container(models, resolve=True), sort_keys=True)
    )


@lru_cache(maxsize=4)
def _loaded_once(side: str, models: str) -> PreTrainedModel:
    return load_plain(Pair.of(OmegaConf.create(json.loads(models))).model(side)).eval()
