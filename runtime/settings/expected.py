"""Kinds of settings in words."""

from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from runtime.settings.kinds import MOST, Group, Part, Says

_TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "text",
          type(None): "null", Any: "anything", Part: "a choice of its group"}  # fmt: skip


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
    if get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, Group)):
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
    return str(value).lower() if isinstance(value, bool) else str(value)


def _range(said: list[Any]) -> str:
    """ " from 1 to 64", " above 0", or nothing."""
    bounds = {}
    for one in said:
        for limit in (one, *getattr(one, "metadata", ())):
            for name in ("ge", "gt", "le", "lt"):
                if hasattr(limit, name):
                    bounds[name] = getattr(limit, name)
    low = f" from {_number(bounds['ge'])}" if "ge" in bounds else ""
    low = f" above {_number(bounds['gt'])}" if "gt" in bounds else low
    most = bounds.get("le", bounds.get("lt"))
    if most is None or abs(most) >= MOST:
        return f"{low} on" if "ge" in bounds and low else low
    high = _number(most if "le" in bounds else most - 1)
    return (
        f"{low} to {high}"
        if "ge" in bounds
        else f"{low} and at most {high}"
        if low
        else (f" up to {high}")
    )


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
