"""Conversations in rows: messages as servers take them, ShareGPT's `conversations`, `turns`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from runtime.errors import UserError

FIELDS = ("messages", "conversations", "turns")  # where a row has one
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"} | {
    role: role for role in ("system", "developer", "user", "assistant", "tool")
}
KEPT = ("name", "tool_calls", "tool_call_id", "reasoning_content", "thinking")  # of a message
Message = Mapping[str, Any]


class Turn(NamedTuple):
    """A turn of the user. earlier: the messages before it; then: those that follow the target's
    answer, and the answer to these, and so on; each ends with a turn of the user."""

    earlier: list[Message]
    text: str
    then: list[list[Message]]


def asked(conversation: Sequence[Any], key: str, where: str) -> Iterator[Turn]:
    """Yield each turn of the user after the answers that are given, up to the first without one:
    what follows that is asked after the target's own answers.

    Raises UserError naming the config `key` and `where` the row is: for what is no conversation,
    for content that is no text, and for answers behind a turn that has none."""
    messages = [
        _message(each, key, f"{where}, message {n}") for n, each in enumerate(conversation, 1)
    ]
    if not any(message["role"] == "user" for message in messages):
        raise UserError(f"{key}: {where} has no turn of a user. Leave it out")
    if (last := messages[-1]["role"]) not in ("user", "assistant"):
        raise UserError(
            f"{key}: {where} ends in a message of {last}, which is asked of nobody. Leave it away,"
            " or add the answer to it"
        )
    for place, message in enumerate(messages):
        if message["role"] != "user":
            continue
        rest, then = messages[place + 1 :], list[list[Message]]()
        if rest and rest[0]["role"] != "assistant":
            if any(each["role"] == "assistant" for each in rest):
                raise UserError(
                    f"{key}: {where} has two turns of the user and no answer between them, but one"
                    " behind them. Give the assistant's to all turns, or to none after the first"
                    " without"
                )
            ends = [n for n, each in enumerate(rest, 1) if each["role"] == "user"]
            then = [rest[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        yield Turn(messages[:place], message["content"], then)
        if then:
            return


def _message(value: Any, key: str, where: str) -> Message:
    """Return a message with role and content, and whatever else it has."""
    if isinstance(value, str):
        value = {"role": "user", "content": value}
    fields = told(value) if isinstance(value, dict) else {}
    role = ROLES.get(str(fields.pop("from", fields.pop("role", ""))))
    content = fields.pop("value", fields.pop("content", None))
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        parts = [text for text in texts if isinstance(text, str)]
        content = "".join(parts) if len(parts) == len(texts) else None
    calls = fields.get("tool_calls", [])
    if calls and isinstance(calls, list) and all(map(_is_call, calls)):
        content, fields["tool_calls"] = content or "", [*map(_call, calls)]
    elif calls:
        role = None
    if role is None or not isinstance(content, str) or (role == "user" and not content.strip()):
        raise UserError(
            f"{key}: {where} is no message of a system, user, assistant or tool with text as its"
            f" content ({str(value)[:60]}). Leave its row out"
        )
    return {"role": role, "content": content, **{k: fields[k] for k in KEPT if k in fields}}


def told(value: Any) -> Any:
    """Return `value` without keys that hold nothing, which datasets write where other rows hold
    something."""
    if isinstance(value, Mapping):
        return {key: told(inner) for key, inner in value.items() if inner is not None}
    return [told(each) for each in value] if isinstance(value, list | tuple) else value


def _is_call(call: Any) -> bool:
    return isinstance(call, dict) and isinstance(call.get("function"), dict)


def _call(call: Message) -> Message:
    """Return a tool call with its arguments as templates take them: an object, where a server gives
    the text of one."""
    function = dict(call["function"])
    with suppress(KeyError, TypeError, ValueError):  # none, no text, or not that of an object
        function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}
