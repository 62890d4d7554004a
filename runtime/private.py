"""Removal of private data before something is published: paths of the machine, keys and
passwords."""

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

HIDDEN = "(hidden)"
_SECRET = re.compile(
    r"(?:^|[._+-])(?:\w*(?:token|secret|passwd|password|auth)|(?:\w+_)?key)$", re.I
)
_GIVEN = re.compile(r"([\w.+@/-]+)=(?!true\b|false\b|null\b)[^\s'\"`,;{}\[\]]+")  # in a command
_DOOR = re.compile(r"\b(?:hf_|sk-|ghp_|github_pat_)\w{16,}")  # access keys, by their prefix
_BEFORE, _AFTER = r"(?:^|(?<=[\s='\"`(\[{,|<>:]))", r"(?![\w./-])"
_PLACE = re.compile(_BEFORE + r"(?:file://)?(?:~[\w.-]*)?/(?=[\w.~])[^\s'\"`,;:|<>\[\](){}]*")
_WHOLE = re.compile(r"(?:~[\w.-]*)?/[\w.~].*")  # a text that is a path and nothing else


class Cleaner:
    """Reduces each path in a text to its last name, and hides keys of hubs and services.

    Different paths get different names."""

    def __init__(self, *known: Any) -> None:
        """known: JSON values; paths among their texts are also recognized where they have
        spaces."""
        self._names: dict[str, str] = {}
        self._whole = sorted(
            {text for value in known for text in _texts(value) if _WHOLE.fullmatch(text)},
            key=lambda text: (-len(text), text),
        )

    def text(self, text: str) -> str:
        for path in self._whole:
            whole = _BEFORE + re.escape(path) + _AFTER
            text = re.sub(whole, lambda match: self._named(match[0]), text)
        text = _PLACE.sub(lambda match: self._named(match[0]), text)
        return _GIVEN.sub(_kept, _DOOR.sub(HIDDEN, text))

    def value(self, value: Any, key: str = "") -> Any:
        """Return a JSON value with its texts and keys cleaned. key: the one it stands under."""
        if isinstance(value, str):
            return HIDDEN if value and _SECRET.search(key) else self.text(value)
        if isinstance(value, Mapping):
            return {self.text(name): self.value(part, name) for name, part in value.items()}
        return [self.value(part, key) for part in value] if isinstance(value, list) else value

    def _named(self, path: str) -> str:
        if path not in self._names:
            name = short = PurePath(path).name or "folder"
            count = 1
            while short in self._names.values():
                count += 1
                short = f"{name}-{count}"
            self._names[path] = short
        return self._names[path]


def _kept(match: re.Match[str]) -> str:
    return f"{match[1]}={HIDDEN}" if _SECRET.search(match[1]) else match[0]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from (key, *_texts(part))
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
