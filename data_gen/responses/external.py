"""External responses, read from a file or asked of a server, and their conversion to the tokens
that the models are run along."""

import hashlib
import pathlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import takewhile
from typing import Annotated, Any, Protocol, TypeGuard

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data_gen.prompts import Prompt
from data_gen.prompts.render import prompt_ids
from data_gen.requests import Request, reach
from data_gen.settings import HarvestSettings
from decoding.models.ends import closing_id
from decoding.models.loading import ModelPair
from runtime.errors import UserError
from runtime.json_lines import is_text, read_objects
from runtime.settings.kinds import Path

FORM = (
    'Write {"id": <prompt id>, "response": <text>} or {"id": ..., "response_tokens": [<token ids>]}'
)

REASONS = ("stop", "length", None)  # finish_reason if the text is the target's whole response
CALLS = ("tool_calls", "function_call")  # finish_reason if only the ids are


@dataclass(frozen=True)
class ExternalResponse:
    """An external response. content: text or token ids; finished: it was not cut for its length;
    where: config key and line of its origin, with which errors about it begin; stopped_by: the
    token id or text that ended it, if known; date: day it was asked for, if the chat template reads
    the clock; asked: ids of the prompt as it was asked, if known."""

    prompt_id: str
    content: str | Sequence[int]
    finished: bool
    where: str
    stopped_by: int | str | None = None
    date: str | None = None
    asked: Sequence[int] | None = None


class Source(Protocol):
    """A source of responses."""

    external: bool
    """Whether they are made elsewhere."""
    own_clock: bool
    """Whether prompts are rendered there, on the day they are asked."""

    def fetch(
        self, prompts: Sequence[Prompt], settings: HarvestSettings, out: pathlib.Path, ask: bool
    ) -> Mapping[str, ExternalResponse] | None:
        """Return a response to each of `prompts`, by id; None if the target generates them here.

        out: folder of the dataset, where responses may be stored as they arrive; ask: whether a
        server may be asked."""
        ...


class Generated:
    """The source of responses that the target generates here, a batch of prompts at a time
    (`data_gen.answers`)."""

    external = own_clock = False

    def fetch(
        self, prompts: Sequence[Prompt], settings: HarvestSettings, out: pathlib.Path, ask: bool
    ) -> None:
        return None


def response_from_row(row: Mapping[str, Any], where: str) -> ExternalResponse:
    """Return a response from a JSON object with `id`, `response` or `response_tokens`, and perhaps
    `finish_reason` and `stop_reason`.

    One that finished ("stop" in OpenAI's API) ends with the target's end token, which text does not
    show, unless `stop_reason` names something else (a text, or a token that is no end): then it was
    cut."""
    name, text, tokens = row.get("id"), row.get("response"), row.get("response_tokens")
    if not isinstance(name, str | int) or (text is None) == (tokens is None):
        raise UserError(f"{where} is no response (it has {', '.join(row) or 'nothing'}). {FORM}")
    content: Any = text if tokens is None else tokens
    reason, stopped_by = row.get("finish_reason"), row.get("stop_reason")
    if reason not in (REASONS if tokens is None else (*REASONS, *CALLS)) or not (
        stopped_by is None or type(stopped_by) in (int, str)
    ):
        raise UserError(
            f"{where} has finish_reason {reason!r} and stop_reason {stopped_by!r}. Write"
            ' "finish_reason": "stop" where the target ended the response itself, "length" where it'
            " was cut; take out prompts whose responses are not all that the target said"
        )
    finished = reason not in ("length", None)
    if text is not None and not is_text(text):
        raise UserError(f"{where} has a response that is no text. {FORM}")
    if tokens is not None and not is_ids(tokens):
        raise UserError(f"{where} has response_tokens that are no list of whole numbers. {FORM}")
    if not (content or finished):
        remedy = (
            'Take that prompt out of the dataset, or add "finish_reason": "stop" if the target'
            " ended it at once"
        )
        raise UserError(f"{where} has an empty response. {remedy}")
    day = row.get("date")
    try:
        day = None if day is None else date.fromisoformat(day).isoformat()
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{where} has a date that is none ({day}). Write it as 2026-01-31, or leave it out"
        ) from error
    asked = row.get("prompt_tokens")
    if not (asked is None or is_ids(asked)):
        raise UserError(f"{where} has prompt_tokens that are no list of whole numbers. {FORM}")
    return ExternalResponse(str(name), content, finished, where, stopped_by, day, asked)


