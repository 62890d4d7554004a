"""Draw every figure and table that evaluations, harvests, checkpoints and tunings allow, as one
page to look at.

Figures come from packages that the program names (`figures` of conf/report.yaml). A package with a
SECTION is a section of the report, and so is each package in it; a module in one lists its figures
under FIGURES. How to read each, as Markdown for the docs:

    python -m reports.report > docs/figures.md
    python -m reports.report papers > papers/figures.md"""

import pkgutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from evaluation.token_texts import Vocabulary
from reports.artifacts import REPORT, Artifacts
from reports.figure import Builder, Entry, Figure, Missing, save
from reports.page import Lack, Section, Shown, page
from reports.viewer.viewer import fragment
from runtime.errors import UserError, shown
from runtime.files import file_name, replaced_folder, write_json
from runtime.job import as_called, command_line, versions_of
from runtime.tracking import tracked

GENERAL = "reports.figures"
DEFAULT = ("runs", "data", "checkpoints")


class Listed(NamedTuple):
    """An entry and its section."""

    section: str
    entry: Entry


def figure_registry(packages: Sequence[str]) -> list[Listed]:
    """Return the figures of `packages`, installed or in the working directory, in the order of the
    page. A package that is neither, such as `papers` with a wheel, has none."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    return [listed for name in packages if _is_there(name) for listed in _listed(name)]


def _is_there(package: str) -> bool:
    """Return whether a package can be imported. Raises UserError for what is no package."""
    if all(map(str.isidentifier, package.split("."))) and package != "__main__":
        try:
            spec = find_spec(package)
        except ModuleNotFoundError as error:
            if not f"{package}.".startswith(f"{error.name}."):
                raise  # a package around it lacks an import
            spec = None
        if spec is None or spec.submodule_search_locations is not None:
            return spec is not None
    raise UserError(
        f"figures: expected packages, got {shown(package)}. Name a folder of modules with FIGURES,"
        f" such as {GENERAL}"
    )


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


def how_to_read(packages: Sequence[str]) -> str:
    """Return Markdown: a heading for each section, a line for each figure."""
    lines = ["# The figures, and how to read them"]
    for section, entry in figure_registry(packages):
        heading = f"## {section}"
        if heading not in lines:
            lines += ["", heading, ""]
        lines.append(f"- **{entry.title}**: {entry.how_to_read}")
    return "\n".join(lines) + "\n"


def write(
    settings: Any, artifacts: Artifacts, texts: Mapping[Path, Vocabulary], out: Path
) -> tuple[list[Section], list[Lack]]:
    """Make and log the report in `out`. settings: of scripts/report.py; texts: of tokens, by the
    evaluation's folder. Return the figures by section, and those that are lacking."""
    about = [each.config for each in artifacts.evaluations]
    about += [each.config for each in artifacts.checkpoints]
    about += [each.context for each in artifacts.harvests]
    kinds = [one.config["predictor"] for one in artifacts.checkpoints]
    with tracked(settings.logger, "report", settings.plain(), about, kinds) as logger:
        for harvest in artifacts.harvests:
            logger.used(*harvest.artifact)
        for checkpoint in artifacts.checkpoints:
            logger.used(checkpoint.config["predictor"], "predictor", checkpoint.folder)
        for evaluation in artifacts.evaluations:
            logger.used("evaluation", "results", evaluation.folder)
        with replaced_folder(out, REPORT) as folder:
            sections, lacking = build(artifacts, settings.figures, folder)
            text = page(artifacts, sections, lacking, fragment(artifacts.evaluations, texts))
            (folder / "index.html").write_text(text, encoding="utf-8")
            write_json(folder / REPORT, facts(sections, lacking))
        for figure in (shown.figure for section in sections for shown in section.shown):
            image = out / f"{figure.name}.png"
            if image.is_file():
                logger.image(f"figures/{figure.name}", image, f"{figure.title}. {figure.caption}")
            logger.table(f"tables/{figure.name}", figure.columns, figure.rows)
        logger.artifact("report", "report", out)
    return sections, lacking


def searched(run: Any) -> list[Path]:
    """Return the folders of the setting `run`: one, several, or null."""
    if run is None:
        return [Path(name) for name in DEFAULT if Path(name).is_dir()]
    return [Path(folder) for folder in ([run] if isinstance(run, str) else run)]


def build(
    artifacts: Artifacts, packages: Sequence[str], folder: Path
) -> tuple[list[Section], list[Lack]]:
    """Draw the figures of `packages` into `folder`. Return the figures by section, and those that
    are lacking."""
    sections: dict[str, list[Shown]] = {}
    lacking, taken = list[Lack](), set[str]()
    listed = [(*one, one.entry.builders(artifacts)) for one in figure_registry(packages)]
    with tqdm(total=sum(len(each) for *_, each in listed), desc="drawing", unit=" figures") as bar:
        for section, entry, builders in listed:
            needs, shown = dict[str, None](), list[Shown]()
            for builder in builders:
                try:
                    figure = unique(built(entry, builder), taken)
                    images = [path for path in save(figure, folder) if path.suffix == ".png"]
                    shown.append(Shown(figure, images[0].read_bytes() if images else None))
                except Missing as missing:
                    needs[str(missing)] = None
                bar.update()
            sections.setdefault(section, []).extend(shown)
            if not shown:
                lacking.append(Lack(entry.title, as_called("; ".join(needs))))
    return [Section(title, shown) for title, shown in sections.items() if shown], lacking


def built(entry: Entry, builder: Builder) -> Figure:
    """Return a figure with the whole advice on how to read it. Errors about input files (a shard,
    say) are changed to name the key `run`."""
    try:
        figure = builder()
    except UserError as error:
        raise UserError(f"run: {str(error).partition(': ')[2]}") from error
    return replace(figure, how_to_read=f"{entry.how_to_read} {figure.how_to_read}".strip())


def unique(figure: Figure, taken: set[str]) -> Figure:
    """Return the figure with a name that is valid for files and not yet taken: two runs may have
    the same name."""
    name = first = file_name(figure.name)
    number = 1
    while name in taken:
        number += 1
        name = f"{first}-{number}"
    taken.add(name)
    return replace(figure, name=name)


def facts(sections: Sequence[Section], lacking: Sequence[Lack]) -> dict[str, Any]:
    """Return the content of report.json."""
    listed = ("name", "title", "source", "kind", "n", "interval", "how_to_read")
    figures = [
        {"section": section.title, **{key: getattr(shown.figure, key) for key in listed}}
        for section in sections
        for shown in section.shown
    ]
    return {
        "command": command_line(),
        "date": time.strftime("%Y-%m-%d"),
        "version": versions_of(["draftpredict"])["draftpredict"],
        "figures": figures,
        "not_in_this_report": [lack._asdict() for lack in lacking],
    }


if __name__ == "__main__":
    print(how_to_read(sys.argv[1:] or [GENERAL]), end="")
