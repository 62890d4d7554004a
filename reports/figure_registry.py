"""Every figure of the report, from packages that the program names (`figures` of
conf/report.yaml).

A package with a SECTION is a section of the report, and so is each package in it; a module in one
lists its figures under FIGURES. How to read each, as Markdown for the docs:

    python -m reports.figure_registry > docs/figures.md
    python -m reports.figure_registry papers > papers/figures.md"""

import pkgutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from reports.artifacts import Artifacts
from reports.figure import Builder, Entry, Figure

GENERAL = "reports.figures"


class Listed(NamedTuple):
    """An entry and the section it stands in."""

    section: str
    entry: Entry


def figure_registry(packages: Sequence[str]) -> list[Listed]:
    """Return the figures of `packages`, which are installed or in the working directory, in the
    order of the page. A package that is neither, as `papers` beside a wheel, has none."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    return [listed for name in packages if find_spec(name) for listed in _listed(name)]


def _listed(name: str) -> Iterator[Listed]:
    package = import_module(name)
    modules = sorted(pkgutil.iter_modules(package.__path__), key=lambda module: module.name)
    if section := getattr(package, "SECTION", None):
        for module in modules:
            path = f"{name}.{module.name}"
            entries = () if module.ispkg else getattr(import_module(path), "FIGURES", ())
            yield from (Listed(section, entry) for entry in entries)
    for module in modules:
        if module.ispkg:
            yield from _listed(f"{name}.{module.name}")


def builders(entry: Entry, artifacts: Artifacts) -> list[Builder]:
    """Return what draws the figures of an entry, each with the whole advice on how to read it."""
    return [partial(_built, entry, build) for build in entry.builders(artifacts)]


def _built(entry: Entry, build: Builder) -> Figure:
    figure = build()
    return replace(figure, how_to_read=f"{entry.how_to_read} {figure.how_to_read}".strip())


def how_to_read(packages: Sequence[str]) -> str:
    """Return Markdown: a heading for each section, a line for each figure."""
    lines = ["# The figures, and how to read them"]
    for section, entry in figure_registry(packages):
        heading = f"## {section}"
        if heading not in lines:
            lines += ["", heading, ""]
        lines.append(f"- **{entry.title}**: {entry.how_to_read}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(how_to_read(sys.argv[1:] or [GENERAL]), end="")
