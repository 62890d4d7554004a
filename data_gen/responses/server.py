"""External responses, asked of a server that speaks OpenAI's API: vLLM, SGLang, llama.cpp,
`transformers serve`.

What arrives is kept in `answers.jsonl` in the folder of the dataset, a line at a time; the next run
asks for the rest."""

import asyncio
import hashlib
import os
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
from omegaconf import OmegaConf
from pydantic import Field
from tqdm import tqdm

from data_gen.prompts import Prompt
from data_gen.prompts.render import turns
from data_gen.responses.external import ExternalResponse, is_ids
from data_gen.responses.log import ResponseLog, open_log
from data_gen.settings import HarvestSettings
from runtime.errors import UserError
from runtime.json_lines import is_text
from runtime.settings.kinds import Address, Text, Variable

PAUSE, LONGEST_PAUSE = (
    1.0,
    60.0,
)  # seconds before the first retry, twice as long before each further one
SENDABLE = r"[!-~]*"  # what an API key is made of
WHOLE = (
    "stop",
    "length",
)  # the finish_reason of a response that the target ended, or max_tokens did
SHOWN = 200  # most characters of a reply in an error
PASSING = {408, 409, 425, 429}  # besides 5xx: what may go well when asked again


class Passing(Exception):
    """What may go well when asked again."""


