"""Prompts from a JSONL file: one object a line."""

from pathlib import Path
from typing import Any

from data_gen.prompts.prompt import Prompt, select
from runtime.errors import UserError
from runtime.json_lines import is_text, parse_object

FORM = 'Write {"prompt": ...} on every line'


def load_jsonl(name: str, path: str, field: str, limit: int | None, chat: bool) -> list[Prompt]:
    """Read `path`: the prompt in `field`; ``id``, ``dataset`` and ``category`` are used when
    present.

    Without an ``id`` a prompt is called ``<name>-<line>``. Blank lines are skipped.
    Raises UserError naming file and line.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"dataset.path: there is no file {file}. Set dataset.path=<a JSONL file>")
    prompts = []
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if line.strip():
            row = parse_object(line, f"dataset.path: {file} line {number}", FORM)
            prompts.append(
                prompt_from_row(row, f"{name}-{number}", name, field, chat, f"{file} line {number}")
            )
    if not prompts:
        raise UserError(
            f"dataset.path: {file} is empty. Give it one JSON object a line, the prompt under"
            f" {field!r}"
        )
    return select(prompts, limit)


def prompt_from_row(
    row: dict[str, Any], default_id: str, name: str, field: str, chat: bool, place: str
) -> Prompt:
    """A Prompt from a row of a JSONL file or a hub dataset. Raises UserError naming `place`."""
    text = row.get(field)
    if not isinstance(text, str) or not text.strip():
        fields = ", ".join(row)
        raise UserError(
            f"dataset.field: {place} has no text under {field!r} (it has {fields}). Set"
            " dataset.field=<one>"
        )
    named = (
        str(row.get("id", default_id)),
        str(row.get("dataset", name)),
        str(row.get("category", "")),
    )
    if not all(map(is_text, (*named, text))):
        raise UserError(
            f"dataset.field: {place} has a prompt that is no text (it holds half a character)."
            " Mend it"
        )
    return Prompt(*named, text, chat=chat)
