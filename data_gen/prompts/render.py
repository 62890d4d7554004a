"""Rendering of prompts to a model's token ids, for harvesting and decoding alike."""

import hashlib
import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date, datetime, tzinfo
from threading import Lock
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from data_gen.prompts.prompt import Prompt
from decoding.models.options import first_line
from runtime.errors import UserError

MARK = "zqjxvk"  # added to a prompt, to test whether a template shows its content
HOURS = re.compile("%[-_0^#EO]*[HIklMSpPfscXrRT]")  # codes of strftime for the time of day
_CLOCK = Lock()
RESERVED = {"messages", "strftime_now", "raise_exception"} | {
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
}


def prompt_ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, max_length: int) -> torch.Tensor:
    """Return the ids of `prompt`, [n] int64, 1 <= n <= `max_length` (the context less the room for
    a response).

    A chat prompt becomes a user turn followed by the header of the assistant's; any other is
    encoded as it stands, up to `cut` tokens. Raises UserError when there are more ids than
    `max_length`, and as `rendered`."""
    if prompt.chat:  # the template writes its own special tokens
        ids = tokenizer(rendered(prompt, tokenizer)[0], add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(prompt.text)["input_ids"][: prompt.cut]
    if len(ids) > max_length:
        raise UserError(
            f"pair.max_length: the prompt {prompt.id} has {len(ids)} tokens, there is room for"
            f" {max_length}. Raise pair.max_length, ask for shorter responses, or set"
            " dataset.too_long to skip or cut"
        )
    return torch.tensor(ids, dtype=torch.long)


def rendered(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> tuple[str, bool]:
    """Return the text of a chat prompt (its user turn and the header of the assistant's), and
    whether the chat template takes content only as a list of parts.

    Raises UserError if there is no template, or if it fails or leaves the prompt out."""
    if not tokenizer.chat_template:
        raise UserError(
            "dataset.chat: this model has no chat template. Set dataset.chat=false to continue the"
            " text, or put chat_template.jinja beside its tokenizer"
        )
    failure = UserError(
        f"dataset.chat: the chat template does not show the text of the prompt {prompt.id}, given"
        " as a string or as a list. Set dataset.template to what it wants, or dataset.chat=false"
    )
    for parts in (False, True):
        whole = replace(prompt, parts=parts)
        marked = replace(whole, text=prompt.text + MARK)
        try:
            text = _applied(whole, tokenizer)[0]
            bare = [{k: m[k] for k in m if k != "tool_calls"} for m in prompt.earlier]
            for what, there, without in (
                ("tools", prompt.tools, replace(whole, tools=())),
                ("tool calls", bare != [*prompt.earlier], replace(whole, earlier=bare)),
            ):
                if there and text == _applied(without, tokenizer)[0]:
                    raise UserError(
                        f"dataset.field: the chat template does not show the {what} of {prompt.id}."
                        " Take a model that knows tools, or leave them away"
                    )
            if _shows(_applied(marked, tokenizer)[0], marked) and _shows(text, whole):
                return text, parts
        except UserError as error:
            failure = error if not parts else failure
    raise failure


def as_asked(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, day: str, elsewhere: bool
) -> list[Prompt]:
    """Return the prompts with the facts about their rendering that a harvest records: `Prompt.date`
    (`day` if the template reads the clock), `Prompt.parts` and `Prompt.rendering`.

    elsewhere: whether another program answers them. Raises UserError if that program cannot render
    them alike, if a template renders one prompt differently each time, and as `rendered`."""
    asked = list[Prompt]()
    for prompt in prompts:
        if not prompt.chat:
            asked.append(prompt)
            continue
        refuse_unread(prompt, tokenizer)
        fixed = replace(prompt, date="2001-02-03")
        text, parts = rendered(fixed, tokenizer)
        again, formats = _applied(replace(fixed, parts=parts), tokenizer)
        if again != text:
            raise UserError(
                f"dataset.chat: the chat template renders the prompt {prompt.id} by chance, another"
                " way each time. Set dataset.template to what it wants, or dataset.chat=false"
            )
        if elsewhere and any(HOURS.search(format.replace("%%", "")) for format in formats):
            raise UserError(
                "dataset.chat: the chat template writes the time of day into the prompt"
                f" {prompt.id}, which answers made elsewhere do not share. Use responses=generate,"
                " or dataset.chat=false"
            )
        rendering = hashlib.sha256(text.encode()).hexdigest()[:16]
        when = (prompt.date or day) if formats else None
        asked.append(replace(prompt, date=when, parts=parts, rendering=rendering))
    return asked


def _shows(text: str, prompt: Prompt) -> bool:
    """Return whether `text` shows the prompt's text, apart from blanks, which many templates trim,
    and what system and user have said before. A list printed as Python or JSON does not count."""
    content, shown = (" ".join(one.split()) for one in (prompt.content, text))
    roles = ("system", "developer", "user", "tool")
    said = [x["content"] for x in prompt.earlier if x["role"] in roles]
    if not all(" ".join(each.split()) in shown for each in said):
        return False
    written = f"""["']text["']: ?["']{re.escape(content)}"""
    return content in shown and not (prompt.parts and re.search(written, shown))


def refuse_unread(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError for an argument of the prompt that no chat template of the model reads."""
    given = {*prompt.template} | ({"date"} if prompt.date else set())
    held = tokenizer.chat_template
    if not (given and prompt.chat and held):
        return
    templates = [*held.values()] if isinstance(held, dict) else [held]
    try:
        read = set[str]().union(*map(chat_template_utils._get_template_variables, templates))
    except TemplateError:  # rendering says what is wrong
        return
    if any("strftime_now" in each for each in templates):
        read.add("date")
    if unread := given - read:
        raise UserError(
            f"dataset.template.{min(unread)}: the chat template of {tokenizer.name_or_path} does"
            " not read it. Leave it out"
        )


def _applied(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[str]]:
    """Return the rendered text, and the formats in which the template asked for the time."""
    try:
        with _stopped_clock(prompt.date or date.today().isoformat()) as formats:
            text = tokenizer.apply_chat_template(
                turns(prompt),
                tools=[*prompt.tools] or None,
                add_generation_prompt=True,
                tokenize=False,
                **prompt.template,
            )
    except Exception as error:  # a template is a foreign program, which may raise anything
        raise UserError(
            f"dataset.chat: the chat template refuses the prompt {prompt.id} ({first_line(error)})."
            " Set dataset.template to what it wants, or dataset.chat=false"
        ) from error
    return str(text), formats


@contextmanager
def _stopped_clock(moment: str) -> Iterator[list[str]]:
    """Let chat templates read `moment`, in ISO 8601, from the clock, by replacing the name that
    transformers calls. Yields the formats in which they ask for the time."""
    formats: list[str] = []

    class Stopped(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "Stopped":
            return cls.fromisoformat(moment)

        def strftime(self, format: str) -> str:
            formats.append(str(format))
            return super().strftime(format)

    with _CLOCK:
        before = chat_template_utils.datetime
        vars(chat_template_utils)["datetime"] = Stopped
        try:
            yield formats
        finally:
            vars(chat_template_utils)["datetime"] = before


def turns(prompt: Prompt) -> list[dict[str, Any]]:
    """Return the chat that asks for a response to `prompt`, for chat templates and servers."""
    chat = [*prompt.earlier, {"role": "user", "content": prompt.content}]
    if not prompt.parts:
        return [dict(each) for each in chat]
    return [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in chat]


def dated(prompt: Prompt) -> Prompt:
    """Return the prompt with the `date` among its template's arguments as its date."""
    rest = dict(prompt.template)
    day = rest.pop("date", None)
    try:
        day = None if day is None else date.fromisoformat(str(day)).isoformat()
        return replace(prompt, template=rest, date=day)
    except ValueError as error:
        raise UserError(
            f"dataset.template.date: expected a date such as 2026-01-31, got {day}"
        ) from error


def refuse_arguments(prompts: Sequence[Prompt]) -> None:
    """Raise UserError for arguments of a chat template that is not used, and for those that no
    template may be given."""
    for prompt in prompts:
        if prompt.template and not prompt.chat:
            raise UserError(
                f"dataset.template: expected no arguments, got {dict(prompt.template)}: the text of"
                f" {prompt.id} is continued without a chat template. Set dataset.chat=true, or"
                " leave them out"
            )
        if wrong := RESERVED & set(prompt.template):
            raise UserError(
                f"dataset.template: expected arguments of the chat template, got {min(wrong)},"
                " which is no argument of its own. Leave it out"
            )
