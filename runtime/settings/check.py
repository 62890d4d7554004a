"""Composed settings against their description: every fault found, before anything is loaded."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, NamedTuple, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

from runtime.errors import shown
from runtime.settings.expected import expected
from runtime.settings.kinds import Group, Part, Setting, Unshown, alternatives, each_of, group_among
from runtime.settings.signatures import MORE, OWN, Unknown, settings_of

MAKING = ("_target_", "_partial_")  # of a part, not its settings


class Fault(NamedTuple):
    """At `key`: what is `expected` there, and what to do."""

    key: str
    expected: str
    value: Any
    remedy: str = ""
    shows: bool = True

    def __str__(self) -> str:
        found = shown(self.value) if self.shows else "something else"
        return f"{self.key}: expected {self.expected}, got {found}. {self.remedy}"


def faults(settings: type[Group], values: Mapping[str, Any]) -> Iterator[Fault]:
    """What is wrong with `values`, resolved and without Hydra's own."""
    yield from _group(settings, values, "")


def _group(group: type[Group], values: Mapping[str, Any], key: str) -> Iterator[Fault]:
    known = group.described()
    found = [*_unknown(known, values, key), *_settings(known, values, key)]
    yield from found
    if not found:
        for name, what in group.misfits(values).items():
            yield Fault(_join(key, name), what, _at(values, name))


def _settings(known: Mapping[str, Setting], values: Mapping[str, Any], key: str) -> Iterator[Fault]:
    for name, setting in known.items():
        if name in values:
            yield from _value(setting.annotation, values[name], _join(key, name))
        elif setting.required and type(None) not in alternatives(setting.annotation):
            inner = _join(key, name)
            yield Fault(inner, expected(setting.annotation), None, f"Add +{inner}=...")


def _unknown(known: Mapping[str, Setting], values: Mapping[str, Any], key: str) -> Iterator[Fault]:
    for name in values if MORE not in known else ():
        if name not in known and name not in MAKING:
            near = get_close_matches(str(name), known, 1)
            what = f"{near[0]}, perhaps" if near else f"one of {', '.join(known) or 'no settings'}"
            yield Fault(_join(key, str(name)), what, None, f"Leave {name} away", shows=False)


def _value(kind: Any, value: Any, key: str) -> Iterator[Fault]:
    kinds = alternatives(kind)
    if value is None and type(None) in kinds:
        return
    inner = group_among(kinds)
    if Part in kinds and (inner is None or is_made(value)):
        yield from part(value, key)
    elif inner is not None:
        if isinstance(value, dict):
            yield from _group(inner, value, key)
        else:
            yield Fault(key, expected(kind), value)
    elif Any in kinds and is_made(value):
        yield from part(value, key)
    elif isinstance(value, dict) and value and (each := each_of(kinds)) is not None:
        for name, one in value.items():
            yield from _value(each, one, _join(key, str(name)))
    elif not fits(kind, value):
        yield Fault(key, expected(kind), value, shows=not may_be_secret(kind))


def part(value: Any, key: str) -> Iterator[Fault]:
    """What is wrong with something that its ``_target_`` makes."""
    if not is_made(value):
        choice = key.rpartition(".")[2]
        yield Fault(key, f"a choice of the group {choice}, or settings with a _target_", value)
        return
    target = value["_target_"]
    try:
        known = settings_of(target)
    except Unknown:
        package, *inner = target.split(".")
        if package in OWN or not (inner and all(map(str.isidentifier, target.split(".")))):
            yield Fault(f"{key}._target_", "a class or function that there is", target)
        return  # another library's: it says itself what is wrong
    if not isinstance(value.get("_partial_", False), bool):
        yield Fault(f"{key}._partial_", expected(bool), value["_partial_"])
    given = [name for name, one in known.items() if one.required and name not in value]
    if value.get("_partial_") and known and not given:
        yield Fault(f"{key}._partial_", "false, for nothing is missing", True)
    if value.get("_partial_"):
        known = {name: setting._replace(required=False) for name, setting in known.items()}
    yield from _unknown(known, value, key)
    yield from _settings(known, value, key)


def is_made(value: Any) -> bool:
    """Whether it is a part: settings with a ``_target_``."""
    return isinstance(value, dict) and isinstance(value.get("_target_"), str)


def may_be_secret(kind: Any) -> bool:
    return any(isinstance(one, Unshown) or may_be_secret(one) for one in get_args(kind))


def fits(kind: Any, value: Any) -> bool:
    """Whether `value` is one of `kind`, as it stands."""
    try:
        _adapter(kind).validate_python(value)
    except ValidationError:
        return False
    return True


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(strict=True, arbitrary_types_allowed=True))


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _at(values: Any, name: str) -> Any:
    for part in name.split("."):
        values = values[part]
    return values
