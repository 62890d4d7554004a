"""The settings of a plug-in, read from its file without running it: a plug-in's module imports a
model library, and a wrong setting shall be found before that is loaded."""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from runtime.settings import kinds
from runtime.settings.kinds import Setting

OWN = ("runtime", "predictors", "decoding", "data_gen", "evaluation", "pairs")
MORE = "**"  # instead of a setting: there may be others, of which nothing is known
_EMPTY = ("object", "Protocol", "Generic", "ABC", "NamedTuple")  # bases that add no settings
_WORDS = {
    **vars(kinds),
    **{"__builtins__": __builtins__, "str": kinds.Text, "int": kinds.Whole, "float": kinds.Number},
}


class Unknown(Exception):
    """There is no such class or function."""


@cache
def settings_of(target: str) -> dict[str, Setting]:
    """The settings of the class or function `target` ("package.module.name"), by name. Raises
    Unknown."""
    module, _, name = target.rpartition(".")
    return dict(_settings(module, name))


def _settings(module: str, name: str) -> Iterator[tuple[str, Setting]]:
    place, node = _definition(module, name)
    parts = known_classes(place)
    if isinstance(node, ast.FunctionDef):
        yield from _parameters(node, parts)
        return
    maker = next((part for part in node.body if _is_function(part, "__init__")), None)
    if isinstance(maker, ast.FunctionDef):
        yield from list(_parameters(maker, parts))[1:]
        return
    made = [*map(ast.unparse, node.decorator_list), *map(ast.unparse, node.bases)]
    for base in map(ast.unparse, node.bases):
        if base.rpartition(".")[2].partition("[")[0] in _EMPTY:
            continue
        try:
            yield from _settings(place, base.partition("[")[0])
        except Unknown:  # of another library
            yield MORE, Setting(Any, required=False)
    if any("dataclass" in one or one.endswith("NamedTuple") for one in made):
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                yield from _field(part.target.id, part, parts)


def _field(
    name: str, part: ast.AnnAssign, parts: Mapping[str, Any]
) -> Iterator[tuple[str, Setting]]:
    kind = ast.unparse(part.annotation)
    value = ast.unparse(part.value) if part.value is not None else "field()"
    default = "default" in value or not re.match(r"(\w+\.)?field\(", value)
    if not (re.match(r"(\w+\.)?ClassVar\b", kind) or "init=False" in value):
        yield name, Setting(_meaning(part.annotation, parts), not default)


def _parameters(node: ast.FunctionDef, parts: Mapping[str, Any]) -> Iterator[tuple[str, Setting]]:
    arguments, defaults = [*node.args.posonlyargs, *node.args.args], node.args.defaults
    required = len(arguments) - len(defaults)
    for number, argument in enumerate(arguments):
        yield argument.arg, Setting(_meaning(argument.annotation, parts), number < required)
    for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        yield argument.arg, Setting(_meaning(argument.annotation, parts), default is None)
    if node.args.kwarg is not None:
        yield MORE, Setting(Any, required=False)


def _meaning(annotation: ast.expr | None, parts: Mapping[str, Any]) -> Any:
    """What an annotation says in the words of `kinds`, and with names of `parts`; of other words
    nothing is known."""
    if annotation is None:
        return Any
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    try:
        return eval(ast.unparse(annotation), {**parts, **_WORDS})
    except (NameError, AttributeError, TypeError):
        return Any


@cache
def known_classes(module: str) -> dict[str, Any]:
    """The classes of ours that a module knows: what is annotated with one is a part, or a group of
    settings where that is what the class is."""
    found = dict[str, Any]()
    for node in parsed(module).body:
        if isinstance(node, ast.ClassDef):
            is_group = "Group" in map(ast.unparse, node.bases)
            found[node.name] = _as_group(node) if is_group else kinds.Part
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in OWN:
            found |= {alias.asname or alias.name: kinds.Part for alias in node.names}
    return {name: kind for name, kind in found.items() if name[0].isupper()}


def _as_group(node: ast.ClassDef) -> type[kinds.Group]:
    fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
    said = {ast.unparse(part.target): _meaning(part.annotation, {}) for part in fields}
    return type(node.name, (kinds.Group,), {"__annotations__": said})


def _definition(module: str, name: str) -> tuple[str, ast.ClassDef | ast.FunctionDef]:
    """And the module it is in: `module` may import it."""
    for node in parsed(module).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _definition(node.module, alias.name)
    raise Unknown(f"{module}.{name}")


def _is_function(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == name


@cache
def parsed(module: str) -> ast.Module:
    """The syntax of a module. Raises Unknown where there is none."""
    for path in _files(module):
        if path.is_file():
            return ast.parse(path.read_text(encoding="utf-8"))
    raise Unknown(module)


def _files(module: str) -> Iterator[Path]:
    """Where it may be. Packages are not imported: their parts may lie in several folders."""
    package, *inner = module.split(".")
    spec = find_spec(package) if package else None
    if spec is None:
        return
    if not inner and spec.origin:
        yield Path(spec.origin)
    roots = [*(spec.submodule_search_locations or []), *(str(Path(p, package)) for p in sys.path)]
    for root in roots:
        yield Path(root, *inner).with_suffix(".py") if inner else Path(root, "__init__.py")
        yield Path(root, *inner, "__init__.py")
