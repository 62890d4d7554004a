"""Prompts from a dataset of the Hugging Face hub, by name."""

from data_gen.prompts.jsonl import prompt_from_row
from data_gen.prompts.prompt import Prompt, select
from runtime.errors import UserError


def load_hub(
    name: str,
    hub_id: str,
    subset: str | None,
    split: str,
    field: str,
    limit: int | None,
    chat: bool,
) -> list[Prompt]:
    """Rows of ``datasets.load_dataset(hub_id, subset, split=split)``, the prompt in the column
    `field`.

    Raises UserError when the dataset cannot be loaded or has no such column.
    """
    from datasets import load_dataset  # takes seconds to import, and only this source needs it

    try:
        rows = load_dataset(hub_id, subset, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        remedy = (
            "Check dataset.hub_id, dataset.subset, dataset.split and the network, or use"
            " dataset=jsonl"
        )
        raise UserError(f"dataset.hub_id: cannot load {hub_id} ({error}). {remedy}") from error
    prompts = [
        prompt_from_row(row, f"{name}-{number}", name, field, chat, f"{hub_id} row {number}")
        for number, row in enumerate(rows)
    ]
    return select(prompts, limit)
