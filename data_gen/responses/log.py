"""The log of external responses as they arrive from a server: a JSONL file that a killed run leaves
intact, except perhaps for its last line."""

import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from data_gen.prompts import Prompt
from data_gen.responses.external import FORM, ExternalResponse, response_from_row
from runtime.compatibility import differences
from runtime.errors import UserError
from runtime.json_lines import DAMAGED, parse_object, sealed, unsealed
from runtime.text import plural

NAME = "answers.jsonl"


@contextmanager
def open_log(folder: Path, asked: Mapping[str, Any]) -> Iterator["ResponseLog"]:
    """Open the log of a dataset. Another process that opens it waits until this one is done: no
    prompt is answered twice.

    asked: settings that decide the responses. Raises UserError if lines are damaged or belong to
    other settings."""
    path = folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
    except OSError as error:
        raise UserError(
            f"out: {path} cannot be written ({error.strerror}). Choose another out=..."
        ) from error
    with file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield ResponseLog(path, file, asked)


class ResponseLog:
    """A log with one line per answered prompt: the fields that `ResponseFile` reads, the settings
    `asked` for, a hash of the prompt, and one of the line."""

    def __init__(self, path: Path, file: BinaryIO, asked: Mapping[str, Any]) -> None:
        self.path, self.asked = path, dict(asked)
        self.responses: dict[str, ExternalResponse] = {}
        self._digests: dict[str, str | None] = {}
        self._file, self._lines = file, 0
        file.seek(0)
        content = file.read()
        whole = content.rfind(b"\n") + 1
        for line in content[:whole].splitlines():
            self._take(line)
        # the rest was being written when a run was killed, provided this run could write it
        torn, own = content[whole:], json.dumps({"asked": self.asked}).encode()[:-1]
        if not (torn.startswith(own) or own.startswith(torn)):
            raise UserError(
                f"out: {self.path} ends with what is none of its lines. Choose another out=..."
            )
        file.truncate(whole)

    def missing(self, prompts: list[Prompt]) -> list[Prompt]:
        """Return the prompts without a response. Raises UserError if the log answers another
        text."""
        for prompt in prompts:
            if prompt.id in self.responses and self._digests[prompt.id] != digest(prompt):
                where = self.responses[prompt.id].where
                raise UserError(
                    f"{where} answers another text of the prompt {prompt.id}. Choose another"
                    " out=... or remove that line"
                )
        return [prompt for prompt in prompts if prompt.id not in self.responses]

    def append(self, prompt: Prompt, response: Mapping[str, Any]) -> None:
        """Write one line and force it to disk. Raises UserError, and writes nothing, if it could
        not be read again."""
        row = {"asked": self.asked, "id": prompt.id, **response, "prompt": digest(prompt)}
        line = sealed(row)
        self._take(line)
        self._file.write(line + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _take(self, line: bytes) -> None:
        self._lines += 1
        where = f"responses.url: {self.path} line {self._lines}"
        row = parse_object(line, where, FORM)
        response, asked = response_from_row(row, where), row.get("asked", {})
        if unsealed(line) is None or not isinstance(asked, dict):
            raise UserError(
                f"{where} is damaged ({DAMAGED}). Remove that line, or choose another out=..."
            )
        if changed := differences(asked, self.asked):
            raise UserError(
                f"out: {self.path} was asked for with {changed}. Choose another out=..."
            )
        if response.prompt_id in self.responses:
            raise UserError(f"{where} answers {response.prompt_id} again. Remove that line")
        self.responses[response.prompt_id] = response
        self._digests[response.prompt_id] = row.get("prompt")


def faults(folder: Path, harvested: Sequence[str]) -> list[str]:
    """Return what is wrong with the log in `folder`. harvested: ids of the prompts whose answers
    became records."""
    path = folder / NAME
    try:
        *lines, torn = path.read_bytes().split(b"\n")
    except OSError as error:
        return [f"{path} cannot be read ({error.strerror})"]
    bad, names = [], Counter[str]()
    for number, line in enumerate([*lines, torn] if torn else lines, 1):
        where = f"{path} line {number}"
        try:
            names[response_from_row(parse_object(line, where, FORM), where).prompt_id] += 1
        except UserError as error:
            bad.append(str(error))
        else:
            whole = number <= len(lines) and unsealed(line) is not None
            bad += [] if whole else [f"{where} is damaged ({DAMAGED})"]
    lost = [name for name in harvested if name not in names]
    bad += [f"{path} answers {name} {count} times" for name, count in names.items() if count > 1]
    if lost:
        bad.append(
            f"{path} has lost the answers to {plural(len(lost), 'prompt')}, {lost[0]} is one"
        )
    return bad


def digest(prompt: Prompt) -> str:
    """Return the digest of a prompt as it is asked, including its rendering if a chat template
    rendered it."""
    what = [prompt.instruction, prompt.text, prompt.chat, prompt.rendering]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
