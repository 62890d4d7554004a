"""What a prompt is, and the checks every source shares."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.errors import UserError


@dataclass(frozen=True)
class Prompt:
    """One request to the target.

    ``chat``: rendered as a user turn of the chat template, which gets the arguments ``template``;
    otherwise ``text`` is continued as it stands. ``instruction`` precedes ``text`` in a user turn
    and is left out where the text is continued.

    ``date``: what the template is told when it asks for the time, as ISO 8601 has it; None: today.
    ``parts``: the template takes content as a list alone. ``rendering``: a hash of the text
    rendered at a fixed date, where it was asked for (`data_gen.prompts.render.as_asked`)."""

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


def select(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """All of `prompts`, or `limit` of them evenly spaced, so that a few still cover every category.

    Raises UserError for duplicate ids or no prompts.
    """
    if not prompts:
        raise UserError(
            "dataset: expected one prompt or more, got none. Choose another dataset=..."
        )
    name, uses = Counter(prompt.id for prompt in prompts).most_common(1)[0]
    if uses > 1:
        raise UserError(
            f"dataset: the id {name!r} is used by {uses} prompts. Give every prompt an id of"
            " its own"
        )
    count = min(limit or len(prompts), len(prompts))
    return [prompts[index * len(prompts) // count] for index in range(count)]
