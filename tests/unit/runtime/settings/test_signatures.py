"""The settings of a plug-in are read from its file, whatever way it is written."""

from pathlib import Path
from typing import Any

import pytest

from runtime.settings import kinds
from runtime.settings.check import MORE, Unknown, known_classes, parsed, part, settings_of

MODULE = """
import other
import typing
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, Protocol
from decoding.interfaces import StopRule
from runtime.settings.kinds import Annotated, Any, Count, Mapping, Probability

raise RuntimeError("it is never run")


def function(path: str, /, count: Annotated[Count, "how many"], *, most: int = 3) -> None: ...

Many = Annotated[Count, "how many"]

def open_function(count: Many, **others: Any) -> None: ...

class Plain:
    def __init__(self, rule: StopRule, names: "Mapping[str, float] | None", other, odd: other.Odd):
        ...

class Child(Plain):
    limit: int = 3

class Empty(Protocol): ...

@dataclass(frozen=True)
class Data:
    what: ClassVar[str]
    more: typing.ClassVar[str] = "x"
    share: Probability
    order: Literal["a", "b"] = "a"
    rules: list[StopRule] = field(default_factory=list)
    shown: bool = field(repr=False)
    own: int = field(default=1, init=False)
    plain = 3

@dataclass
class DataChild(Data):
    share: Annotated[Probability, "another"] = 0.5
    last: Child | None = None

class Row(NamedTuple):
    a: int
    b: int = 2

class Theirs(other.Base): ...
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cached in (parsed, settings_of, known_classes):
        cached.cache_clear()
    (tmp_path / "written").mkdir()
    (tmp_path / "written" / "plugin.py").write_text(MODULE)
    (tmp_path / "written" / "again.py").write_text("from written.plugin import Data as Known\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def read(name: str) -> dict[str, tuple[Any, bool]]:
    return {key: tuple(setting) for key, setting in settings_of(f"written.{name}").items()}


COUNTED = {"count": (kinds.Annotated[kinds.Count, "how many"], True)}
ANOTHER = kinds.Annotated[kinds.Probability, "another"], False
DATA = {
    "share": (kinds.Probability, True),
    "order": (kinds.Literal["a", "b"], False),
    "rules": (list[kinds.Part], False),
    "shown": (bool, True),
}
PLAIN = {
    "rule": (kinds.Part, True),
    "names": (kinds.Mapping[kinds.Text, kinds.Number] | None, True),
    "other": (Any, True),
    "odd": (Any, True),
}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("plugin.function", {"path": (kinds.Text, True), **COUNTED, "most": (kinds.Whole, False)}),
        ("plugin.open_function", {**COUNTED, MORE: (Any, False)}),
        ("plugin.Plain", PLAIN),
        ("plugin.Child", PLAIN),
        ("plugin.Empty", {}),
        ("plugin.Data", DATA),
        ("again.Known", DATA),
        ("plugin.DataChild", {**DATA, "share": ANOTHER, "last": (kinds.Part | None, False)}),
        ("plugin.Row", {"a": (kinds.Whole, True), "b": (kinds.Whole, False)}),
        ("plugin.Theirs", {MORE: (Any, False)}),
    ],
)
def test_settings_are_those_of_the_constructor(name, settings):
    assert read(name) == settings


@pytest.mark.parametrize("name", ["plugin.Nobody", "nowhere.Plain"])
def test_what_there_is_not_is_unknown(name):
    with pytest.raises(Unknown):
        read(name)


def test_others_are_taken_where_the_constructor_takes_them():
    asked = {"count": 3, "most_of_all": 5}
    assert list(part({"_target_": "written.plugin.open_function", **asked}, "x")) == []
    assert [fault.key for fault in part({"_target_": "written.plugin.function", **asked}, "x")]
