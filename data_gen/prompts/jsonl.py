"""Prompts from a JSONL file: one object a line."""

from typing import Annotated

from data_gen.prompts.prompt import Prompt, prompts_from_rows, read_rows
from runtime.settings.kinds import Count, Cut, Path, Template, Text, TooLong


def load_jsonl(
    name: Annotated[Text, "of the set, in tables and in ids"],
    path: Annotated[Path, "file with one JSON object a line"],
    field: Annotated[
        Text, "where a row has its text; id, dataset and category are used where present"
    ],
    limit: Annotated[Count | None, "prompts taken, evenly spaced over the set; null: all"],
    chat: Annotated[
        bool, "a user turn of the chat template; false: the text is continued as it stands"
    ],
    template: Template = None,
    too_long: TooLong = "error",
    cut: Cut = None,
) -> list[Prompt]:
    """Read `path`: the prompt in `field`; ``id``, ``dataset`` and ``category`` are used when
    present.

    Without an ``id`` a prompt is called ``<name>-<line>``. Blank lines are skipped.
    Raises UserError naming file and line.
    """
    rows = read_rows(path, "dataset.path")
    return prompts_from_rows(rows, name, field, limit, chat, template, too_long, cut)
