"""Warps that read the text: logits processors of transformers, asked along each path of a draft."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor
from transformers.generation import logits_process as of_transformers

from decoding.sampling import Warp, at_least_float32
from decoding.together import sent
from runtime.errors import UserError
from runtime.settings.kinds import Field, Probability, Size, Temperature, TopP


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

    def to_dict(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in vars(Warp())}
        return own | {"processors": [_facts(each) for each in self.processors]}


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


def _facts(processor: Any) -> list[Any]:
    """Return the name of a processor and everything it holds, as JSON takes it."""
    held = {
        name: value.tolist() if isinstance(value, Tensor) else value
        for name, value in sorted(vars(processor).items())
    }
    return [type(processor).__name__, str(held)]


def processed(  # noqa: PLR0913
    temperature: Annotated[Temperature, "what logits are divided by; 0: greedy"] = 1.0,
    top_k: Annotated[Size, "most probable tokens that are kept; 0: all"] = 0,
    top_p: Annotated[TopP, "share of the probability that the tokens kept have; 1: all"] = 1.0,
    repetition_penalty: Annotated[
        float,
        Field(gt=0),
        "what logits of tokens of the text are divided by, if positive; 1: nothing",
    ] = 1.0,
    no_repeat_ngram_size: Annotated[Size, "n-grams of the text do not come again; 0: they do"] = 0,
    banned: Annotated[Sequence[int], "tokens that are never said"] = (),
    bias: Annotated[Mapping[int, float], "what is added to the logits of tokens"] = {},  # noqa: B006
    min_p: Annotated[Probability, "share of the largest probability that tokens need"] = 0.0,
    typical_p: Annotated[TopP, "share of the probability that typical tokens have; 1: all"] = 1.0,
) -> Warp:
    """Return a warp in the order of `generate`: penalties and bans, temperature, top-k, top-p,
    min-p, typical sampling (2202.00666)."""
    made = list[Any]()
    if bias:
        given: list[Any] = [[[int(token)], float(value)] for token, value in bias.items()]
        made.append(of_transformers.SequenceBiasLogitsProcessor(given))
    if repetition_penalty != 1:
        made.append(of_transformers.RepetitionPenaltyLogitsProcessor(float(repetition_penalty)))
    if no_repeat_ngram_size:
        made.append(of_transformers.NoRepeatNGramLogitsProcessor(no_repeat_ngram_size))
    if banned:
        made.append(of_transformers.SuppressTokensLogitsProcessor(list(banned)))
    rest: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    if temperature and (min_p or typical_p < 1):
        made.append(of_transformers.TemperatureLogitsWarper(float(temperature)))
        made += [of_transformers.TopKLogitsWarper(top_k)] if top_k else []
        made += [of_transformers.TopPLogitsWarper(float(top_p))] if top_p < 1 else []
        made += [of_transformers.MinPLogitsWarper(float(min_p))] if min_p else []
        made += [of_transformers.TypicalLogitsWarper(float(typical_p))] if typical_p < 1 else []
        rest = {}
    return Processed(**rest, processors=made) if made else Warp(**rest)
