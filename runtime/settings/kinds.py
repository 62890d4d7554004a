"""The kinds of settings: names for the annotations of a program's settings and of a plug-in's
constructor.

    threshold: Annotated[Probability, "a draft ends after a token less probable than this"]

Text in an annotation is its line of help. A range is a `Field`: ``Annotated[int, Field(ge=1,
le=64), "nodes of the tree"]``. Unlike pydantic's default nothing is converted: ``no`` is not a
boolean, ``'3'`` and ``3.0`` are not integers. An integer is accepted as a number; NaN and infinity
are not.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path as _Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Optional,
    Self,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)
from urllib.parse import urlsplit

from omegaconf import DictConfig, OmegaConf
from pydantic import AfterValidator, Field

from runtime.json_lines import SURROGATE
from runtime.text import LONGEST_NAME

__all__ = ["Annotated", "Any", "Field", "Literal", "Mapping", "Optional", "Sequence", "Union"]

LONGEST_PATH = 2000  # in bytes; systems take 4096, and names are made of it
MOST = 2**31 - 1
MOST_NODES = 4096  # of a draft tree: attention takes memory with their square
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class Says(NamedTuple):
    """Mark in an annotation: what error lines call the expected value, where its type does not
    say it."""

    expected: str


class Unshown(NamedTuple):
    """Mark in an annotation: error lines do not show a wrong value, which may be a secret."""


class Part:
    """A choice of a config group that is made by its ``_target_``: its settings are those of that
    class or function (`runtime.settings.check`)."""


class Setting(NamedTuple):
    """A setting. annotation: one of the kinds below, `Part`, a `Group`, or Any without one."""

    annotation: Any
    required: bool = True


class Group:
    """Settings by name: the annotations of a subclass. `misfits` may find faults between them.

    composed: the node that they were read from (`of`), to be stored or instantiated as a whole"""

    def __init__(self, composed: Any = None) -> None:
        self.composed = composed

    @classmethod
    def described(cls) -> dict[str, Setting]:
        """Return the settings by name."""
        hints = get_type_hints(cls, include_extras=True)
        return {name: Setting(kind) for name, kind in hints.items()}

    @classmethod
    def of(cls, cfg: Any) -> Self:
        """Return composed and checked settings as an object: an attribute for each setting, None
        for an optional one that is not given. Groups in it are such objects themselves; a `Part`
        stays the node that hydra instantiates."""
        settings = cls(cfg)
        for name, setting in cls.described().items():
            value = cfg[name] if name in cfg else None
            setattr(settings, name, _typed(setting.annotation, value))
        return settings

    def plain(self) -> dict[str, Any]:
        """Return all settings as JSON values."""
        values: Any = OmegaConf.to_container(self.composed, resolve=True)
        return dict(values)

    @staticmethod
    def misfits(values: Mapping[str, Any]) -> Mapping[str, str]:
        """Return, by setting, what is expected of values that are right each but wrong
        together."""
        return {}


def _typed(kind: Any, value: Any) -> Any:
    kinds = alternatives(kind)
    inner, each = group_among(kinds), each_of(kinds)
    if isinstance(value, DictConfig) and inner is not None and "_target_" not in value:
        return inner.of(value)
    if isinstance(value, DictConfig) and each is not None:
        return {str(name): _typed(each, part) for name, part in value.items()}
    if Part in kinds or not OmegaConf.is_config(value):
        return value
    return OmegaConf.to_container(value, resolve=True)


def alternatives(kind: Any) -> Sequence[Any]:
    """Return the members of a union, else `kind` alone, without its range and help."""
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) in (Union, UnionType):
        return [one for member in get_args(kind) for one in alternatives(member)]
    return [kind]


def group_among(kinds: Sequence[Any]) -> type[Group] | None:
    return next((one for one in kinds if isinstance(one, type) and issubclass(one, Group)), None)


def each_of(kinds: Sequence[Any]) -> Any:
    """Return the kind of all values of a mapping by names; None if it is no such mapping, or its
    values are Any."""
    for kind in kinds:
        if get_origin(kind) is dict and get_args(kind)[1] is not Any:
            return get_args(kind)[1]
    return None


def _printable(value: str) -> str:
    if not value.strip() or _CONTROL.search(value) or SURROGATE.search(value):
        raise ValueError
    return value


def _path(value: str | _Path) -> str | _Path:
    names = _Path(_printable(str(value))).parts
    if (
        any(len(os.fsencode(name)) > LONGEST_NAME for name in names)
        or len(os.fsencode(str(value))) > LONGEST_PATH
    ):
        raise ValueError
    return value


def _output(value: str) -> str:
    if value.startswith("~"):
        raise ValueError
    return value


def _distinct(values: Sequence[Any]) -> Sequence[Any]:
    if len({(type(value), value) for value in values}) < len(values):
        raise ValueError
    return values


def _in_one_call(widths: Sequence[int]) -> Sequence[int]:
    layer, nodes = 1, 0
    for width in widths:
        layer *= width
        nodes += layer
        if nodes > MOST_NODES:
            raise ValueError
    return widths


def _temperature(value: float) -> float:
    if 0 < value < 1e-6:
        raise ValueError
    return value


def _address(value: str) -> str:
    """Refuse an address with more than a host and a path: results record it, and the rest may be
    secret."""
    parts = urlsplit(_printable(value))
    if parts.scheme not in ("http", "https") or not parts.hostname or set("@?#;%") & set(value):
        raise ValueError
    _ = parts.port  # ValueError where it is none
    return value


Count = Annotated[int, Field(ge=1, le=MOST)]
Size = Annotated[int, Field(ge=0, le=MOST)]
Whole = Annotated[int, Field(ge=-MOST, le=MOST)]
DraftLength = Annotated[int, Field(ge=1, le=1000)]
Nodes = Annotated[int, Field(ge=1, le=MOST_NODES)]
Seed = Annotated[int, Field(ge=0, lt=2**32), Says(f"a whole number from 0 to {2**32 - 1}")]
Number = Annotated[float, Field(ge=-1e12, le=1e12)]
Positive = Annotated[float, Field(gt=0, le=1e12)]
NotNegative = Annotated[float, Field(ge=0, le=1e12)]
Probability = Annotated[float, Field(ge=0, le=1)]
Temperature = Annotated[
    float,
    Field(ge=0, le=1000),
    AfterValidator(_temperature),
    Says("0, which is greedy, or a number from 0.000001 to 1000"),
]
TopP = Annotated[float, Field(ge=1e-6, le=1)]
Text = Annotated[str, AfterValidator(_printable), Says("text on one line")]
Path = Annotated[str | _Path, AfterValidator(_path), Says("a path")]
Address = Annotated[
    str, AfterValidator(_address), Unshown(),
    Says("an address such as http://127.0.0.1:8000/v1, without user name, password, query or"
         " fragment"),
]  # fmt: skip
Arguments = Annotated[dict[str, Any], Says("arguments by name, such as {enable_thinking: false}")]
Variable = Annotated[
    str, Field(pattern="^[A-Z_][A-Z0-9_]*$"), Unshown(),
    Says("the name of an environment variable, such as API_KEY"),
]  # fmt: skip
Output = Annotated[Path, AfterValidator(_output), Says("a path, with no ~ for the home folder")]
Template = Annotated[
    Arguments | None,
    "of the chat template, such as {enable_thinking: false}; a server gets them, too. date: the day"
    " that it reads",
]
TooLong = Annotated[
    Literal["error", "skip", "cut"],
    "what becomes of a prompt that leaves no room for a response: the program ends with its name,"
    " it is left out, or the end of its text is",
]
Cut = Annotated[
    Count | None,
    "tokens that are kept of a text that is continued (chat=false), from its beginning; null: all",
]
Distinct = AfterValidator(_distinct)
Names = Annotated[list[Text], Distinct, Says("a list of different names, such as [a,b]")]
Paths = Annotated[list[Path], Distinct, Says("a list of different paths, such as [a,b]")]
Addresses = Annotated[
    list[Address], Field(min_length=1), Distinct, Says("a list of different addresses")
]
Counts = Annotated[
    list[Count], Field(min_length=1), Distinct,
    Says("a list of different whole numbers from 1 on, such as [1,2,4]"),
]  # fmt: skip
Layers = Annotated[
    Sequence[Annotated[int, Field(ge=-10000, le=-1)]], Field(min_length=1), Distinct,
    Says("a list of different layers, counted from the last one, -1, such as [-2,-1]"),
]  # fmt: skip
Widths = Annotated[
    Sequence[Nodes], Field(min_length=1), AfterValidator(_in_one_call),
    Says(f"a list of whole numbers from 1 on, such as [2,2,1], of {MOST_NODES} nodes at most"),
]  # fmt: skip