class ResponseFile:
    """`path`: one object a line with a prompt's `id` and its `response` (text) or `response_tokens`
    (ids).

    With ``"finish_reason": "stop"`` a response ends with the target's end token. Further fields,
    blank lines, and responses to prompts that are not in the dataset are left alone."""

    external, own_clock = True, False

    def __init__(
        self,
        path: Annotated[
            Path,
            'file with {"id": <prompt id>, "response": <text>} or {"id": ..., "response_tokens":'
            ' [...]} a line, and "finish_reason": "stop" where the target ended it',
        ],
    ) -> None:
        self.path = pathlib.Path(path).expanduser()

    def fetch(
        self, prompts: Sequence[Prompt], settings: HarvestSettings, out: pathlib.Path, ask: bool
    ) -> dict[str, ExternalResponse]:
        """Read the responses. Raises UserError naming a line that is no response, or a prompt that
        has none or two."""
        if not self.path.is_file():
            raise UserError(
                f"responses.path: there is no file {self.path}. Set responses.path=<a JSONL file>"
            )
        responses: dict[str, ExternalResponse] = {}
        for at, _, row in read_objects(self.path, "responses.path", FORM):
            where = f"responses.path: {at}"
            response = response_from_row(row, where)
            if first := responses.get(response.prompt_id):
                earlier = first.where.rpartition(" ")[2]
                raise UserError(
                    f"{where} answers {response.prompt_id} again (line {earlier} did). Remove one"
                    " of them"
                )
            responses[response.prompt_id] = response
        if missing := [prompt.id for prompt in prompts if prompt.id not in responses]:
            raise UserError(
                f"responses.path: {self.path} has no response to {missing[0]} ({len(missing)} of"
                f" {len(prompts)} prompts lack one). Add a line with its id, or take it out of the"
                " dataset"
            )
        return responses


@dataclass(frozen=True)
class GoingOn:
    """How conversations go on after external responses. render: `data_gen.prompts.render.as_asked`;
    ends: that end a response; most: tokens of one; room: most tokens of a prompt."""

    render: Callable[[Sequence[Prompt]], list[Prompt]]
    tokenizer: Callable[[], PreTrainedTokenizerBase]
    ends: Callable[[], Collection[int]]
    most: int
    room: int

    def next_turn(self, prompt: Prompt, response: ExternalResponse) -> Prompt | None:
        """Return the next turn after a response, of which only what is recorded is said; None where
        it does not fit and is left out (`Prompt.too_long`)."""
        tokenizer, text = self.tokenizer(), response.content
        if isinstance(text, str):
            ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            text = text if len(ids) <= self.most else str(tokenizer.decode(ids[: self.most]))
        else:
            ends = self.ends()
            said = list(takewhile(lambda token: token not in ends, text[: self.most]))
            if any(not 0 <= token < 1 << 31 for token in said):
                raise UserError(f"{response.where} has tokens that are none. {FORM}")
            text = str(tokenizer.decode(said, skip_special_tokens=True))
        after = prompt.answered(text)
        fits = after is None or len(prompt_ids(after, tokenizer, sys.maxsize)) <= self.room
        return after if fits or prompt.too_long == "error" else None


def fetched(
    source: Source,
    prompts: Sequence[Prompt],
    settings: HarvestSettings,
    out: pathlib.Path,
    ask: bool,
    on: GoingOn,
) -> tuple[list[Prompt], dict[str, ExternalResponse] | None]:
    """Return the prompts as they were asked, and a response to each, by id; None if the target
    generates them here. Where a response is the answer that a conversation goes on from, the next
    turn is a prompt, too. out, ask: as in `Source.fetch`. Raises UserError for prompts that are
    cut, where another program is asked."""
    if source.external and any(prompt.cut for prompt in prompts):
        raise UserError(
            "dataset.cut: responses made elsewhere follow the whole prompt. Use responses=generate,"
            " or cut the texts themselves"
        )
    wave, asked, responses = on.render(prompts), list[Prompt](), dict[str, ExternalResponse]()
    if source.external:
        for prompt in wave:
            reach(prompt, on.tokenizer, on.most, on.room + on.most)
    while wave:
        given = source.fetch(wave, settings, out, ask)
        if given is None:
            return wave, None
        wave, later = asked_on(wave, given), list[Prompt | None]()
        for prompt in wave:
            response = responses[prompt.id] = given[prompt.id]
            later += [on.next_turn(prompt, response)] if prompt.then else []
            asked.append(replace(prompt, then=()))
        wave = on.render([prompt for prompt in later if prompt])
    return asked, responses


