"""Prompts from a dataset of the Hugging Face hub, by name."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from data_gen.prompts.prompt import Prompt, prompts_from_rows
from runtime.errors import UserError
from runtime.settings.kinds import Count, Cut, Template, Text, TooLong

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # SPEED-Bench's, on the hub


@dataclass(frozen=True)
class HubPrompts:
    """Rows of ``datasets.load_dataset(hub_id, subset, split=split)``, the prompt in the column
    `field`. limit: a number of prompts, evenly spaced; None: all."""

    name: Annotated[Text, "of the set, in tables and in ids"]
    hub_id: Annotated[Text, "dataset of the Hugging Face hub"]
    subset: Annotated[Text | None, "its configuration, where it has several"]
    split: Annotated[Text, "of the dataset, also train[:1000]"]
    field: Annotated[Text, "column with the text"]
    limit: Annotated[Count | None, "prompts taken, evenly spaced over the set; null: all"]
    chat: Annotated[
        bool, "a user turn of the chat template; false: the text is continued as it stands"
    ]
    template: Template = None
    too_long: TooLong = "error"
    cut: Cut = None
    id: Annotated[Text | None, "column with its id; null: id where there is one, else numbered"] = (
        None
    )

    def __iter__(self) -> Iterator[Prompt]:
        """Yield the prompts. Raises UserError when the dataset cannot be loaded or has no such
        column."""
        from datasets import load_dataset  # takes seconds to import, and only this source needs it

        try:
            rows = load_dataset(self.hub_id, self.subset, split=self.split)
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(
                f"dataset.hub_id: cannot load {self.hub_id} ({error}). Check dataset.hub_id,"
                " dataset.subset, dataset.split and the network, or take prompts from a file"
            ) from error
        if self.id is not None and self.id not in rows.column_names:
            columns = ", ".join(rows.column_names)
            raise UserError(
                f"dataset.id: {self.hub_id} has no column {self.id!r} (it has {columns}). Set"
                " dataset.id=<one> that it has, or null"
            )
        numbered = [
            (f"{self.hub_id} row {number}", number, row | ({"id": row[self.id]} if self.id else {}))
            for number, row in enumerate(rows)
        ]
        if hidden := sum(PLACEHOLDER in str(row.get(self.field)) for _, _, row in numbered):
            raise UserError(
                f"dataset.hub_id: {hidden} of {len(numbered)} rows of {self.hub_id} hold no prompt"
                " but a note to fetch it. Write them with NVIDIA's specdec_bench (prepare_data.py)"
                " and set dataset.hub_id=<its folder of the subset> dataset.subset=null"
            )
        about = (self.name, self.field, self.limit, self.chat, self.template)
        return iter(prompts_from_rows(numbered, *about, self.too_long, self.cut))
