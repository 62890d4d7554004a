"""Prompts from a JSONL file: one object a line."""

from data_gen.prompts.prompt import Prompt, select
from data_gen.prompts.rows import prompt_from_row, read_rows


def load_jsonl(name: str, path: str, field: str, limit: int | None, chat: bool) -> list[Prompt]:
    """Read `path`: the prompt in `field`; ``id``, ``dataset`` and ``category`` are used when
    present.

    Without an ``id`` a prompt is called ``<name>-<line>``. Blank lines are skipped.
    Raises UserError naming file and line.
    """
    prompts = [
        prompt_from_row(row, f"{name}-{number}", name, field, chat, where)
        for where, number, row in read_rows(path, "dataset.path")
    ]
    return select(prompts, limit)
