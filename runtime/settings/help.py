"""What can be set, in tables: for ``--help`` and for the site, from the one description."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from runtime.settings.check import is_made
from runtime.settings.composed import Composed, options, written
from runtime.settings.expected import expected, help_of
from runtime.settings.kinds import Group, Setting, alternatives, each_of, group_among
from runtime.settings.signatures import Unknown, settings_of

WIDTH, COLUMN = 100, 34


class Row(NamedTuple):
    """A setting: where, what is composed there, what it takes, and what it is for."""

    key: str
    value: Any
    takes: str
    about: str


def rows(known: Mapping[str, Setting], values: Mapping[str, Any], key: str = "") -> Iterator[Row]:
    """Every setting, with those of the groups and parts in `values`."""
    for name, (kind, _) in known.items():
        if name not in values:
            continue
        value, inner, group = values[name], f"{key}{name}", group_among(alternatives(kind))
        if is_made(value):
            yield from rows(settings_of_part(value), value, f"{inner}.")
        elif group is not None and isinstance(value, Mapping):
            yield from rows(group.described(), value, f"{inner}.")
        else:
            named = isinstance(value, Mapping) and each_of(alternatives(kind)) is not None
            yield Row(inner, list(value) if named else value, expected(kind), help_of(kind))


def settings_of_part(value: Mapping[str, Any]) -> dict[str, Setting]:
    """Return the settings of something made by its ``_target_``; empty where that is another
    library's."""
    try:
        return settings_of(str(value["_target_"]))
    except Unknown:
        return {}


def table(settings: type[Group], found: Composed, conf: Path) -> str:
    """Text for the terminal."""
    known = settings.described()
    lines = ["Choices (files of conf/<group>; --cfg job prints what they compose):"]
    for name in known:
        if name in found.choices:
            group, option = found.choices[name]
            place = group if group == name else f"{group}@{name}"
            about = (
                f"{help_of(known[name].annotation)}: " if help_of(known[name].annotation) else ""
            )
            lines += _entry(f"{place}={option}", about + ", ".join(options(conf, group)))
    lines += ["", "Settings, and what this command line gives them:"]
    for row in rows(known, found.values()):
        about = "; ".join(part for part in (row.about, row.takes) if part)
        lines += _entry(f"{row.key}={written(row.value)}", about)
    return "\n".join(lines)


def _entry(left: str, right: str) -> Iterator[str]:
    said = wrap(right, WIDTH - COLUMN - 4, break_on_hyphens=False, break_long_words=False) or [""]
    if len(left) > COLUMN:
        yield f"  {left}"
    else:
        yield f"  {left:{COLUMN}}  {said.pop(0)}".rstrip()
    for line in said:
        yield f"  {'':{COLUMN}}  {line}"


def page(programs: Mapping[str, tuple[type[Group], Composed]], conf: Path) -> str:
    """Markdown for the site: the settings of each program, then those of each choice of a group."""
    lines = list[str]()
    for name, (settings, found) in programs.items():
        lines += [f"## {name}", "", *_markdown(rows(settings.described(), found.values(False)))]
    for group in sorted(path for path in conf.iterdir() if path.is_dir()):
        lines += [f"## {group.name}=", ""]
        for file in sorted(group.glob("*.yaml")):
            lines += [f"### {group.name}={file.stem}", "", *_choice(file)]
    return "\n".join(lines) + "\n"


def _choice(file: Path) -> list[str]:
    """What a file of a config group says of itself, and the settings of what it makes."""
    text = file.read_text(encoding="utf-8").splitlines()
    said = [line.removeprefix("# ") for line in text if line.startswith("# ")]
    command, *about = [line for line in said if not line.startswith("@package")]
    values: Any = OmegaConf.to_container(OmegaConf.load(file))
    settings = _markdown(rows(settings_of_part(values), values)) if is_made(values) else []
    return [f"`{command}`", "", " ".join(about), "", *settings]


def _markdown(found: Iterator[Row]) -> list[str]:
    lines = [
        f"| `{row.key}` | `{written(row.value)}` | {_cell(row.about)} | {_cell(row.takes)} |"
        for row in found
    ]
    head = ["| setting | value | what for | takes |", "|---|---|---|---|"]
    return [*head, *lines, ""] if lines else []


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
