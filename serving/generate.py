"""Speculative decoding inside `generate` of transformers.

    from serving.generate import speculate

    output = model.generate(
        **inputs, max_new_tokens=64, do_sample=True,
        custom_generate=speculate, draft=draft, predictor="checkpoints/value",
    )

The distribution is that of the same call without the last line: warps, end tokens and lengths are
those that `generate` derives from its generation config. Options that would change it or are not
available are refused in a line: beams, scores and states of every step, processors that keep
something from one call for the next. Other processors are asked along each path of a draft, with
its own text. Rows of a batch are decoded side by side, each with a draft as long as its rule says;
padded ones of processors that read the text, which sees the padding, one after another.
"""

import copy
import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from threading import Lock
from types import FrameType
from typing import Any, Protocol, cast

import torch
from torch import LongTensor, Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    logits_process,
)
from transformers.generation.streamers import BaseStreamer

from decoding.engines.batched import Asked, BatchedEngine, Decoder
from decoding.engines.request import Ends, Prompt
from decoding.engines.serial import SerialEngine
from decoding.interfaces import DraftStructure, StopRule, Verifier
from decoding.processors import Processed
from decoding.sampling import Sampler, Warp
from decoding.stopping.confidence import Confidence
from decoding.structures.chain import Chain
from decoding.trace import Trace
from decoding.verifiers.token import TokenVerifier
from predictors.base import read_config, refuse_changed, refuse_mismatch
from predictors.hub import local_folder
from runtime.errors import UserError
from serving.arguments import (
    prompts_of,
    refuse_other_inputs,
    refuse_other_kinds,
    refuse_unsupported,
)
from serving.models import Draft, SpeculativePair, opened

GAMMA = 8  # longest draft by default
WARPERS: dict[type, str] = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
}
OF_TEXT = set(WARPERS) | {
    *(logits_process.RepetitionPenaltyLogitsProcessor, logits_process.NoRepeatNGramLogitsProcessor),
    *(logits_process.NoBadWordsLogitsProcessor, logits_process.SequenceBiasLogitsProcessor),
    *(logits_process.MinLengthLogitsProcessor, logits_process.MinNewTokensLengthLogitsProcessor),
    *(logits_process.ForcedBOSTokenLogitsProcessor, logits_process.ForcedEOSTokenLogitsProcessor),
    *(logits_process.SuppressTokensLogitsProcessor, logits_process.LogitNormalization),
    *(logits_process.SuppressTokensAtBeginLogitsProcessor, logits_process.TopHLogitsWarper),
    *(logits_process.ExponentialDecayLengthPenalty, logits_process.InfNanRemoveLogitsProcessor),
    *(logits_process.MinPLogitsWarper, logits_process.TypicalLogitsWarper),
    *(logits_process.EpsilonLogitsWarper, logits_process.EtaLogitsWarper),
}
"""Processors of transformers whose result depends on the text and the logits alone."""


class Engine(Protocol):
    """Our engines."""

    def decode(
        self, prompt_ids: Prompt, max_new_tokens: int, sampler: Sampler, ends: Ends | None = None
    ) -> Trace: ...


@dataclass(frozen=True)
class Speculation:
    """The arguments of `generate` besides its own.

    draft: a model, its folder or hub id, or the pair that `decoding.pair.open_pair` gives, whose
        target is `model`
    predictor: folder or hub id of a trained predictor, whose stop rule ends drafts; its pair and
        warps must be those of this call
    threshold: of that rule; None: its default, which is not tuned for this pair
    stop, structure, verifier: instead of the defaults `Confidence(0.4)`, `Chain(8)`,
        `TokenVerifier()`
    engine: class of the engine that decodes with them, or a `partial` of it
    draft_warp: the warp of the draft's distribution; None: the target's
    stream: gets the prompt of each row, then each token as soon as it is committed, then `end`;
        for a single row, `streamer` does the same
    """

    draft: Draft
    predictor: str | Path | None = None
    threshold: float | None = None
    stop: StopRule | None = None
    structure: DraftStructure | None = None
    verifier: Verifier | None = None
    engine: Callable[..., Engine] = SerialEngine
    draft_warp: Warp | None = None
    stream: BaseStreamer | None = None


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """Output under `return_dict_in_generate`. traces: one for each row of the batch."""

    traces: list[Trace] | None = None


