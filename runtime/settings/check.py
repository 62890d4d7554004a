"""Checks of composed settings against their description: all faults, before anything is loaded.

The settings of a plug-in are read from its file without running it: its module imports a model
library, and wrong settings are to be reported before that is loaded."""

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError

from runtime.errors import shown
from runtime.settings import kinds
from runtime.settings.kinds import (
    MOST,
    Group,
    Part,
    Says,
    Setting,
    Unshown,
    alternatives,
    each_of,
    group_among,
)

OWN = ("runtime", "predictors", "decoding", "data_gen", "evaluation", "pairs")
MAKING = ("_target_", "_partial_")  # keys of a part that are not its settings
MORE = "**"  # in place of a setting's name: further settings are accepted unchecked
_EMPTY = ("object", "Protocol", "Generic", "ABC", "NamedTuple")  # bases that add no settings
_MEANINGS = {
    **vars(kinds),
    **{"__builtins__": __builtins__, "str": kinds.Text, "int": kinds.Whole, "float": kinds.Number},
}
_CONSTANTS = {None: "null", True: "true", False: "false"}
_TYPES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
    Any: "anything",
    Part: "a choice of its group",
}


class Fault(NamedTuple):
    """A wrong value at `key`: what is `expected` there, and what to do."""

    key: str
    expected: str
    value: Any
    remedy: str = ""
    shows: bool = True

    def __str__(self) -> str:
        value = shown(self.value) if self.shows else "something else"
        return f"{self.key}: expected {self.expected}, got {value}. {self.remedy}"


def faults(group: type[Group], values: Mapping[str, Any], key: str = "") -> Iterator[Fault]:
    """Yield what is wrong with `values` at `key`: resolved settings, without Hydra's own."""
    known = group.described()
    wrong = [*_unknown(known, values, key), *_settings(known, values, key)]
    yield from wrong
    if not wrong:
        for name, what in group.misfits(values).items():
            value: Any = values
            for part in name.split("."):
                value = value[part]
            yield Fault(_join(key, name), what, value)


def _settings(known: Mapping[str, Setting], values: Mapping[str, Any], key: str) -> Iterator[Fault]:
    for name, (annotation, required) in known.items():
        inner = _join(key, name)
        if name in values:
            yield from _value(annotation, values[name], inner)
        elif required and type(None) not in alternatives(annotation):
            yield Fault(inner, expected(annotation), None, f"Add +{inner}=...")


def _unknown(known: Mapping[str, Setting], values: Mapping[str, Any], key: str) -> Iterator[Fault]:
    for name in values if MORE not in known else ():
        if name not in known and name not in MAKING:
            near = get_close_matches(str(name), known, 1)
            what = f"{near[0]}, perhaps" if near else f"one of {', '.join(known) or 'no settings'}"
            yield Fault(_join(key, str(name)), what, None, f"Leave {name} away", shows=False)


def _value(kind: Any, value: Any, key: str) -> Iterator[Fault]:
    members = alternatives(kind)
    if value is None and type(None) in members:
        return
    inner = group_among(members)
    if (Part in members and (inner is None or is_made(value))) or (
        Any in members and is_made(value)
    ):
        yield from part(value, key)
    elif inner is not None and isinstance(value, dict):
        yield from faults(inner, value, key)
    elif isinstance(value, dict) and value and (each := each_of(members)) is not None:
        for name, one in value.items():
            yield from _value(each, one, _join(key, str(name)))
    elif inner is not None or not fits(kind, value):
        yield Fault(key, expected(kind), value, shows=not may_be_secret(kind))


def part(value: Any, key: str) -> Iterator[Fault]:
    """Yield what is wrong with something that its ``_target_`` makes."""
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
        return  # of another library, which checks its own settings
    if not isinstance(value.get("_partial_", False), bool):
        yield Fault(f"{key}._partial_", expected(bool), value["_partial_"])
    if value.get("_partial_"):
        if known and not any(one.required and name not in value for name, one in known.items()):
            yield Fault(f"{key}._partial_", "false, for nothing is missing", True)
        known = {name: setting._replace(required=False) for name, setting in known.items()}
    yield from _unknown(known, value, key)
    yield from _settings(known, value, key)


def is_made(value: Any) -> bool:
    """Return whether it is a part: settings with a ``_target_``."""
    return isinstance(value, dict) and isinstance(value.get("_target_"), str)


def may_be_secret(kind: Any) -> bool:
    return any(isinstance(one, Unshown) or may_be_secret(one) for one in get_args(kind))


def fits(kind: Any, value: Any) -> bool:
    """Return whether `value` is one of `kind`, as it stands."""
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


# Kinds of settings in words -----------------------------------------------------------------------


