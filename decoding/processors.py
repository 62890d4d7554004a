"""Warps that read the text: logits processors of transformers, asked along each path of a draft."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor
from transformers.generation import logits_process as of_transformers

from decoding.sampling import Warp, at_least_float32
from decoding.together import sent
from runtime.errors import UserError
from runtime.settings.kinds import Field, Probability, Says, Size, Temperature, TopP


@dataclass(frozen=True)
class Processed(Warp):
    """A warp of logits that processors have changed, each a function of the text so far: penalties,
    bans, a least length.

    processors: (text [1, n], logits [1, V]) -> logits, as transformers has them, in this order.
        They must give the same for the same text, whatever they were asked before: of a draft they
        are asked along each path. Where one does not, the output has another distribution
    before: [m], what they see in front of the prompt, such as padding"""

    processors: Sequence[Callable[[Tensor, Tensor], Tensor]] = ()
    before: Sequence[int] = ()

    def after(self, text: Callable[[], Tensor]) -> Warp:
        return _After(**vars(self), text=text)

    def probs(self, logits: Tensor) -> Tensor:
        raise UserError(
            "warp: its processors read the text, which is not known here. Leave them away, such as"
            " penalties and min_p"
        )

    def fields(self) -> dict[str, Any]:
        raise UserError(
            "warp: other engines take temperature, top_k and top_p alone, not processors such as"
            " penalties and min_p. Leave them out of methods=[...], or take warp=default"
        )

    def to_dict(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in vars(Warp())}
        return own | {
            "before": list(self.before),
            "processors": [_facts(each) for each in self.processors],
        }


@dataclass(frozen=True)
class _After(Processed):
    text: Callable[[], Tensor] = torch.Tensor

    def probs(self, logits: Tensor) -> Tensor:
        text = torch.cat([torch.tensor(self.before, dtype=torch.long), self.text()])[None]
        text = sent(text, logits.device)
        scores = logits[None].to(at_least_float32(logits.dtype), copy=True)
        for processor in self.processors:
            scores = processor(text, scores)
        if scores.device.type == "cpu" and bool(scores.isneginf().all()):
            raise UserError(
                f"warp: its processors ban every token that may follow {text[0, -8:].tolist()}."
                " Leave one away"
            )
        return Warp.probs(self, scores[0])


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
                f"warp.banned, warp.bias: expected tokens from 0 to {words - 1}, got {wrong[0]}."
                " Take the tokenizer of the model"
            )
        return scores


def processed(  # noqa: PLR0913
    temperature: Annotated[Temperature, "what logits are divided by; 0: greedy"] = 1.0,
    top_k: Annotated[Size, "most probable tokens that are kept; 0: all"] = 0,
    top_p: Annotated[TopP, "share of the probability that the tokens kept have; 1: all"] = 1.0,
    repetition_penalty: Annotated[
        float, Field(gt=0), "what logits of tokens of the text are divided by, if positive"
    ] = 1.0,
    no_repeat_ngram_size: Annotated[Size, "n-grams of the text do not come again; 0: they do"] = 0,
    banned: Annotated[
        Sequence[int], Says("token ids, such as [3, 7]"), "tokens that are never said"
    ] = (),
    bias: Annotated[
        Mapping[int, float] | None,
        Says("numbers by token id, such as {5: -2.0}, or null"),
        "what is added to the logits of tokens",
    ] = None,
    min_p: Annotated[Probability, "share of the largest probability that tokens need"] = 0.0,
    typical_p: Annotated[TopP, "share of the probability that typical tokens have; 1: all"] = 1.0,
) -> Warp:
    """Return a warp in the order of `generate`: bias, penalties and bans, temperature, top-k,
    top-p, min-p, typical sampling (2202.00666).

    Raises UserError for settings that say nothing at temperature 0, and for a bias that is no
    number."""
    rest, made = Warp(temperature, top_k, top_p), list[Any]()
    added = {int(token): float(value) for token, value in (bias or {}).items()}
    if temperature == 0 and typical_p < 1:
        raise UserError(
            f"warp.typical_p: expected 1 at temperature 0, got {typical_p}. Raise warp.temperature"
        )
    if not all(map(math.isfinite, added.values())):
        raise UserError(f"warp.bias: expected numbers, got {added}. To ban a token: warp.banned")
    if added or banned:
        made.append(_Among([*added, *banned]))
    if added:
        given: list[Any] = [[[token], value] for token, value in added.items()]
        made.append(of_transformers.SequenceBiasLogitsProcessor(given))
    if repetition_penalty != 1:
        made.append(of_transformers.RepetitionPenaltyLogitsProcessor(float(repetition_penalty)))
    if no_repeat_ngram_size:
        made.append(of_transformers.NoRepeatNGramLogitsProcessor(no_repeat_ngram_size))
    if banned:
        made.append(of_transformers.SuppressTokensLogitsProcessor(list(banned)))
    if temperature and (min_p or typical_p < 1):
        made.append(of_transformers.TemperatureLogitsWarper(float(temperature)))
        made += [of_transformers.TopKLogitsWarper(top_k)] if top_k else []
        made += [of_transformers.TopPLogitsWarper(float(top_p))] if top_p < 1 else []
        made += [of_transformers.MinPLogitsWarper(float(min_p))] if min_p else []
        made += [of_transformers.TypicalLogitsWarper(float(typical_p))] if typical_p < 1 else []
        rest = Warp()
    return Processed(**vars(rest), processors=tuple(made)) if made else rest