def speculate(
    model: PreTrainedModel, input_ids: Tensor, **given: Any
) -> Tensor | SpeculativeOutput:
    """Decode speculatively, as a `custom_generate` of transformers (4.57 and later); the arguments
    of `Speculation` are passed to `generate`.

    Returns [B, n + new] int64, shorter rows padded with the pad token, or a `SpeculativeOutput`.
    The seed is that of torch. Raises UserError for unsupported arguments."""
    own = {"draft": None} | {name: given.pop(name) for name in OWN if name in given}
    if given.pop("stop_strings", None) is not None:
        raise UserError(
            "stop_strings: transformers keeps the tokenizer from speculate. Give"
            " stopping_criteria=[StopStringCriteria(tokenizer, stop_strings)]"
        )
    streamer = streamer_of(inspect.currentframe())
    if streamer is not None and (own.get("stream") is not None or len(input_ids) != 1):
        raise UserError(
            "streamer: expected one prompt and no stream, for rows come one after another. Give"
            " stream alone, which hears each row to its end"
        )
    refuse_other_kinds(own)
    asked, config = Speculation(**own), given["generation_config"]
    refuse_unsupported(input_ids, config, given)
    prompts = prompts_of(input_ids, given.get("attention_mask"))
    warp = warp_of(config, given.get("logits_processor") or ())
    pair = opened(model, asked.draft)
    refuse_other_inputs(input_ids, given, pair.target.vocab_size)
    context = pair.target.max_length
    if config.max_length > context:
        raise UserError(
            f"max_new_tokens: expected at most {context} tokens with the prompt, which the context"
            f" or windows of the model hold, got {config.max_length}. Ask for fewer"
        )
    with ExitStack() as stack:
        parts = {part: stack.enter_context(undisturbed(getattr(asked, part))) for part in PARTS}
        stream, rows = asked.stream or streamer, input_ids.cpu()
        requests = [_request(*each, stream, given) for each in zip(rows, prompts, strict=True)]
        paddings = [row[: len(row) - len(own)] for row, own in zip(rows, prompts, strict=True)]
        warps = [_of_row(warp, number, paddings) for number in range(len(rows))]
        apart = any(each.to_dict() != warps[0].to_dict() for each in warps)
        engines = [
            engine_of(replace(asked, **parts), pair, each, config)
            for each in (warps if apart else warps[:1])
        ]
        together = stream is None and len(requests) > 1 == len(engines)
        if together and isinstance(engines[0], Decoder):
            ended = dict(BatchedEngine(engines[0], len(requests)).decode(requests))
            traces = [ended[number] for number in range(len(requests))]
        else:  # who listens hears one row after another
            traces = []
            for number, (row, request) in enumerate(zip(rows, requests, strict=True)):
                if asked.stream is not None:
                    asked.stream.put(row[None].clone())
                engine = engines[number % len(engines)]
                traces.append(engine.decode(*vars(request).values()))
                if stream is not None:
                    stream.end()
    sequences = _joined(input_ids, traces, config)
    if config.return_dict_in_generate:
        return SpeculativeOutput(sequences=cast(LongTensor, sequences), traces=traces)
    return sequences


OWN = tuple(one.name for one in fields(Speculation))
vars(speculate)["__signature__"] = inspect.Signature(
    [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for name in ("model", "input_ids", "stop_strings", *OWN)
    ]
    + [inspect.Parameter("given", inspect.Parameter.VAR_KEYWORD)]
)  # `generate` passes on the arguments in this signature


def streamer_of(frame: FrameType | None) -> BaseStreamer | None:
    """Return the `streamer` of the `generate` inside of which `frame` runs.

    `generate` gives it the prompt, but passes it only to its own decoding methods, so a listener
    would wait for ever: it is read from the frame of `generate`."""
    while frame and frame.f_code is not inspect.unwrap(GenerationMixin.generate).__code__:
        frame = frame.f_back
    return frame.f_locals.get("streamer") if frame else None


PARTS = "stop", "structure", "verifier"
_in_use = set[int]()
_changing = Lock()


@contextmanager
def undisturbed(part: Any) -> Iterator[Any]:
    """Yield the same object, or a copy while another call uses it: its state is of one request."""
    with _changing:
        taken = id(part) in _in_use
        _in_use.add(id(part))
    try:
        yield copy.deepcopy(part) if taken else part
    finally:
        if not taken:
            with _changing:
                _in_use.discard(id(part))


def engine_of(
    asked: Speculation, pair: SpeculativePair, warp: Warp, config: GenerationConfig
) -> Engine:
    draft_warp = asked.draft_warp or warp
    stop = asked.stop
    if asked.predictor is not None:
        if stop is not None:
            raise UserError("stop, predictor: both say when drafting ends. Leave one away")
        stop = _rule(asked.predictor, asked.threshold, pair, warp, draft_warp)
    elif asked.threshold is not None:
        raise UserError("threshold: belongs to a predictor, and there is none. Leave it away")
    stop = stop or Confidence(0.4)
    return asked.engine(
        pair=pair,
        structure=asked.structure or Chain(getattr(stop, "trained_gamma", None) or GAMMA),
        stop=stop,
        verifier=asked.verifier or TokenVerifier(),
        warp=warp,
        draft_warp=draft_warp,
        eos_ids=frozenset(_ids(config, "_eos_token_tensor")),
    )


