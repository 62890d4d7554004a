"""Conversations in rows: messages as servers take them, ShareGPT's `conversations`, `turns`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from runtime.errors import UserError

FIELDS = ("messages", "conversations", "turns")  # where a row has one
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"} | {
    role: role for role in ("system", "developer", "user", "assistant", "tool")
}
Message = Mapping[str, Any]


def asked(conversation: Sequence[Any], key: str, where: str) -> Iterator[tuple[list[Message], str]]:
    """Yield each turn of the user that a response may follow: the messages before it, with the
    answers that are given, and its text.

    Raises UserError naming the config `key` and `where` the row is: for what is no conversation,
    for content that is no text, and for two turns without an answer between them."""
    messages = [
        _message(each, key, f"{where}, message {n}") for n, each in enumerate(conversation, 1)
    ]
    if not any(message["role"] == "user" for message in messages):
        raise UserError(f"{key}: {where} has no turn of a user. Leave it out")
    for place, message in enumerate(messages):
        if message["role"] != "user":
            continue
        before = messages[:place]
        if before and before[-1]["role"] == "user":
            raise UserError(
                f"{key}: {where} has two turns of the user and no answer between them. Give the"
                " assistant's, or a row for each"
            )
        yield before, message["content"]


def _message(value: Any, key: str, where: str) -> Message:
    """Return a message with role and content, and whatever else it has."""
    if isinstance(value, str):
        value = {"role": "user", "content": value}
    fields = dict(value) if isinstance(value, dict) else {}
    role = ROLES.get(str(fields.pop("from", fields.pop("role", ""))))
    content = fields.pop("value", fields.pop("content", None))
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        parts = [text for text in texts if isinstance(text, str)]
        content = "".join(parts) if len(parts) == len(texts) else None
    if content is None and fields.get("tool_calls"):
        content = ""
    if role is None or not isinstance(content, str) or (role == "user" and not content.strip()):
        raise UserError(
            f"{key}: {where} is no message of a system, user, assistant or tool with text as its"
            f" content ({str(value)[:60]}). Leave its row out"
        )
    return {"role": role, "content": content, **fields}
