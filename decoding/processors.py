"""Warps that read the text: logits processors of transformers, asked along each path of a draft."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor
from transformers.generation import logits_process as of_transformers

from decoding.sampling import Warp, at_least_float32
from decoding.together import sent
from runtime.errors import UserError
from runtime.settings.kinds import Field, Probability, Says, Size, Temperature, TopP


class OfOutput(ABC):
    """A processor that reads the output alone, without the prompt."""

    @abstractmethod
    def __call__(self, output: Tensor, scores: Tensor, eos_ids: Sequence[int]) -> Tensor:
        """Return logits [1, V] for those after `output` [1, n]. eos_ids: that end it"""


@dataclass(frozen=True)
class Processed(Warp):
    """A warp of logits that processors have changed, each a function of the text so far: penalties,
    bans, a least length.

    processors: (text [1, n], logits [1, V]) -> logits, as transformers has them, in this order.
        They must give the same for the same text, whatever they were asked before: of a draft they
        are asked along each path. Where one does not, the output has another distribution. Those
        `OfOutput` see the text behind the prompt
    before: [m], what they see in front of the prompt, such as padding
    prompt, eos_ids: as in `within`; None: not known"""

    processors: Sequence[Callable[..., Tensor]] = ()
    before: Sequence[int] = ()
    prompt: int | None = None
    eos_ids: Collection[int] = ()

    def within(self, prompt: int, eos_ids: Collection[int]) -> Warp:
        return replace(self, prompt=prompt, eos_ids=eos_ids)

    @property
    def rest(self) -> Warp:
        return Warp(self.temperature, self.top_k, self.top_p)

    def after(self, text: Callable[[], Tensor]) -> "After":
        return After(**vars(self), text=text)

    def probs(self, logits: Tensor) -> Tensor:
        raise UserError(
            "warp: its processors read the text, which is not known here. Leave them away, such as"
            " penalties and min_p"
        )

    def fields(self) -> dict[str, Any]:
        raise UserError(
            "warp: other engines take temperature, top_k and top_p alone, not processors such as"
            " penalties and min_p. Leave these engines out, or take warp=default"
        )

    def to_dict(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in vars(Warp())}
        return own | {
            "before": list(self.before),
            "processors": [_facts(each) for each in self.processors],
        }


@dataclass(frozen=True)
class After(Processed):
    """The same after a text [n]."""

    text: Callable[[], Tensor] = torch.Tensor

    def probs(self, logits: Tensor) -> Tensor:
        return self.rest.probs(self.scores(logits))

    def scores(self, logits: Tensor) -> Tensor:
        """Return logits [V] as the processors change them."""
        text = torch.cat([torch.tensor(self.before, dtype=torch.long), self.text()])[None]
        text = sent(text, logits.device)
        scores = logits[None].to(at_least_float32(logits.dtype), copy=True)
        for processor in self.processors:
            if isinstance(processor, OfOutput):
                assert self.prompt is not None, "a request says where its output begins"
                output = text[:, len(self.before) + self.prompt :]
                scores = processor(output, scores, sorted(self.eos_ids))
            else:
                scores = processor(text, scores)
        if scores.device.type == "cpu" and scores.amax() == -math.inf:
            raise UserError(
                f"warp: its processors ban every token that may follow {text[0, -8:].tolist()}."
                " Leave one away"
            )
        return scores[0]


Texts = Callable[[int], tuple[Tensor, int]]
"""row -> the text [n] that is followed by what the row is about, and the tokens of its prompt."""


def scored(warp: Warp, logits: Tensor, texts: Texts, eos_ids: Collection[int]) -> Tensor:
    """Return the logits [n, V] that `warp.rest` makes distributions of: each row as processors
    change it after its own text."""
    if not isinstance(warp, Processed) or not len(logits):
        return logits
    scores = torch.empty_like(logits, dtype=at_least_float32(logits.dtype))
    for row, each in enumerate(logits):
        scores[row] = scored_after(*texts(row), warp, each, eos_ids)
    return scores


def scored_after(
    text: Tensor, prompt: int, warp: Warp, logits: Tensor, eos_ids: Collection[int]
) -> Tensor:
    """Return the same of one row [V]."""
    if not isinstance(warp, Processed):
        return logits
    within = replace(warp, prompt=prompt, eos_ids=eos_ids)
    return within.after(lambda: text).scores(logits)


CACHED = ("length_1_bias", "multi_token_biases", "prepared_bias_variables")
"""What processors make of their settings at the first call."""


def _facts(processor: Any) -> list[str]:
    """Return the name of a processor and everything that it was made with."""
    held = {
        name: value.tolist() if isinstance(value, Tensor) else value
        for name, value in sorted(vars(processor).items())
        if name not in CACHED
    }
    return [type(processor).__name__, str(held)]


class _Among(of_transformers.LogitsProcessor):
    """Changes nothing, and raises UserError for tokens that the vocabulary lacks."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        words = scores.shape[-1]
        if wrong := [token for token in self.tokens if not 0 <= token < words]:
            raise UserError(
                f"warp.banned, warp.bias, warp.forced: expected tokens from 0 to {words - 1}, got"
                f" {wrong[0]}. Take the tokenizer of the model"
            )
        return scores