def _rule(
    source: str | Path, threshold: float | None, pair: SpeculativePair, warp: Warp, draft_warp: Warp
) -> StopRule:
    """Return the stop rule that asks a trained predictor, found by the predictor's name:
    `RULE.of(folder, threshold)` of `decoding.stopping.<name of the predictor>`.

    Raises UserError for a checkpoint that is missing or damaged, was trained for another pair or
    other warps, or has no such rule."""
    key = "predictor"
    folder = local_folder(source, key)
    config = read_config(folder, key)
    refuse_changed(folder, config, key)
    wanted = {"warp": warp.to_dict(), "draft_warp": draft_warp.to_dict()}
    refuse_mismatch(config, {"pair": pair.identity, **wanted}, f"{key}: {folder}")
    name = f"decoding.stopping.{config['predictor']}"
    module: Any = importlib.import_module(name) if importlib.util.find_spec(name) else None
    if not hasattr(module, "RULE"):
        raise UserError(
            f"{key}: {folder} holds {config['predictor']!r}, for which {name} has no RULE. Give a"
            " stop rule or a structure that asks it: stop=..."
        )
    rule: StopRule = module.RULE.of(folder, threshold)
    return rule


def warp_of(config: GenerationConfig, processors: Sequence[Any]) -> Warp:
    """Return the warp that equals the logits processors made by `generate`: our own for
    temperature, top-k and top-p, once each in this order; else one that asks them as they are.

    Raises UserError for those that keep something from one call for the next, or that are not
    known."""
    kinds, warps, temperature = list(WARPERS), dict[str, Any](), 1.0 if config.do_sample else 0.0
    for processor in processors:
        if type(processor) not in OF_TEXT:
            raise UserError(
                f"logits_processor: {type(processor).__name__} is not supported by speculate, which"
                " takes those of transformers whose result depends on the text alone. Leave away"
                " the setting that asks for it"
            )
    for processor in processors:
        while kinds and type(processor) is not kinds[0]:
            kinds.pop(0)
        name = WARPERS[kinds.pop(0)] if kinds else ""
        if (
            not name
            or getattr(processor, "filter_value", -math.inf) != -math.inf
            or (name == "top_p" and processor.min_tokens_to_keep != 1)
        ):
            return Processed(temperature, processors=tuple(processors))
        warps[name] = getattr(processor, name)
    return Warp(**warps) if config.do_sample else Warp(temperature=0)


def _of_row(warp: Warp, row: int, paddings: Sequence[Tensor]) -> Warp:
    """Return the warp of one row of the batch that processors were made for."""
    if not isinstance(warp, Processed):
        return warp
    own = list[Any]()
    for processor in warp.processors:
        lengths = getattr(processor, "prompt_ignore_length", None)
        own.append(processor)
        if isinstance(lengths, Tensor):  # of each row
            if len(lengths) != len(paddings):
                raise UserError(
                    f"logits_processor: expected prompt_ignore_length of {len(paddings)} prompts,"
                    f" got {len(lengths)}. Give one each"
                )
            own[-1] = copy.copy(processor)
            own[-1].prompt_ignore_length = lengths[row : row + 1]
    return replace(warp, processors=tuple(own), before=tuple(paddings[row].tolist()))


def _request(
    row: Tensor, prompt: Tensor, stream: BaseStreamer | None, given: Mapping[str, Any]
) -> Asked:
    """Return the request of one row. row: the padded prompt, whose length `generate` counts and
    whose tokens stopping criteria see."""
    room = given["generation_config"].max_length - len(row)
    padding = row[: len(row) - len(prompt)]
    criteria = given.get("stopping_criteria") or ()

    def ends(text: Tensor) -> bool:
        if stream is not None:
            stream.put(text[-1:].clone())
        seen = torch.cat([padding, text])[None]
        return any(bool(torch.as_tensor(one(seen, None)).all()) for one in criteria)

    return Asked(prompt, room, Sampler.seeded(int(torch.randint(1 << 62, ()))), ends)


def _joined(input_ids: Tensor, traces: Sequence[Trace], config: GenerationConfig) -> Tensor:
    """Return prompts and outputs, padded, [B, n + longest], on the device of the prompts."""
    pad = next(iter([*_ids(config, "_pad_token_tensor"), *_ids(config, "_eos_token_tensor"), 0]))
    longest = max(len(trace.tokens) for trace in traces)
    rows = [trace.tokens + [pad] * (longest - len(trace.tokens)) for trace in traces]
    return torch.cat(
        [input_ids.long(), torch.tensor(rows, dtype=torch.long).to(input_ids.device)], 1
    )


def _ids(config: GenerationConfig, name: str) -> list[int]:
    """Return the token ids that `generate` has put into its config under this name."""
    ids = getattr(config, name, None)
    return [] if ids is None else ids.reshape(-1).tolist()