@dataclass(frozen=True)
class Server:
    """Where and how to ask.

    extra: for what OpenAI's API has no name for."""

    url: Annotated[Address, "of the server, ends in /v1"]
    model: Annotated[Text, "as the server calls it"]
    concurrency: Annotated[int, Field(ge=1, le=1000), "requests under way at a time"]
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

    external = True

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
        """Ask for the responses that `out` has not got yet. Raises UserError when one cannot be
        had; what has arrived stays."""
        with open_log(out, self.asked(settings)) as log:
            missing = log.missing(list(prompts))
            if missing and not ask:
                raise UserError(
                    f"estimate: {len(missing)} responses are still to be asked from {self.url},"
                    " which takes as long as it takes. Run without estimate=true"
                )
            if missing:
                asyncio.run(self._ask_all(missing, settings, log))
            return log.responses

    def asked(self, settings: HarvestSettings) -> dict[str, Any]:
        """The fields of every request. `top_k` is no part of OpenAI's API: sent only where it is
        used."""
        warp = settings.warp
        return {
            "model": self.model,
            "temperature": warp.temperature,
            "top_p": warp.top_p,
            **({"top_k": warp.top_k} if warp.top_k else {}),
            "max_tokens": settings.max_new_tokens,
            "seed": settings.seed,  # each prompt gets its own, made of this one
            **OmegaConf.to_container(OmegaConf.create(self.extra)),  # type: ignore[dict-item]
        }

    async def _ask_all(
        self, prompts: Sequence[Prompt], settings: HarvestSettings, log: ResponseLog
    ) -> None:
        """Some workers take prompts from one list, so that `concurrency` requests are always under
        way."""
        left = iter(prompts)
        headers = {"Authorization": f"Bearer {self._key()}"} if self._key() else {}
        limits = httpx.Limits(
            max_connections=self.concurrency, max_keepalive_connections=self.concurrency
        )
        async with httpx.AsyncClient(headers=headers, timeout=None, limits=limits) as client:
            with tqdm(total=len(prompts), unit=" prompts", desc="responses") as bar:
                workers = (
                    self._work(client, left, settings, log, bar) for _ in range(self.concurrency)
                )
                await asyncio.gather(*workers)

    async def _work(
        self,
        client: httpx.AsyncClient,
        prompts: Iterator[Prompt],
        settings: HarvestSettings,
        log: ResponseLog,
        bar: tqdm,
    ) -> None:
        for prompt in prompts:
            log.append(prompt, await self._ask(client, prompt, settings))
            bar.update()

    async def _ask(
        self, client: httpx.AsyncClient, prompt: Prompt, settings: HarvestSettings
    ) -> dict[str, Any]:
        body = {
            **self.asked(settings),
            "seed": seed_of(settings.seed, prompt.id),
            **question(prompt),
        }
        address = f"{self.url.rstrip('/')}/{'chat/completions' if prompt.chat else 'completions'}"
        for attempt in range(self.retries + 1):
            try:
                reply = await asyncio.wait_for(client.post(address, json=body), self.timeout)
                return self._answer(prompt, reply)
            except (TimeoutError, Passing, httpx.TransportError, httpx.DecodingError) as error:
                problem = self._first_line(str(error) or type(error).__name__)
            if attempt < self.retries:
                await asyncio.sleep(pause(attempt))
        raise UserError(
            f"responses.url: {address} gave no response to {prompt.id} in {self.retries + 1} tries"
            f" ({problem}). Check the server, responses.timeout and responses.retries, and run"
            " again: what has arrived is kept"
        )

    def _answer(self, prompt: Prompt, reply: httpx.Response) -> dict[str, Any]:
        """What the log keeps of a reply. Raises `Passing` where another try may help, UserError
        where it will not."""
        status, said = reply.status_code, self._first_line(reply.text)
        if status in PASSING or status >= 500:
            raise Passing(f"status {status}: {said}")
        if status != 200:
            raise UserError(
                f"responses.url: {reply.url} refuses {prompt.id} with status {status}: {said}."
                " Check responses.url, responses.model and responses.key_variable"
            )
        try:
            choice = reply.json()["choices"][0]
            message = choice["message"] if prompt.chat else choice
            text = message.get("content" if prompt.chat else "text")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise Passing(f"not a completion: {said}") from error
        return self._checked(prompt, choice, message, text)

    def _checked(
        self, prompt: Prompt, choice: Mapping[str, Any], message: Mapping[str, Any], text: Any
    ) -> dict[str, Any]:
        """Raises `Passing` for a response that was broken off, UserError for one that is empty
        though the target said something, is only part of it, or is neither text nor ids."""
        finish = choice.get("finish_reason")
        if (
            message.get("reasoning_content")
            or message.get("reasoning")
            or message.get("tool_calls")
        ):
            raise UserError(
                "responses.url: the server takes reasoning or tool calls out of its response to"
                f" {prompt.id}. Start it without a reasoning or tool parser, so that the response"
                " is all that the target said"
            )
        if finish not in WHOLE:
            raise Passing(f"finish_reason {finish}")
        tokens = choice.get("token_ids")  # of vLLM with return_token_ids
        if tokens:
            if not is_ids(tokens):
                raise UserError(
                    f"responses.url: {self.url} gives token_ids to {prompt.id} that are no list of"
                    " whole numbers. Leave out responses.extra.return_token_ids, or check the"
                    " server"
                )
            return {"response_tokens": tokens, "finish_reason": finish}
        if isinstance(text, str) and not is_text(text):
            raise UserError(
                f"responses.url: {self.url} gives a response to {prompt.id} that is no text (it"
                " holds half a character). Check the server, or take that prompt out of the"
                " dataset"
            )
        if not isinstance(text, str) or not (text or finish == "stop"):
            raise UserError(
                f"responses.url: {self.url} gives an empty response to {prompt.id} (finish_reason "
                f"{finish}). Check the server, or take that prompt out of the dataset"
            )
        return {"response": text, "finish_reason": finish}

    def _first_line(self, text: str) -> str:
        """What is shown of a reply or an error: no API key."""
        shown = text.replace(self._key(), "***") if self._key() else text
        return (shown.strip().splitlines() or ["nothing"])[0][:SHOWN]

    def _key(self) -> str:
        """Empty where the server wants none."""
        return os.environ.get(self.key_variable, "") if self.key_variable else ""


def question(prompt: Prompt) -> dict[str, Any]:
    """A chat turn, or a text to be continued as it stands."""
    return {"messages": turns(prompt)} if prompt.chat else {"prompt": prompt.text}


def seed_of(seed: int, prompt_id: str) -> int:
    """A seed of 31 bits for one prompt."""
    return (
        int.from_bytes(hashlib.sha256(f"{seed}/server/{prompt_id}".encode()).digest()[:4], "big")
        >> 1
    )


def pause(attempt: int) -> float:
    """Seconds before trying again, with some chance in it, so that many requests do not come back
    at once."""
    return min(LONGEST_PAUSE, PAUSE * 2**attempt) * random.uniform(0.5, 1.0)
