"""A server on loopback that speaks just enough of OpenAI's API, and fails in chosen ways; and
prompts that it is asked about."""

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from data_gen.prompts import Prompt
from data_gen.responses.external import ExternalResponse
from data_gen.responses.log import NAME
from data_gen.responses.server import Server
from data_gen.settings import HarvestSettings
from decoding.sampling import Warp
from tests.helpers.data.datasets import SAMPLED
from tests.helpers.data.hub_stub import served

Behaviour = Callable[[str, int], str]
"""What happens to the n-th request (from 0) about a prompt: "ok", "hang", "reset", "garbage", ...
or a status."""


@dataclass
class Stub:
    """What the server has seen. tries: requests by prompt text; under_way, most: requests at a
    time."""

    behave: Behaviour
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    tries: Counter[str] = field(default_factory=Counter)
    under_way: int = 0
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def text_of(body: dict[str, Any]) -> str:
    return body["prompt"] if "prompt" in body else body["messages"][-1]["content"]


def completion(
    body: dict[str, Any], text: str | None, finish: Any = "stop", **fields: Any
) -> dict[str, Any]:
    """fields: of the message, or of the choice where its name begins with `choice_`."""
    choice = {
        k.removeprefix("choice_"): fields.pop(k) for k in [*fields] if k.startswith("choice_")
    }
    message = {"role": "assistant", "content": text, **fields}
    said = {"text": text} if "prompt" in body else {"message": message}
    choices = [{"index": 0, "finish_reason": finish, **said, **choice}]
    return {"choices": choices, "model": body["model"]}


REPLIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "ok": lambda body: completion(body, f"w5 {text_of(body)}"),
    "cut": lambda body: completion(body, f"w5 {text_of(body)}", "length"),
    "twice": lambda body: {"choices": completion(body, "w5 w6")["choices"] * 2},
    "ended": lambda body: completion(body, ""),
    "empty": lambda body: completion(body, "", "length"),
    "abort": lambda body: completion(body, "w5", "abort"),
    "content_filter": lambda body: completion(body, "w5", "content_filter"),
    "unfinished": lambda body: completion(body, "w5", None),
    "an object": lambda body: completion(body, "w5", {"type": "stop"}),
    "null": lambda body: completion(body, None),
    "thinks": lambda body: completion(body, "w5", reasoning_content="w6 w7"),
    "half": lambda body: completion(body, "w5 \ud800 w6"),
    "ids": lambda body: completion(body, "w5", choice_token_ids=[5, 6, 0]),
    "stop string": lambda body: completion(body, "w5", choice_stop_reason="w6"),
    "an end": lambda body: completion(body, "w5", choice_stop_reason=7),
    "matched": lambda body: completion(body, "w5", choice_matched_stop=7),
    "no reason": lambda body: completion(body, "w5", choice_stop_reason=None),
    "calls with ids": lambda body: completion(
        body, None, "tool_calls", choice_token_ids=[5, 0], tool_calls=[{}]
    ),
    "named ids": lambda body: completion(body, "w5", choice_token_ids=[5, "w6"]),
    "real ids": lambda body: completion(body, "w5", choice_token_ids=[5.0, 6.0]),
    "one id": lambda body: completion(body, "w5", choice_token_ids=5),
    "no choices": lambda body: {"choices": []},
    "a list": lambda body: [1, 2],
}


@contextmanager
def stub_server(behave: Behaviour = lambda text, attempt: "ok") -> Iterator[Stub]:
    stub = Stub(behave)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with stub.lock:
                stub.bodies.append(body)
                stub.paths.append(self.path)
                stub.keys.append(self.headers["Authorization"])
                attempt = stub.tries[text_of(body)]
                stub.tries[text_of(body)] += 1
                stub.under_way += 1
                stub.most = max(stub.most, stub.under_way)
            time.sleep(0.01)
            with stub.lock:
                stub.under_way -= 1
            self.react(stub.behave(text_of(body), attempt), body)

        def react(self, action: str, body: dict[str, Any]) -> None:
            if action == "hang":
                time.sleep(1)
            elif action == "reset":
                self.connection.shutdown(socket.SHUT_RDWR)  # files over it are still open
            elif action == "short":
                self.send(200, json.dumps(REPLIES["ok"](body)).encode(), missing=10)
            elif action == "garbage":
                self.send(200, b"<html>busy</html>\nmore")
            elif action == "deep":
                self.send(200, b"[" * 100_000)
            elif action in REPLIES:
                self.send(200, json.dumps(REPLIES[action](body)).encode())
            else:
                text = f"went wrong: {action} {self.headers['Authorization']}\nmore"
                self.send(int(action), text.encode())

        def send(self, status: int, content: bytes, missing: int = 0) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content) + missing))
            self.end_headers()
            self.wfile.write(content)
            self.close_connection = missing > 0

        def log_message(self, *args: Any) -> None:
            pass

    with served(Handler) as address:
        stub.url = f"{address}/v1"
        yield stub


PROMPTS = [Prompt(f"p{number}", "toy", "", f"w{number + 1} w2", chat=False) for number in range(20)]
NUCLEUS = replace(SAMPLED, warp=Warp(0.7, top_p=0.9))


def server(url: str, **changed: Any) -> Server:
    extra = OmegaConf.create(changed.pop("extra", {}))
    settings = {"concurrency": 4, "timeout": 2.0, "retries": 3, "key_variable": None, **changed}
    return Server(url, "tiny", **settings, extra=extra)


def fetch(
    url: str,
    out: Path,
    recipe: HarvestSettings = NUCLEUS,
    prompts: list[Prompt] = PROMPTS,
    **changed: Any,
) -> dict[str, ExternalResponse]:
    return server(url, **changed).fetch(prompts, recipe, out, ask=True)


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / NAME).read_text().splitlines()]
