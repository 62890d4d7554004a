"""A response from elsewhere, and how it becomes the tokens that the models are run along."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data_gen.harvest import HarvestSettings
from data_gen.prompts import Prompt
from data_gen.requests import Request
from decoding.models.loading import ModelPair
from runtime.errors import UserError
from runtime.json_lines import is_text

FORM = (
    'Write {"id": <prompt id>, "response": <text>} or {"id": ..., "response_tokens": [<token ids>]}'
)


@dataclass(frozen=True)
class ExternalResponse:
    """One response. content: text or token ids; finished: the target ended it; place: config key
    and line it came from, what errors about it begin with."""

    prompt_id: str
    content: str | Sequence[int]
    finished: bool
    place: str


class Source(Protocol):
    """Where responses come from."""

    def fetch(
        self, prompts: Sequence[Prompt], recipe: HarvestSettings, out: Path, ask: bool
    ) -> Mapping[str, ExternalResponse] | None:
        """A response to each of `prompts`, by id; None where the target is to answer here.

        out: folder of the dataset, where what arrives may be kept; ask: false where nothing may be
        made or sent."""
        ...


class Generated:
    """The target answers here, a batch of prompts at a time (`data_gen.responses.generate`)."""

    def fetch(
        self, prompts: Sequence[Prompt], recipe: HarvestSettings, out: Path, ask: bool
    ) -> None:
        return None


def response_from_row(row: Mapping[str, Any], place: str) -> ExternalResponse:
    """A response from a JSON object with `id`, `response` or `response_tokens`, and perhaps
    `finish_reason`.

    One that finished ("stop", as OpenAI's API has it) ends with the target's end token, which text
    does not show."""
    name, text, tokens = row.get("id"), row.get("response"), row.get("response_tokens")
    if not isinstance(name, str | int) or (text is None) == (tokens is None):
        raise UserError(f"{place} is no response (it has {', '.join(row) or 'nothing'}). {FORM}")
    content: Any = text if tokens is None else tokens
    finished = row.get("finish_reason") == "stop"
    if text is not None and not is_text(text):
        raise UserError(f"{place} has a response that is no text. {FORM}")
    if tokens is not None and not is_ids(tokens):
        raise UserError(f"{place} has response_tokens that are no list of whole numbers. {FORM}")
    if not (content or finished):
        remedy = (
            'Take that prompt out of the dataset, or add "finish_reason": "stop" if the target'
            " ended it at once"
        )
        raise UserError(f"{place} has an empty response. {remedy}")
    return ExternalResponse(str(name), content, finished, place)


def is_ids(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(token) is int for token in value)


def with_responses(
    requests: Sequence[Request],
    given: Mapping[str, ExternalResponse] | None,
    pair: ModelPair,
    max_new: int,
) -> list[Request]:
    """Requests with their responses, cut at `max_new` tokens and after the first end token."""
    if given is None:
        return list(requests)
    return [replace(r, response=response_ids(given[r.prompt_id], pair, max_new)) for r in requests]


def response_ids(given: ExternalResponse, pair: ModelPair, max_new: int) -> Tensor:
    """[T] int64, 1 <= T <= max_new. Raises UserError for ids beyond the vocabulary, and text
    without a token."""
    ids = list(_encoded(given.content, pair.tokenizer))
    if given.finished and not set(pair.eos_ids) & set(ids):
        ids += _end(pair)
    if not ids:
        raise UserError(
            f"{given.place} has a response without a token. Take that prompt out of the dataset"
        )
    if bad := [token for token in ids if not 0 <= token < pair.target.vocab_size]:
        size = pair.target.vocab_size
        raise UserError(
            f"{given.place} has token {bad[0]}, the vocabulary ends at {size - 1}. Give responses"
            " of pair.target"
        )
    return torch.tensor(_cut(ids, pair.eos_ids, max_new))


def _encoded(content: str | Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Sequence[int]:
    if not isinstance(content, str):
        return content
    ids: list[int] = tokenizer(content, add_special_tokens=False)["input_ids"]
    return ids


def _end(pair: ModelPair) -> list[int]:
    """The end token: of several the tokenizer's."""
    own = pair.tokenizer.eos_token_id
    return [own] if own in pair.eos_ids else list(pair.eos_ids[:1])


def _cut(ids: Sequence[int], ends: Collection[int], most: int) -> list[int]:
    first = next((place for place, token in enumerate(ids) if token in ends), len(ids))
    return list(ids[: min(first + 1, most)])
