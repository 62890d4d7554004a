"""Kinds of settings in words."""

from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from runtime.settings.kinds import MOST, Group, Part, Says

_TYPES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
    Any: "anything",
    Part: "a choice of its group",
}


def expected(kind: Any) -> str:
    """What `kind` takes, for "expected ..."."""
    if get_origin(kind) is Annotated:
        inner, *said = get_args(kind)
        words = [one.expected for one in said if isinstance(one, Says)]
        return words[-1] if words else expected(inner) + _range(said)
    if get_origin(kind) in (Union, UnionType):
        return any_of([expected(one) for one in get_args(kind)])
    if get_origin(kind) is Literal:
        return any_of([_literal(value) for value in get_args(kind)])
    if get_origin(kind) is list:
        return f"a list, each {expected(get_args(kind)[0])}"
    if get_origin(kind) in (dict, Mapping) or (isinstance(kind, type) and issubclass(kind, Group)):
        return "settings by name"
    return _TYPES.get(kind, getattr(kind, "__name__", str(kind)))


def help_of(kind: Any) -> str:
    """The line of help in an annotation; "" for none."""
    if get_origin(kind) is not Annotated:
        return ""
    return next((one for one in get_args(kind)[1:] if isinstance(one, str)), "")


def any_of(words: list[str]) -> str:
    """a, b or c"""
    *first, last = dict.fromkeys(words)
    return f"{', '.join(first)} or {last}" if first else last


def _literal(value: Any) -> str:
    return {None: "null", True: "true", False: "false"}.get(value, str(value))


def _range(said: list[Any]) -> str:
    """ " from 1 to 64", " above 0", or nothing."""
    bounds = {
        name: getattr(limit, name)
        for one in said
        for limit in (one, *getattr(one, "metadata", ()))
        for name in ("ge", "gt", "le", "lt")
        if hasattr(limit, name)
    }
    words = {"ge": "from {} on", "gt": "above {}", "lt": "below {}", "le": "at most {}"}
    small = {name: bound for name, bound in bounds.items() if abs(bound) < MOST}
    if small.keys() == {"ge", "le"}:
        return f" from {_number(small['ge'])} to {_number(small['le'])}"
    found = [words[name].format(_number(small[name])) for name in words if name in small]
    return f" {', '.join(found)}" if found else ""


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
