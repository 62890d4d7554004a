"""Every figure there is, found in the folders of `reports/figures`.

A folder is a section of the report, named by SECTION in its `__init__.py`; a module in it lists its
figures under FIGURES. The section on the pair at hand comes first, the papers by their folders'
names. How to read each, as Markdown for the docs:

    python -m reports.figure_registry > docs/figures.md"""

import pkgutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import NamedTuple

from reports import figures
from reports.artifacts import Artifacts
from reports.figure import Builder, Entry, Figure

FIRST = "general"


class Listed(NamedTuple):
    """An entry and the section it stands in."""

    section: str
    entry: Entry


def figure_registry() -> list[Listed]:
    """In the order of the page."""
    folders = sorted(
        (found.name for found in pkgutil.iter_modules(figures.__path__) if found.ispkg),
        key=lambda name: (name != FIRST, name),
    )
    return [listed for folder in folders for listed in _of_folder(f"{figures.__name__}.{folder}")]


def _of_folder(name: str) -> Iterator[Listed]:
    package = import_module(name)
    for found in pkgutil.iter_modules(package.__path__):
        entries: Sequence[Entry] = getattr(import_module(f"{name}.{found.name}"), "FIGURES", ())
        yield from (Listed(package.SECTION, entry) for entry in entries)


def builders(entry: Entry, artifacts: Artifacts) -> list[Builder]:
    """What draws the figures of an entry, each with all that is said on how to read it."""
    return [partial(_built, entry, build) for build in entry.builders(artifacts)]


def _built(entry: Entry, build: Builder) -> Figure:
    figure = build()
    return replace(figure, how_to_read=f"{entry.how_to_read} {figure.how_to_read}".strip())


def how_to_read() -> str:
    """Markdown: a heading for each section, a line for each figure."""
    lines = ["# The figures, and how to read them"]
    for section, entry in figure_registry():
        heading = f"## {section}"
        if heading not in lines:
            lines += ["", heading, ""]
        lines.append(f"- **{entry.title}**: {entry.how_to_read}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(how_to_read(), end="")
