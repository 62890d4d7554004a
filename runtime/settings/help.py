"""Tables of settings, for ``--help`` and for the site, from their one description."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from runtime.settings.check import alternatives, described
from runtime.settings.composed import written
from runtime.settings.expected import expected, help_of
from runtime.settings.kinds import Group, Part
from runtime.settings.signatures import Setting, Unknown, settings_of

WIDTH = 100


class Row(NamedTuple):
    """A setting: where, what is composed there, what it takes, and what it is for."""

    key: str
    value: Any
    takes: str
    about: str


def rows(settings: type[Group], values: Mapping[str, Any]) -> Iterator[Row]:
    """Every setting of a program, with those of the parts that `values` choose."""
    yield from _rows(described(settings), values, "")


def _rows(known: Mapping[str, Setting], values: Mapping[str, Any], key: str) -> Iterator[Row]:
    for name, (kind, _) in known.items():
        if name not in values:
            continue
        value, inner = values[name], f"{key}{name}"
        group = _group(kind)
        if group is not None and isinstance(value, Mapping):
            if help_of(kind):
                yield Row(inner, None, "", help_of(kind))
            yield from _rows(described(group), value, f"{inner}.")
        elif Part in alternatives(kind) and isinstance(value, Mapping):
            yield Row(inner, None, expected(kind), help_of(kind))
            yield from _rows(part_settings(value), value, f"{inner}.")
        else:
            shown = list(value) if isinstance(value, Mapping) else value
            yield Row(inner, shown, expected(kind), help_of(kind))


def part_settings(value: Mapping[str, Any]) -> dict[str, Setting]:
    """Of a part made by its ``_target_``; empty where that is another library's."""
    try:
        return settings_of(str(value.get("_target_")))
    except Unknown:
        return {}


def _group(kind: Any) -> type[Group] | None:
    kinds = alternatives(kind)
    return next((one for one in kinds if isinstance(one, type) and issubclass(one, Group)), None)


def choices(conf: Path, key: str) -> list[str]:
    """The files of the config group that `key` is chosen from."""
    return sorted(path.stem for path in (conf / key.rpartition(".")[2]).glob("*.yaml"))


def table(settings: type[Group], cfg: DictConfig, conf: Path) -> str:
    """Text for the terminal."""
    values: Any = OmegaConf.to_container(cfg)
    lines = ["Settings, as composed by this command line (name=value; --cfg job prints them all):"]
    for row in rows(settings, values):
        options = choices(conf, row.key)
        chosen = f"{row.key}={' | '.join(options)}" if options else row.key
        value = "" if row.value is None and not row.takes else f"={written(row.value)}"
        lines += [
            "",
            fill(
                chosen, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
            )
            if options
            else f"  {row.key}{value}",
        ]
        about = "; ".join(part for part in (row.about, row.takes) if part)
        if about:
            lines.append(fill(about, WIDTH, initial_indent="      ", subsequent_indent="      "))
    return "\n".join(lines)
