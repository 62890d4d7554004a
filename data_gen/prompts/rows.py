"""Rows that hold prompts: the objects of a JSONL file, and a prompt from one of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_gen.prompts.prompt import Prompt
from runtime.errors import UserError
from runtime.json_lines import is_text, read_objects

FORM = 'Write {"prompt": ...} on every line'


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
    """The text in `field` of a row. Raises UserError naming the config `key` and `where` the row
    is."""
    text = row.get(field)
    if not isinstance(text, str) or not text.strip():
        raise UserError(
            f"{key}: {where} has no text under {field!r} (it has {', '.join(row)}). Set {key}=<one>"
            " that has"
        )
    if not is_text(text):
        raise UserError(
            f"{key}: {where} has a prompt that is no text (it holds half a character). Mend it"
        )
    return text


def prompt_from_row(
    row: Mapping[str, Any], default_id: str, name: str, field: str, chat: bool, where: str
) -> Prompt:
    """The prompt in `field` of a row; ``id``, ``dataset`` and ``category`` are used when present.
    Raises UserError naming `where` the row is."""
    text = text_of(row, field, "dataset.field", where)
    prompt = Prompt(
        str(row.get("id", default_id)),
        str(row.get("dataset", name)),
        str(row.get("category", "")),
        text,
        chat=chat,
    )
    if not all(map(is_text, (prompt.id, prompt.dataset, prompt.category))):
        raise UserError(
            f"dataset.field: {where} has a prompt that is no text (it holds half a character)."
            " Mend it"
        )
    return prompt
