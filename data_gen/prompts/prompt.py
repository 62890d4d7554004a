"""What a prompt is, and the checks every source shares."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.errors import UserError


@dataclass(frozen=True)
class Prompt:
    """One request to the target.

    ``chat``: rendered as a user turn of the chat template; otherwise ``text`` is continued as it
    stands. ``instruction`` precedes ``text`` in a user turn and is left out where the text is
    continued."""

    id: str
    dataset: str
    category: str
    text: str
    instruction: str = ""
    chat: bool = True


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