def asked_on(prompts: Sequence[Prompt], responses: Mapping[str, ExternalResponse]) -> list[Prompt]:
    """Return the prompts with the dates of their responses, if the chat template reads the
    clock."""
    dates = {name: response.date for name, response in responses.items()}
    return [
        replace(prompt, date=prompt.date and (dates.get(prompt.id) or prompt.date))
        for prompt in prompts
    ]


def is_ids(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(token) is int for token in value)


def with_responses(
    requests: Sequence[Request],
    responses: Mapping[str, ExternalResponse] | None,
    pair: ModelPair,
    max_new: int,
) -> list[Request]:
    """Return requests with their external responses, by prompt id, cut at `max_new` tokens and
    after the first end token; unchanged if `responses` is None. Raises UserError for a response to
    other tokens than the request's."""
    if responses is None:
        return list(requests)
    for request in requests:
        refuse_other_prompt(request, responses[request.prompt_id], pair)
    return [
        replace(r, response=response_ids(responses[r.prompt_id], pair, max_new)) for r in requests
    ]


def refuse_other_prompt(request: Request, response: ExternalResponse, pair: ModelPair) -> None:
    ours, theirs = request.tokens.tolist(), response.asked
    if theirs is None or list(theirs) == ours:
        return
    pairs = enumerate(zip(ours, theirs, strict=False))
    place = next((n for n, (one, other) in pairs if one != other), min(len(ours), len(theirs)))
    shown = [pair.tokenizer.decode(list(ids)[place : place + 8]) for ids in (ours, theirs)]
    raise UserError(
        f"{response.where}: the prompt {request.prompt_id} was asked with other tokens than ours,"
        f" from token {place} on: {shown[1]!r} there, {shown[0]!r} here. Give the server the chat"
        " template and tokenizer of pair.target (dataset.template gives arguments to both), or"
        " choose another out=..."
    )


def seed_of(seed: int, prompt: Prompt) -> int:
    """Return the seed, of 31 bits, with which an engine answers a prompt."""
    name = f"{seed}/server/{prompt.id}".encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:4], "big") >> 1


def response_ids(response: ExternalResponse, pair: ModelPair, max_new: int) -> Tensor:
    """Return a response's ids [T] int64, 1 <= T <= max_new. Raises UserError for ids beyond the
    vocabulary, text without a token, and text that spells out an end token which might be the
    end."""
    ids, ends, stopped_by = list(_encoded(response, pair)), pair.eos_ids, response.stopped_by
    if isinstance(stopped_by, str):  # SGLang spells some end tokens
        names: dict[Any, int] = {pair.tokenizer.convert_ids_to_tokens(end): end for end in ends}
        stopped_by = names.get(stopped_by, stopped_by)
    if response.finished and (stopped_by is None or stopped_by in ends) and not {*ends} & {*ids}:
        ids.append(closing_id(pair.tokenizer, ends) if stopped_by is None else int(stopped_by))
    if not ids:
        raise UserError(
            f"{response.where} has a response without a token. Take that prompt out of the dataset"
        )
    size = pair.target.vocab_size
    if bad := [token for token in ids if not 0 <= token < size]:
        raise UserError(
            f"{response.where} has token {bad[0]}, the vocabulary ends at {size - 1}. Give"
            " responses of pair.target"
        )
    first = next((index for index, token in enumerate(ids) if token in ends), len(ids))
    return torch.tensor(ids[: min(first + 1, max_new)])


def _encoded(response: ExternalResponse, pair: ModelPair) -> Sequence[int]:
    """Return the ids of a response. Special tokens that a text spells out are encoded as ordinary
    text, since servers leave out those that the target sampled. Raises UserError for an end token
    at the end of a text, which shows that they were not left out."""
    content, tokenizer = response.content, pair.tokenizer
    if not isinstance(content, str):
        return content
    ids: list[int] = tokenizer(content, add_special_tokens=False, split_special_tokens=True)[
        "input_ids"
    ]
    for end in pair.eos_ids:
        name: Any = tokenizer.convert_ids_to_tokens(end)
        if end in ids or (name and content.rstrip().endswith(name)):
            raise UserError(
                f"{response.where} spells out the end token {name} in its text. Leave special"
                ' tokens out (skip_special_tokens) and write "finish_reason": "stop", or give token'
                " ids (response_tokens, return_token_ids)"
            )
    return ids
