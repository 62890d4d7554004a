"""Prompts: their class, reading them from rows (objects of a JSONL file, say), and the checks that
all sources share."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from data_gen.prompts.conversation import FIELDS, Message, asked, told
from runtime.errors import UserError
from runtime.json_lines import is_text, read_objects

FORM = 'Write {"prompt": ...} on every line'
TURN = "#turn"  # between the id of a conversation and the number of a turn
T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """One request to the target.

    ``chat``: rendered as a user turn of the chat template, which gets the arguments ``template``;
    otherwise ``text`` is continued as it stands. ``instruction`` precedes ``text`` in a user turn
    and is left out where the text is continued.

    ``date``: ISO 8601 date that the template gets when it asks for the time; None: today.
    ``parts``: the template takes content only as a list. ``rendering``: a hash of the text rendered
    at a fixed date, if it was asked for (`data_gen.prompts.render.as_asked`). ``too_long``: what
    becomes of it where its tokens leave no room for a response (`data_gen.requests.fitted`).
    ``cut``: most of its tokens that are kept, from its beginning; None: all.
    ``whole``: the text by which it is split, where that is not its own: that before it was cut, or
    the first turn of its conversation. ``earlier``: the messages of its conversation before it;
    ``then``: those that follow the target's answers, one list after each; ``tools``: those that the
    chat template is given."""

    id: str
    dataset: str
    category: str
    text: str
    instruction: str = ""
    chat: bool = True
    template: Mapping[str, Any] = field(default_factory=dict, hash=False)
    date: str | None = None
    parts: bool = False
    rendering: str = ""
    too_long: str = "error"
    cut: int | None = None
    whole: str = ""
    earlier: Sequence[Message] = field(default=(), hash=False)
    then: Sequence[Sequence[Message]] = field(default=(), hash=False)
    tools: Sequence[Any] = field(default=(), hash=False)

    @property
    def content(self) -> str:
        """Return its user turn."""
        return f"{self.instruction}\n\n{self.text}" if self.instruction else self.text

    @property
    def ids(self) -> list[str]:
        """Return its id and those of the turns that follow the target's answers."""
        root, _, number = self.id.rpartition(TURN)
        return [self.id, *(f"{root}{TURN}{int(number) + n}" for n in range(1, len(self.then) + 1))]

    def answered(self, answer: str) -> "Prompt | None":
        """Return the next turn of the conversation after the target's `answer`; None after the
        last."""
        if not self.then:
            return None
        (*between, asked), *rest = self.then
        said = ("user", self.content), ("assistant", answer)
        earlier = [*self.earlier, *({"role": role, "content": text} for role, text in said)]
        return replace(
            self,
            id=self.ids[1],
            text=asked["content"],
            instruction="",
            whole=self.whole or self.text,
            earlier=[*earlier, *between],
            then=rest,
        )


def select(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """Return all of `prompts`, or `limit` of them evenly spaced, so that a few still cover every
    category.

    Raises UserError for duplicate ids or no prompts."""
    if not prompts:
        raise UserError(
            "dataset: expected one prompt or more, got none. Choose another dataset=..."
        )
    name, uses = Counter(name for prompt in prompts for name in prompt.ids).most_common(1)[0]
    if uses > 1:
        raise UserError(
            f"dataset: the id {name!r} is used by {uses} prompts. Give every prompt an id of"
            " its own"
        )
    return spread(prompts, limit or len(prompts))


def spread(items: Sequence[T], count: int) -> list[T]:
    """Return `count` of the items (or all), evenly spaced."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def read_rows(path: str | Path, key: str) -> list[tuple[str, int, dict[str, Any]]]:
    """Return the objects as `read_objects` does. Raises UserError where there are none."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"{key}: there is no file {file}. Set {key}=<a JSONL file>")
    rows = read_objects(file, key, FORM)
    if not rows:
        raise UserError(f"{key}: {file} is empty. Give it one JSON object a line")
    return rows


def text_of(row: Mapping[str, Any], field: str, key: str, where: str) -> str:
    """Return the text in `field` of a row. Raises UserError naming the config `key` and `where` the
    row is."""
    text = row.get(field)
    if not isinstance(text, str) or not text.strip():
        raise UserError(
            f"{key}: {where} has no text under {field!r} (it has {', '.join(row)}). Set {key}=<one>"
            " that has"
        )
    refuse_half_characters(text, key, where)
    return text


def prompts_from_rows(
    rows: Iterable[tuple[str, int, Mapping[str, Any]]],
    name: str,
    field: str,
    limit: int | None,
    chat: bool,
    template: Mapping[str, Any] | None,
    too_long: str,
    cut: int | None = None,
) -> list[Prompt]:
    """Return the prompts in `field` of rows, `select`ed; ``id``, ``dataset`` and ``category`` are
    used when present. Where a row has a conversation there, or under one of `FIELDS` instead, each
    turn of its user that has an answer is a prompt, whose id ends in its number if there are
    several; so is the first that has none, with those that follow it. rows: location in words,
    number and content of each. Raises UserError naming the row, and for a `cut` with `chat`."""
    if chat and cut is not None:
        raise UserError(
            "dataset.cut: the end of a chat prompt is the template's, which is not cut. Set"
            " dataset.chat=false to continue the text, or dataset.cut=null"
        )
    key, prompts = "dataset.field", list[Prompt]()
    for where, place, row in rows:
        names = str(row.get("id", f"{name}-{place}")), str(row.get("dataset", name))
        about = (*names, str(row.get("category", "")))
        further: Any = {"template": template or {}, "too_long": too_long, "chat": chat, "cut": cut}
        for part in about:
            refuse_half_characters(part, key, where)
        held = next((each for each in (field, *FIELDS) if isinstance(row.get(each), list)), None)
        tools = told(row.get("tools") or [])
        if not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise UserError(
                f"{key}: {where} has tools that are no list of objects. Write each as servers take"
                ' it, {"type": "function", "function": ...}'
            )
        if re.search(rf"{TURN}[0-9]+$", about[0]):
            raise UserError(
                f"dataset: {where} has the id {about[0]!r}, and {TURN} stands before the number of"
                " a conversation's turn. Give it another"
            )
        further["tools"] = tools or ()
        if tools and not chat:
            raise UserError(f"{key}: {where} has tools for a chat template. Set dataset.chat=true")
        if held is None or isinstance(row.get(field), str):
            prompts.append(Prompt(*about, text_of(row, field, key, where), **further))
            continue
        if not chat:
            raise UserError(
                f"{key}: {where} has a conversation, which the chat template renders. Set"
                f" dataset.chat=true, or write its text under {field!r}"
            )
        found = list(asked(row[held], key, where))
        for number, turn in enumerate(found, 1):
            written = json.dumps([turn, tools], ensure_ascii=False, default=str)
            refuse_half_characters(written, key, where)
            alone = len(found) == 1 and not turn.then
            called = about[0] if alone else f"{about[0]}{TURN}{number}"
            whole = found[0].text if number > 1 else ""
            said = {"earlier": turn.earlier, "then": turn.then, **further}
            prompts.append(Prompt(called, *about[1:], turn.text, whole=whole, **said))
    return select(prompts, limit)


def refuse_half_characters(text: str, key: str, where: str) -> None:
    if not is_text(text):
        raise UserError(
            f"{key}: {where} has a prompt that is no text (it holds half a character). Mend it"
        )