@dataclass(frozen=True)
class Said(OfOutput):
    """Takes `presence` from the logits of tokens in the output, and `frequency` for each time they
    are there: the penalties of OpenAI's API."""

    presence: float
    frequency: float

    def __call__(self, output: Tensor, scores: Tensor, eos_ids: Sequence[int]) -> Tensor:
        counts = output[0].bincount(minlength=scores.shape[-1])
        return scores - self.presence * (counts > 0) - self.frequency * counts


@dataclass(frozen=True)
class LeastNew(OfOutput):
    """Bans the end of an output that has less than `count` tokens."""

    count: int

    def __call__(self, output: Tensor, scores: Tensor, eos_ids: Sequence[int]) -> Tensor:
        if output.shape[-1] < self.count:
            scores[..., [end for end in eos_ids if end < scores.shape[-1]]] = -math.inf
        return scores


@dataclass(frozen=True)
class Forced(OfOutput):
    """Bans everything but `tokens`, one after another, at the beginning of an output."""

    tokens: Sequence[int]

    def __call__(self, output: Tensor, scores: Tensor, eos_ids: Sequence[int]) -> Tensor:
        if output.shape[-1] < len(self.tokens):
            scores = torch.full_like(scores, -math.inf)
            scores[..., self.tokens[output.shape[-1]]] = 0
        return scores


def processed(  # noqa: PLR0913
    temperature: Annotated[Temperature, "what logits are divided by; 0: greedy"] = 1.0,
    top_k: Annotated[Size, "most probable tokens that are kept; 0: all"] = 0,
    top_p: Annotated[TopP, "share of the probability that the tokens kept have; 1: all"] = 1.0,
    repetition_penalty: Annotated[
        float, Field(gt=0), "what logits of tokens of the text are divided by, if positive"
    ] = 1.0,
    presence_penalty: Annotated[
        float, Field(ge=-2, le=2), "what is taken from logits of tokens in the output"
    ] = 0.0,
    frequency_penalty: Annotated[
        float, Field(ge=-2, le=2), "what is taken from them for each time they are in it"
    ] = 0.0,
    no_repeat_ngram_size: Annotated[Size, "n-grams of the text do not come again; 0: they do"] = 0,
    banned: Annotated[
        Sequence[int], Says("token ids, such as [3, 7]"), "tokens that are never said"
    ] = (),
    bias: Annotated[
        Mapping[int, float] | None,
        Says("numbers by token id, such as {5: -2.0}, or null"),
        "what is added to the logits of tokens",
    ] = None,
    min_new_tokens: Annotated[Size, "tokens of an output before those that end it"] = 0,
    forced: Annotated[
        Sequence[int], Says("token ids, such as [3, 7]"), "tokens that every output begins with"
    ] = (),
    min_p: Annotated[Probability, "share of the largest probability that tokens need"] = 0.0,
    typical_p: Annotated[TopP, "share of the probability that typical tokens have; 1: all"] = 1.0,
) -> Warp:
    """Return a warp in the order of `generate`: bias, penalties and bans, temperature, top-k,
    top-p, min-p, typical sampling (2202.00666).

    Raises UserError for settings that say nothing at temperature 0, and for a bias that is no
    number."""
    rest = Warp(temperature, top_k, top_p)
    added = {int(token): float(value) for token, value in (bias or {}).items()}
    if temperature == 0 and typical_p < 1:
        raise UserError(
            f"warp.typical_p: expected 1 at temperature 0, got {typical_p}. Raise warp.temperature"
        )
    if not all(map(math.isfinite, added.values())):
        raise UserError(f"warp.bias: expected numbers, got {added}. To ban a token: warp.banned")
    named = [*added, *banned, *forced]
    given: list[Any] = [[[token], value] for token, value in added.items()]
    of_text: list[tuple[Any, Callable[[], Any]]] = [
        (named, lambda: _Among(named)),
        (added, lambda: of_transformers.SequenceBiasLogitsProcessor(given)),
        (
            repetition_penalty != 1,
            lambda: of_transformers.RepetitionPenaltyLogitsProcessor(float(repetition_penalty)),
        ),
        (
            presence_penalty or frequency_penalty,
            lambda: Said(float(presence_penalty), float(frequency_penalty)),
        ),
        (
            no_repeat_ngram_size,
            lambda: of_transformers.NoRepeatNGramLogitsProcessor(no_repeat_ngram_size),
        ),
        (banned, lambda: of_transformers.SuppressTokensLogitsProcessor(list(banned))),
        (min_new_tokens, lambda: LeastNew(min_new_tokens)),
        (forced, lambda: Forced(list(forced))),
    ]
    of_logits: list[tuple[Any, Callable[[], Any]]] = [
        (True, lambda: of_transformers.TemperatureLogitsWarper(float(temperature))),
        (top_k, lambda: of_transformers.TopKLogitsWarper(top_k)),
        (top_p < 1, lambda: of_transformers.TopPLogitsWarper(float(top_p))),
        (min_p, lambda: of_transformers.MinPLogitsWarper(float(min_p))),
        (typical_p < 1, lambda: of_transformers.TypicalLogitsWarper(float(typical_p))),
    ]
    filters = temperature and (min_p or typical_p < 1)
    made = [make() for set_, make in [*of_text, *(of_logits if filters else [])] if set_]
    rest = Warp() if filters else rest
    return Processed(**vars(rest), processors=tuple(made)) if made else rest
