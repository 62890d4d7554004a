"""Texts of the tokens in traces, saved with them, so that showing a trace needs no tokenizer."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from decoding.trace import RoundTrace, Trace
from runtime.json_files import Form, read_json, write_checksummed

FILE = "vocabulary.json"


@dataclass(frozen=True)
class Vocabulary:
    """Texts of tokens and prompts. tokens: id -> text of every token that occurs in the traces;
    prompts: dataset -> prompt id -> the rendered prompt. Empty if nothing was saved: a token is
    then shown by its id."""

    tokens: Mapping[int, str] = field(default_factory=dict)
    prompts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def text(self, token: int) -> str:
        return self.tokens.get(token, f"[{token}]")

    def prompt(self, trace: Trace) -> str:
        """Return the rendered prompt, empty where it was not saved."""
        return self.prompts.get(trace.dataset, {}).get(trace.prompt_id, "")


class Saved(Form):
    """The form of the file."""

    tokens: dict[int, str]
    prompts: dict[str, dict[str, str]]
    checksum: str


def of_traces(
    tokenizer: Any, traces: Iterable[Trace], prompts: Mapping[tuple[str, str], Any]
) -> Vocabulary:
    """Return the texts that traces need. tokenizer: of transformers; prompts: token ids [n] by
    dataset and prompt id.

    A token's text is the text it adds to others: alone, some tokenizers drop its leading space.
    Part of a character is shown as the replacement character."""
    used = sorted({token for trace in traces for r in trace.rounds for token in tokens_of(r)})
    whole = [token for token in used if "\ufffd" not in tokenizer.decode([token])][:1]
    before = len(tokenizer.decode(whole))
    texts = {token: tokenizer.decode([*whole, token])[before:] for token in used}
    rendered: dict[str, dict[str, str]] = {}
    for (dataset, prompt_id), ids in prompts.items():
        rendered.setdefault(dataset, {})[prompt_id] = tokenizer.decode(ids)
    return Vocabulary(texts, rendered)


def tokens_of(round_: RoundTrace) -> list[int]:
    """Return the drafted and committed tokens."""
    branches = round_.overlap.branches if round_.overlap else []
    return [*round_.tokens, *round_.draft_tokens, *(t for branch in branches for t in branch)]


def write(folder: Path, vocabulary: Vocabulary) -> None:
    write_checksummed(folder / FILE, asdict(vocabulary))


def read(folder: Path) -> Vocabulary:
    """Return what `write` saved, empty if the folder has no such file. Raises UserError naming a
    file that is damaged, or that an earlier version wrote."""
    if not (folder / FILE).is_file():
        return Vocabulary()
    saved = read_json(folder / FILE, Saved, "run", "Run scripts/evaluate.py again, or delete it")
    return Vocabulary(saved.tokens, saved.prompts)
