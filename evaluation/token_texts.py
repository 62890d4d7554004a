"""Texts of the tokens in traces, saved with them: whoever shows a trace needs no tokenizer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decoding.trace import RoundTrace, Trace
from runtime.json_files import Form, read_json, write_checksummed

FILE = "vocabulary.json"
PromptKey = tuple[str, str]
"""Dataset and id of a prompt. Both may hold any character, so they are not joined."""


@dataclass(frozen=True)
class Vocabulary:
    """tokens: id -> text of every token that occurs in the traces; prompts: the rendered ones.
    Empty where nothing was saved: a token is then shown by its id."""

    tokens: Mapping[int, str] = field(default_factory=dict)
    prompts: Mapping[PromptKey, str] = field(default_factory=dict)

    def text(self, token: int) -> str:
        return self.tokens.get(token, f"[{token}]")

    def prompt(self, trace: Trace) -> str:
        """Empty where it was not saved."""
        return self.prompts.get((trace.dataset, trace.prompt_id), "")


def of_traces(
    tokenizer: Any, traces: Iterable[Trace], prompts: Mapping[PromptKey, Any]
) -> Vocabulary:
    """tokenizer: of transformers; prompts: their token ids [n].

    A token's text is what it adds to a text: alone, some tokenizers drop its leading space. Part of
    a character is shown as the replacement character."""
    used = sorted(
        {token for trace in traces for round_ in trace.rounds for token in tokens_of(round_)}
    )
    whole = [token for token in used if "\ufffd" not in tokenizer.decode([token])][:1]
    before = len(tokenizer.decode(whole))
    texts = {token: tokenizer.decode([*whole, token])[before:] for token in used}
    return Vocabulary(texts, {key: tokenizer.decode(ids) for key, ids in prompts.items()})


def tokens_of(round_: RoundTrace) -> list[int]:
    """Drafted or committed."""
    branches = round_.overlap.branches if round_.overlap else []
    return [
        *round_.tokens,
        *round_.draft_tokens,
        *(token for branch in branches for token in branch),
    ]


def write(folder: Path, found: Vocabulary) -> None:
    prompts: dict[str, dict[str, str]] = {}
    for (dataset, prompt_id), text in found.prompts.items():
        prompts.setdefault(dataset, {})[prompt_id] = text
    write_checksummed(folder / FILE, {"tokens": found.tokens, "prompts": prompts})


class Texts(Form):
    """What the file holds. prompts: dataset -> prompt id -> the rendered prompt"""

    tokens: dict[int, str]
    prompts: dict[str, dict[str, str]]
    checksum: str


def read(folder: Path) -> Vocabulary:
    """Empty where the folder has none. Raises UserError naming a file that is damaged, or that an
    earlier version wrote."""
    if not (folder / FILE).is_file():
        return Vocabulary()
    found = read_json(folder / FILE, Texts, "run", "Run scripts/evaluate.py again, or delete it")
    return Vocabulary(
        found.tokens,
        {
            (dataset, prompt_id): text
            for dataset, prompts in found.prompts.items()
            for prompt_id, text in prompts.items()
        },
    )
