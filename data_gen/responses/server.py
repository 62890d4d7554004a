"""External responses, asked of a server that speaks OpenAI's API: vLLM, SGLang, llama.cpp,
`transformers serve`.

Responses are kept in `answers.jsonl` in the folder of the dataset, a line at a time; the next run
asks for the rest. Further fields of a request may be set, except for those with which a server
would not answer what the harvest asks for: another distribution, length, prompt or form."""

import asyncio
import json
import os
import random
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import date
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import httpx
from omegaconf import OmegaConf
from pydantic import Field
from tqdm import tqdm

from data_gen.prompts import Prompt
from data_gen.prompts.render import turns
from data_gen.responses.external import CALLS, ExternalResponse, is_ids, seed_of
from data_gen.responses.log import ResponseLog, open_log
from data_gen.settings import HarvestSettings
from decoding.sampling import Warp
from runtime.errors import UserError
from runtime.json_lines import is_text
from runtime.settings.kinds import Address, Addresses, Text, Variable

# seconds before the first retry, twice as long before each further one
PAUSE, LONGEST_PAUSE = 1.0, 60.0
DEAD = 3  # failures of a server in a row
SENDABLE = r"[!-~]*"  # characters of an API key
# the finish_reason of a response that the target ended, or max_tokens did
WHOLE = ("stop", "length")
SHOWN = 200  # most characters of a reply in an error
PASSING = {408, 409, 425, 429}  # status codes, besides 5xx, after which a retry may succeed
BUSY = 429
ARGUMENTS = "chat_template_kwargs"


class Passing(Exception):
    """A failure after which a retry may succeed."""


class Later(Passing):
    """A failure that says nothing about the server, after which a retry may succeed."""


FAILURES = (TimeoutError, Passing, httpx.TransportError, httpx.DecodingError)


class Servers:
    """Several servers of one model, of which the least busy one is asked, for `most` responses at a
    time. One that fails `DEAD` times in a row is left out, and named, as long as there is another;
    requests that were under way when it failed count as one."""

    def __init__(self, alive: Sequence[str], most: int, shown: Callable[[Exception], str]) -> None:
        self.alive, self._shown = list(alive), shown
        self._free = {url: asyncio.Semaphore(most) for url in alive}
        self._busy, self._failures, self._counted = Counter[str](), Counter[str](), Counter[str]()
        self._moments = count(1)

    @asynccontextmanager
    async def least_busy(self, aside: Collection[str]) -> AsyncIterator[str]:
        """Reserve a server, none of `aside` if there is another, and count how it fares."""
        others = [url for url in self.alive if url not in aside]
        url = min(others or self.alive, key=lambda each: self._busy[each])
        self._busy[url] += 1
        try:
            async with self._free[url]:
                began = next(self._moments)
                yield url
            self._failures[url], self._counted[url] = 0, next(self._moments)
        except FAILURES as error:
            if not isinstance(error, Later) and began > self._counted[url]:
                self._failures[url] += 1
                self._counted[url] = next(self._moments)
                self._leave_out(url, error)
            raise
        finally:
            self._busy[url] -= 1

    def _leave_out(self, url: str, error: Exception) -> None:
        if self._failures[url] >= DEAD and url in self.alive and len(self.alive) > 1:
            self.alive.remove(url)
            print(
                f"note: responses.url: {url} is left out, it fails ({self._shown(error)}). Others:"
                f" {len(self.alive)}",
                file=sys.stderr,
            )