def expected(kind: Any) -> str:
    """Return what `kind` takes, for "expected ..."."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        phrases = [one.expected for one in inner if isinstance(one, Says)]
        return phrases[-1] if phrases else expected(inner[0]) + _range(inner[1:])
    if origin in (Union, UnionType):
        return any_of([expected(one) for one in inner])
    if origin is Literal:
        return any_of([_CONSTANTS.get(value, str(value)) for value in inner])
    if origin is list:
        return f"a list, each {expected(inner[0])}"
    if origin in (dict, Mapping) or (isinstance(kind, type) and issubclass(kind, Group)):
        return "settings by name"
    return _TYPES.get(kind, getattr(kind, "__name__", str(kind)))


def help_of(kind: Any) -> str:
    """Return the line of help in an annotation; "" for none."""
    if get_origin(kind) is not Annotated:
        return ""
    return next((one for one in get_args(kind)[1:] if isinstance(one, str)), "")


def any_of(words: list[str]) -> str:
    """Join words as "a, b or c"."""
    *first, last = dict.fromkeys(words)
    return f"{', '.join(first)} or {last}" if first else last


def _range(marks: Sequence[Any]) -> str:
    """Return " from 1 to 64", " above 0", or ""."""
    words = {"ge": "from {} on", "gt": "above {}", "lt": "below {}", "le": "at most {}"}
    bounds = {
        name: getattr(limit, name)
        for mark in marks
        for limit in (mark, *getattr(mark, "metadata", ()))
        for name in words
        if hasattr(limit, name) and abs(getattr(limit, name)) < MOST
    }
    numbers = {name: f"{n:g}" if isinstance(n, float) else str(n) for name, n in bounds.items()}
    if numbers.keys() == {"ge", "le"}:
        return f" from {numbers['ge']} to {numbers['le']}"
    phrases = [words[name].format(numbers[name]) for name in words if name in numbers]
    return f" {', '.join(phrases)}" if phrases else ""


# Settings of plug-ins -----------------------------------------------------------------------------


class Unknown(Exception):
    """There is no such class or function."""


@cache
def settings_of(target: str) -> dict[str, Setting]:
    """Return the settings of the class or function `target` ("package.module.name"), by name.
    Raises Unknown."""
    module, _, name = target.rpartition(".")
    return dict(_written_in(module, name))


def _written_in(module: str, name: str) -> Iterator[tuple[str, Setting]]:
    module, node = _definition(module, name)
    classes = known_classes(module)
    if isinstance(node, ast.FunctionDef):
        yield from _parameters(node, classes)
        return
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            yield from list(_parameters(part, classes))[1:]
            return
    made = [*map(ast.unparse, node.decorator_list), *map(ast.unparse, node.bases)]
    for base in map(ast.unparse, node.bases):
        if base.rpartition(".")[2].partition("[")[0] in _EMPTY:
            continue
        try:
            yield from _written_in(module, base.partition("[")[0])
        except Unknown:  # of another library
            yield MORE, Setting(Any, required=False)
    if any("dataclass" in one or one.endswith("NamedTuple") for one in made):
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                yield from _field(part.target.id, part, classes)


def _field(
    name: str, part: ast.AnnAssign, classes: Mapping[str, Any]
) -> Iterator[tuple[str, Setting]]:
    kind = ast.unparse(part.annotation)
    value = ast.unparse(part.value) if part.value is not None else "field()"
    default = "default" in value or not re.match(r"(\w+\.)?field\(", value)
    if not (re.match(r"(\w+\.)?ClassVar\b", kind) or "init=False" in value):
        yield name, Setting(_meaning(part.annotation, classes), not default)


def _parameters(node: ast.FunctionDef, classes: Mapping[str, Any]) -> Iterator[tuple[str, Setting]]:
    arguments, defaults = [*node.args.posonlyargs, *node.args.args], node.args.defaults
    required = len(arguments) - len(defaults)
    for number, argument in enumerate(arguments):
        yield argument.arg, Setting(_meaning(argument.annotation, classes), number < required)
    for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        yield argument.arg, Setting(_meaning(argument.annotation, classes), default is None)
    if node.args.kwarg is not None:
        yield MORE, Setting(Any, required=False)


def _meaning(annotation: ast.expr | None, classes: Mapping[str, Any]) -> Any:
    """Return the meaning of an annotation, with the names of `runtime.settings.kinds` and of
    `classes`; Any if it uses others."""
    if annotation is None:
        return Any
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    try:
        return eval(ast.unparse(annotation), {**classes, **_MEANINGS})
    except (NameError, AttributeError, TypeError):
        return Any


@cache
def known_classes(module: str) -> dict[str, Any]:
    """Return the toolkit's classes that a module knows (a parameter annotated with one is a part,
    or a group of settings if the class is one) and its names for annotations."""
    classes = dict[str, Any]()
    for node in parsed(module).body:
        if isinstance(node, ast.ClassDef) and "Group" in map(ast.unparse, node.bases):
            fields = {
                ast.unparse(part.target): _meaning(part.annotation, classes)
                for part in node.body
                if isinstance(part, ast.AnnAssign)
            }
            classes[node.name] = type(node.name, (Group,), {"__annotations__": fields})
        elif isinstance(node, ast.ClassDef):
            classes[node.name] = Part
        elif isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Annotated["):
            classes[ast.unparse(node.targets[0])] = _meaning(node.value, classes)
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in OWN:
            classes |= {alias.asname or alias.name: Part for alias in node.names}
    return {name: kind for name, kind in classes.items() if name[0].isupper()}


def _definition(module: str, name: str) -> tuple[str, ast.ClassDef | ast.FunctionDef]:
    """Return the module that defines `name`, which `module` may import, and its syntax."""
    for node in parsed(module).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _definition(node.module, alias.name)
    raise Unknown(f"{module}.{name}")


@cache
def parsed(module: str) -> ast.Module:
    """Return the syntax of a module. Raises Unknown where there is none. Packages are not imported:
    their parts may lie in several folders."""
    package, *inner = module.split(".")
    spec = find_spec(package) if package else None
    if spec is None:
        raise Unknown(module)
    roots = [*(spec.submodule_search_locations or []), *(str(Path(p, package)) for p in sys.path)]
    files = [Path(spec.origin)] if not inner and spec.origin else []
    for root in roots:
        files += [Path(root, *inner).with_suffix(".py")] if inner else []
        files += [Path(root, *inner, "__init__.py")]
    for path in files:
        if path.is_file():
            return ast.parse(path.read_text(encoding="utf-8"))
    raise Unknown(module)
