"""The report's page: one self-contained HTML file that needs neither a network nor other files."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from decoding.models.machine import in_words
from evaluation.page import times
from reports.answer import answers
from reports.artifacts import Artifacts
from reports.figure import Cell, Figure
from runtime.text import plural

MOST_ROWS = 200  # of a table in the page; its CSV has all


@dataclass(frozen=True)
class Shown:
    """A figure and its picture, a PNG; None for a table."""

    figure: Figure
    image: bytes | None

    @property
    def data(self) -> str:
        return base64.b64encode(self.image or b"").decode()


class Section(NamedTuple):
    title: str
    shown: Sequence[Shown]


class Lack(NamedTuple):
    """A figure that is not in the report, and the input it needs."""

    title: str
    needs: str


class Origin(NamedTuple):
    """An artifact that a report is made from."""

    what: str
    where: str
    about: str
    machine: str
    command: str


def page(
    artifacts: Artifacts,
    sections: Sequence[Section],
    lacking: Sequence[Lack],
    viewer: str | None = None,
) -> str:
    """Return the page. viewer: HTML of the trace viewer, inserted as it is; all else is escaped."""
    loader = PackageLoader("reports", ".")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"cell": cell, "number": is_number, "times": times}
    return environment.get_template("page.html").render(
        origins=origins(artifacts),
        answers=answers(artifacts),
        percent=percent,
        sections=[
            section._replace(shown=sorted(section.shown, key=lambda shown: shown.image is None))
            for section in sections  # pictures first
        ],
        lacking=lacking,
        left_alone={str(path): why for path, why in artifacts.left_alone.items()},
        viewer=viewer and Markup(viewer),
        most_rows=MOST_ROWS,
        title=title(artifacts),
    )


def title(artifacts: Artifacts) -> str:
    """Return the names of the pairs."""
    pairs = [evaluation.config["pair"]["name"] for evaluation in artifacts.evaluations]
    pairs += [harvest.pair.name for harvest in artifacts.harvests]
    pairs += [
        checkpoint.config.get("pair", {}).get("name", "") for checkpoint in artifacts.checkpoints
    ]
    return ", ".join(dict.fromkeys(filter(None, pairs))) or "draftpredict"


def percent(part: float, whole: float) -> str:
    """Return a share in percent for CSS."""
    return f"{100 * part / whole:.2f}"


def cell(value: Cell) -> str:
    """Return a value as the page shows it."""
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def is_number(value: Cell) -> bool:
    return value is None or isinstance(value, int | float)


# Origins of the figures ---------------------------------------------------------------------------


def origins(artifacts: Artifacts) -> list[Origin]:
    listed = []
    for evaluation in artifacts.evaluations:
        run, config = evaluation.results["run"], evaluation.config
        requests = max(map(len, evaluation.traces.values()))
        about = (
            f"{config['pair']['name']}, temperature {evaluation.temperature:g},"
            f" {', '.join(evaluation.datasets)}: {plural(requests // config['repeats'], 'prompt')},"
            f" {plural(config['repeats'], 'repeat')}; {run['date']}"
        )
        place = str(evaluation.folder)
        listed.append(Origin("evaluation", place, about, _machine(run), run["command"]))
    for harvest in artifacts.harvests:
        about = (
            f"{harvest.pair.name}, temperature {harvest.warps.target.temperature:g},"
            f" {plural(harvest.manifest.prompts.count, 'prompt')}, rounds of {harvest.gamma} tokens"
        )
        listed.append(_made("harvest", harvest.folder, about, harvest.manifest.written))
    for checkpoint in artifacts.checkpoints:
        made = checkpoint.config.get("provenance", {})
        trained = made.get("data", {}).get("folder", "")
        about = f"{checkpoint.config['predictor']}{f', trained on {trained}' if trained else ''}"
        listed.append(_made("checkpoint", checkpoint.folder, about, made))
    for what in ("thresholds", "costs"):
        for file in getattr(artifacts, what):
            about = f"{file['pair']['name']}{', cost ' + file['cost'] if 'cost' in file else ''}"
            machine = _machine(file["measured_on"]) if file["measured_on"] else ""
            listed.append(Origin(what, file["file"], about, machine, file["command"]))
    return listed


def _made(what: str, folder: Path, about: str, facts: Mapping[str, Any]) -> Origin:
    return Origin(what, str(folder), about, _versions(facts), facts.get("command", ""))


def _machine(facts: Mapping[str, Any]) -> str:
    """Return processor, dtypes, threads and versions, of `decoding.models.machine.setup_facts`."""
    parts = [
        in_words(facts["hardware"]),
        in_words(facts["dtypes"]),
        f"{facts['threads']} threads",
        _versions(facts),
    ]
    return ", ".join(filter(None, parts))


def _versions(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())