@dataclass(frozen=True)
class Server:
    """The server to ask, and the settings of its requests.

    extra: fields for which OpenAI's API has no name."""

    url: Annotated[
        Address | Addresses, "of the server, ends in /v1; or a list of several that serve the model"
    ]
    model: Annotated[Text, "as the server calls it"]
    concurrency: Annotated[
        int, Field(ge=1, le=1000), "requests under way at a time, of each server"
    ]
    timeout: Annotated[float, Field(gt=0, le=86400), "seconds of one request"]
    retries: Annotated[
        int, Field(ge=0, le=1000), "further tries of one request, 1, 2, 4, ... 60 seconds apart"
    ]
    key_variable: Annotated[
        Variable | None, "environment variable that holds the API key, where the server wants one"
    ]
    extra: Annotated[
        dict[str, Any],
        "more fields of every request, such as +responses.extra.return_token_ids=true (vLLM: exact"
        " tokens)",
    ]

    external = own_clock = True

    def __post_init__(self) -> None:
        if self.key_variable and not self._key():
            raise UserError(
                f"responses.key_variable: {self.key_variable} is not set. Put the API key into it"
            )
        if not re.fullmatch(SENDABLE, self._key()):
            raise UserError(
                f"responses.key_variable: {self.key_variable} holds blanks, line ends or other"
                " characters that no API key has. Put the key alone into it"
            )

    def fetch(
        self, prompts: Sequence[Prompt], settings: HarvestSettings, out: Path, ask: bool
    ) -> dict[str, ExternalResponse]:
        """Ask for the responses that `out` does not have yet. Raises UserError if one cannot be
        had; those that have arrived are kept."""
        fields = self.asked(settings)
        given = fields.get(ARGUMENTS)
        for prompt in prompts:
            if given is not None and given != dict(prompt.template):
                raise UserError(
                    f"responses.extra.{ARGUMENTS}: expected {dict(prompt.template)}, as"
                    f" dataset.template, got {given}: prompts would be rendered otherwise here. Set"
                    " dataset.template, which the server is sent too, and leave it out"
                )
        template = dict(prompts[0].template) if prompts else {}
        with open_log(out, fields | ({ARGUMENTS: template} if template else {})) as log:
            missing = log.missing(list(prompts))
            if missing and not ask:
                raise UserError(
                    f"estimate: {len(missing)} responses are still to be asked from {self.url},"
                    " which takes as long as it takes. Run without estimate=true"
                )
            if missing:
                asyncio.run(self._ask_all(missing, fields, log))
            return log.responses

    def asked(self, settings: HarvestSettings) -> dict[str, Any]:
        """Return the fields of every request. `top_k`, which is not in OpenAI's API, is sent only
        if it is used. Raises UserError if `extra` would change the answers."""
        warp, most = Warp(**settings.warp.fields()), settings.max_new_tokens
        extra = OmegaConf.to_container(OmegaConf.create(self.extra))
        asked = {
            **{"model": self.model, "seed": settings.seed},
            **{"temperature": warp.temperature, "topp": warp.top_p, "topk": warp.top_k},
            "dosample": warp.temperature > 0,
            **dict.fromkeys(("maxtokens", "maxcompletiontokens", "maxnewtokens"), most),
        }
        refuse_changes(extra, asked)
        return {
            "model": self.model,
            "temperature": warp.temperature,
            "top_p": warp.top_p,
            **({"top_k": warp.top_k} if warp.top_k else {}),
            "max_tokens": most,
            "seed": settings.seed,  # each prompt gets its own seed, derived from this one
            **extra,  # type: ignore[dict-item]
        }

    async def _ask_all(
        self, prompts: Sequence[Prompt], fields: Mapping[str, Any], log: ResponseLog
    ) -> None:
        """Let workers take prompts from one list, so that `concurrency` requests are always in
        progress."""
        urls = [self.url] if isinstance(self.url, str) else list(self.url)
        servers = Servers(urls, self.concurrency, self._reason)
        left, most = iter(prompts), self.concurrency * len(urls)
        headers = {"Authorization": f"Bearer {self._key()}"} if self._key() else {}
        limits = httpx.Limits(max_connections=most, max_keepalive_connections=most)

        async def work() -> None:
            for prompt in left:
                log.append(prompt, await self._ask(client, servers, prompt, fields))
                bar.update()

        async with httpx.AsyncClient(headers=headers, timeout=None, limits=limits) as client:
            with tqdm(total=len(prompts), unit=" prompts", desc="responses") as bar:
                await asyncio.gather(*(work() for _ in range(most)))

    async def _ask(
        self,
        client: httpx.AsyncClient,
        servers: "Servers",
        prompt: Prompt,
        fields: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the log's entry for the answer to a chat turn, with the arguments of the chat
        template, or to a text to be continued as it stands."""
        question: dict[str, Any] = (
            {"messages": [*map(as_sent, turns(prompt))]} if prompt.chat else {"prompt": prompt.text}
        )
        if prompt.tools:
            question["tools"] = [*prompt.tools]
        if prompt.chat and prompt.template:
            question[ARGUMENTS] = dict(prompt.template)
        body = {**fields, "seed": seed_of(fields["seed"], prompt), **question}
        kind, attempt, asked = "chat/completions" if prompt.chat else "completions", 0, set[str]()
        while True:
            try:
                async with servers.least_busy(asked) as url:
                    address = f"{url.rstrip('/')}/{kind}"
                    return await self._answered(client, address, prompt, body)
            except FAILURES as error:
                problem = self._reason(error)
            asked.add(url)
            if not asked.issuperset(servers.alive):
                continue  # another one, at once
            if attempt == self.retries:
                break
            await asyncio.sleep(pause(attempt))
            attempt, asked = attempt + 1, set()
        raise UserError(
            f"responses.url: {address} gave no response to {prompt.id} in {self.retries + 1} tries"
            f" ({problem}). Check the server, responses.timeout and responses.retries, and run"
            " again: what has arrived is kept"
        )

    async def _answered(
        self, client: httpx.AsyncClient, address: str, prompt: Prompt, body: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the log's entry for one request. Raises one of `FAILURES` if a retry may help."""
        day = today()
        reply = await asyncio.wait_for(client.post(address, json=body), self.timeout)
        answer = self._answer(prompt, reply)
        if prompt.date is None:
            return answer
        if day != today():
            raise Later("a new day, which the prompt tells")
        return {**answer, "date": day}

    def _answer(self, prompt: Prompt, reply: httpx.Response) -> dict[str, Any]:
        """Return the log's entry for a reply. Raises `Passing` if a retry may help, UserError if it
        will not."""
        status, shown = reply.status_code, self._first_line(reply.text)
        if status in PASSING or status >= 500:
            kind = Later if status == BUSY else Passing
            raise kind(f"status {status}: {shown}")
        if status != 200:
            raise UserError(
                f"responses.url: {reply.url} refuses {prompt.id} with status {status}: {shown}."
                " Check responses.url, responses.model and responses.key_variable"
            )
        try:
            whole = reply.json()
            choice = whole["choices"][0]
            message = choice["message"] if prompt.chat else choice
            text = message.get("content" if prompt.chat else "text")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise Passing(f"not a completion: {shown}") from error
        answer = self._checked(prompt, choice, message, text)
        asked = choice.get("prompt_token_ids", whole.get("prompt_token_ids"))  # vLLM
        return {**answer, "prompt_tokens": asked} if is_ids(asked) else answer

    def _checked(
        self, prompt: Prompt, choice: Mapping[str, Any], message: Mapping[str, Any], text: Any
    ) -> dict[str, Any]:
        """Return the checked response. Raises `Passing` for one that was broken off, UserError for
        one that is empty although the target sampled tokens, is incomplete, or is neither text nor
        ids."""
        finish, tokens = choice.get("finish_reason"), choice.get("token_ids")  # of vLLM
        hidden = ("reasoning_content", "reasoning", "tool_calls")
        if not tokens and any(message.get(part) for part in hidden):
            raise UserError(
                "responses.url: the server takes reasoning or tool calls out of its response to"
                f" {prompt.id}. Start it without a reasoning or tool parser, so that the response"
                " is all that the target said, or ask for token ids"
                " (+responses.extra.return_token_ids=true)"
            )
        if finish not in ((*WHOLE, *CALLS) if tokens else WHOLE):
            raise Passing(f"finish_reason {finish}")
        stopped_by = choice.get("stop_reason", choice.get("matched_stop"))  # vLLM, SGLang
        ended = {"finish_reason": finish}
        if finish == "stop" and stopped_by is not None:
            ended["stop_reason"] = stopped_by
        if tokens and is_ids(tokens):
            return {"response_tokens": tokens, **ended}
        if not tokens and is_text(text) and (text or finish == "stop"):
            return {"response": text, **ended}
        take_out = "Check the server, or take that prompt out of the dataset"
        if tokens:
            problem = (
                f"token_ids to {prompt.id} that are no list of whole numbers. Leave out"
                " responses.extra.return_token_ids, or check the server"
            )
        elif isinstance(text, str) and text:
            problem = (
                f"a response to {prompt.id} that is no text (it holds half a character). {take_out}"
            )
        else:
            problem = f"an empty response to {prompt.id} (finish_reason {finish}). {take_out}"
        raise UserError(f"responses.url: {self.url} gives {problem}")

    def _reason(self, error: Exception) -> str:
        return self._first_line(str(error) or type(error).__name__)

    def _first_line(self, text: str) -> str:
        """Return the part of a reply or an error that may be shown, without the API key."""
        shown = text.replace(self._key(), "***") if self._key() else text
        return (shown.strip().splitlines() or ["nothing"])[0][:SHOWN]

    def _key(self) -> str:
        """Return the API key, empty if the server needs none."""
        return os.environ.get(self.key_variable, "") if self.key_variable else ""


def today() -> str:
    """Return the date on this machine."""
    return date.today().isoformat()


def as_sent(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as OpenAI's API takes it: with the arguments of tool calls as text."""
    calls = [dict(call) for call in message.get("tool_calls") or ()]
    for call in calls:
        function = dict(call.get("function") or {})
        if isinstance(function.get("arguments"), dict):
            call["function"] = function | {"arguments": json.dumps(function["arguments"])}
    return {**message, **({"tool_calls": calls} if calls else {})}


def pause(attempt: int) -> float:
    """Return the seconds before a retry, randomised so that many requests do not return at
    once."""
    return min(LONGEST_PAUSE, PAUSE * 2**attempt) * random.uniform(0.5, 1.0)


# Fields that may be set besides -------------------------------------------------------------------

# Names are without case and punctuation.
SETTING = {
    "model": "responses.model",
    "temperature": "warp.temperature",
    "topp": "warp.top_p",
    "topk": "warp.top_k",
    **dict.fromkeys(("maxtokens", "maxcompletiontokens", "maxnewtokens"), "max_new_tokens"),
    "seed": "seed",
}
# Fields that change answers, by patterns, since engines keep adding more.
CHANGES = re.compile(
    "^temp|temperature|dynatemp|^top(k|p|a|h|n)|topnsigma|minp|^typp$|typical|^tfs|mirostat|^xtc"
    "|^dry|epsiloncutoff|etacutoff|smoothing|sampler|dosample|watermark|guidance|^cfg|negative"
    "|penal|repeat|repetition|ngram|logit|bias|badwords|banned|suppress|forced|allowed|stop|eos|bos"
    "|maxlength|minlength|npredict|numpredict|tmaxpredict|maxtime|tokens$|budget|beam|bestof"
    "|returnseq|seed|stream|echo|suffix|guided|structur|responseformat|grammar|regex|schema|ebnf"
    "|lark|lora|adapter|truncat|transforms|prompt|template|messages|^inputs?$|inputids|embeds"
    "|^image|^audio|^video|multimodal|mmprocessor|mmdata|modalit|document|tool|function|reason"
    "|think|effort|verbosity|specialtokens|generationprompt|finalmessage|customparams|^nkeep"
    "|ndiscard|nindent|steering|greedy|^sampl|^decoding|^diversity|^system|^assistant|instruction"
    "|^end(id|token)|^until$|^prefi(x|ll)|^format|^raw$|history|^plugins|websearch|contextlength"
    "|^provider|quantiz|^n$|^models?$"
)
# Fields that match but change no answer, or do so only with certain values.
HARMLESS = re.compile(
    "logprob|cacheprompt|promptcache|streamoptions|skipspecialtokens|spacesbetweenspecialtokens"
)
OFF = (
    *("minp", "presencepenalty", "frequencypenalty", "norepeatngramsize", "mirostat"),
    *("xtcprobability", "drymultiplier", "dynatemprange", "epsiloncutoff", "etacutoff"),
    *("mintokens", "minnewtokens", "minlength"),
)
ONE = (
    *("typicalp", "typp", "repetitionpenalty", "repeatpenalty", "lengthpenalty"),
    *("n", "bestof", "numbeams", "numreturnsequences"),
)
UNSET = (
    *("ignoreeos", "stream", "echo", "usebeamsearch", "includestopstrinoutput", "earlystopping"),
    "continuefinalmessage",
)
NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(OFF, 0),
    **dict.fromkeys(ONE, 1),
    **dict.fromkeys(UNSET, False),
    **dict.fromkeys(("stop", "stoptokenids", "badwords"), []),
    "logitbias": {},
    "responseformat": {"type": "text"},
    "addgenerationprompt": True,
}


def refuse_changes(extra: Any, asked: Mapping[str, Any]) -> None:
    """Raise UserError for the first of the fields `extra`, at any depth, that would change the
    answers. asked: what the harvest asks for, by normalised name; a field may repeat that."""
    for path, name, value in _fields(extra):
        if name in asked:
            same = _equal(value, asked[name]) or (name, value, asked[name]) == ("topk", -1, 0)
        else:
            watched = CHANGES.search(name) and not HARMLESS.search(name)
            neutral = value is None or name in NEUTRAL and _equal(value, NEUTRAL[name])
            same = neutral or not watched
        if not same:
            setting = SETTING.get(name)
            remedy = f"Set {setting} instead" if setting else "Leave it out"
            raise UserError(
                f"responses.extra.{path}: expected a field that leaves the answers as they are,"
                f" got {json.dumps(value, default=str)[:80]}, which changes their distribution,"
                f" length, prompt or form. {remedy}"
            )


def _fields(values: Any, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield path, normalised name and value of every field, also in lists and in text that is
    JSON."""
    if isinstance(values, str) and values.lstrip().startswith(("{", "[")):
        try:
            values = json.loads(values)
        except ValueError:
            return
    if isinstance(values, list):
        for value in values:
            yield from _fields(value, path)
    if not isinstance(values, Mapping):
        return
    for key, value in values.items():
        if key == ARGUMENTS and not path:
            continue  # compared with dataset.template
        name = re.sub("[^a-z0-9]", "", str(key).lower())
        where = f"{path}.{key}".lstrip(".")
        yield where, name, value
        if name != "metadata":  # notes that a server keeps
            yield from _fields(value, where)


def _equal(value: Any, expected: Any) -> bool:
    return bool(value == expected) and isinstance(value, bool) == isinstance(expected, bool)
