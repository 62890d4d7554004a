"""Values that no setting of another kind may take, and every key of every program to try them
on."""

import math
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from runtime.cli import Program, modules
from runtime.settings.composed import Composed, composed, options

ROOT = Path(__file__).resolve().parents[3]
CONF = ROOT / "conf"
PROGRAMS = sorted(path.stem for path in CONF.glob("*.yaml"))
VALUES: list[Any] = [
    *("no", "off", "n", "false", "true", "null", "abc", "", " ", "3", "../x", "/proc/x", "a\0b"),
    *("\u202emüßig", "a\x1b[31mb", "a\u2028b", "x" * 300, "\ud800", "???"),
    *(math.nan, math.inf, -math.inf, -1, 0, 1.5, 1e-46, 2**64, -(2**64), 10**400),
    *(True, False, None),
    *([], ["x"], [1, 1], [math.nan], [[]], {}, {"a": 1}, {"_target_": "os.system"}),
]
NUMBERS = ("timeout", "save_seconds", "draft", "target")  # not whole, though their values are
REFUSED = (
    "tune_checkpoints cost=measure",
    "tune_tree structure=",
)  # options that a program cannot use
VALUES += [{"_target_": 5}, {"a": {"b": [None]}}]


class Place(NamedTuple):
    """A setting of a program, in one of its `compositions`, and its value there."""

    program: str
    composition: int
    key: str
    value: Any


@cache
def program_of(name: str) -> Program:
    """Return the program, or the mode of one, that ``conf/<name>.yaml`` is for."""
    programs = [
        each for module in modules().values() for each in import_module(module).main.programs
    ]
    return next(program for program in programs if program.config == name)


@cache
def compositions(name: str) -> list[tuple[dict[str, str], Composed]]:
    """Choices by key: as it is, and the n-th options of all groups that stand at the top
    together."""
    own = composed(CONF, name, [], more=None)
    found = [({}, own)]
    for number in range(max((len(options(CONF, g)) for g, _ in own.choices.values()), default=0)):
        chosen = {}
        for key, (group, _) in own.choices.items():
            top = group != "experiment" and not {"/", "."} & set(key)
            names = options(CONF, group) if top else []
            if number < len(names) and not f"{name} {group}={names[number]}".startswith(REFUSED):
                chosen[key] = names[number]
        groups = {key: group for key, (group, _) in own.choices.items()}
        overrides = [
            f"{groups[key] if groups[key] == key else f'{groups[key]}@{key}'}={option}"
            for key, option in chosen.items()
        ]
        found.append((chosen, composed(CONF, name, overrides, more=None)))
    return found


def places(name: str) -> Iterator[Place]:
    """Every key of a program once for each choice that it belongs to; of parts of one class in one
    group, such as the stop rules of all methods, one."""
    seen = set[Any]()
    for number, (_, found) in enumerate(compositions(name)):
        values = found.values()
        for key in keys(found.cfg):
            top, (holder, _, last) = key.split(".")[0], key.rpartition(".")
            part = at(values, holder).get("_target_")
            about = (top, part, last) if part else (key, found.choices.get(top))
            if about not in seen:
                seen.add(about)
                yield Place(name, number, key, at(values, key))


def keys(cfg: Any, above: str = "") -> Iterator[str]:
    for name in cfg:
        key = f"{above}{name}"
        yield key
        whole = OmegaConf.is_missing(cfg, name) or OmegaConf.is_interpolation(cfg, name)
        if not whole and OmegaConf.is_dict(cfg[name]):
            yield from keys(cfg[name], f"{key}.")


def at(values: Mapping[str, Any], key: str) -> Any:
    found: Any = values
    for name in filter(None, key.split(".")):
        found = found[name]
    return found


def changed(values: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """`values` with another value at `key`."""
    name, _, below = key.partition(".")
    return {**values, name: changed(values[name], below, value) if below else value}


def is_like(value: Any, default: Any, key: str = "") -> bool:
    """Whether `value` may stand where `default` stands: told from the two alone, not from any
    description. A device may be a mapping."""
    if value and isinstance(value, dict) and default in ("cpu", "auto", "cuda:0"):
        return True
    if value is None or default is None:
        return True
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, int) and isinstance(value, float):
        return math.isfinite(value) and value > 0 and key.rpartition(".")[2] in NUMBERS
    if isinstance(default, int):
        return isinstance(value, int) and abs(value) < 2**33
    if isinstance(default, float):
        return isinstance(value, int | float) and abs(value) < 1e13
    if isinstance(default, str):
        return isinstance(value, str) and value.isprintable() and value.strip() != ""
    return isinstance(value, type(default))
