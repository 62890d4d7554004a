"""The report's page: one HTML file that needs nothing else, neither a network nor the files beside
it."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from data_gen.storage.dataset import Harvest
from decoding.models.machine import in_words
from evaluation.page import times
from reports.answer import answers
from reports.artifacts import Artifacts, Checkpoint, Evaluation, Json
from reports.figure import Cell, Figure

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
    """A figure that is not in the report, and what it needs."""

    title: str
    needs: str


class Origin(NamedTuple):
    """What a report is made from."""

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
    """viewer: HTML of the trace viewer, taken as it is; everything else is escaped."""
    loader = PackageLoader("reports", ".")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"cell": cell, "number": is_number, "times": times}
    return environment.get_template("page.html").render(
        origins=origins(artifacts),
        answers=answers(artifacts),
        percent=percent,
        sections=[pictures_first(section) for section in sections],
        lacking=lacking,
        left_alone={str(path): why for path, why in artifacts.left_alone.items()},
        viewer=viewer and Markup(viewer),
        most_rows=MOST_ROWS,
        title=title(artifacts),
    )


def pictures_first(section: Section) -> Section:
    return section._replace(shown=sorted(section.shown, key=lambda shown: shown.image is None))


def title(artifacts: Artifacts) -> str:
    """Names the pairs."""
    pairs = [evaluation.config["pair"]["name"] for evaluation in artifacts.evaluations]
    pairs += [harvest.pair.name for harvest in artifacts.harvests]
    pairs += [
        checkpoint.config.get("pair", {}).get("name", "") for checkpoint in artifacts.checkpoints
    ]
    return ", ".join(dict.fromkeys(filter(None, pairs))) or "draftpredict"


def percent(part: float, whole: float) -> str:
    """As CSS has it."""
    return f"{100 * part / whole:.2f}"


def cell(value: Cell) -> str:
    """As the page shows it."""
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def is_number(value: Cell) -> bool:
    return value is None or isinstance(value, int | float)


# What the figures are made from -------------------------------------------------------------------


def origins(artifacts: Artifacts) -> list[Origin]:
    return [
        *map(_evaluation, artifacts.evaluations),
        *map(_harvest, artifacts.harvests),
        *map(_checkpoint, artifacts.checkpoints),
        *(_tuned("thresholds", found) for found in artifacts.thresholds),
        *(_tuned("costs", found) for found in artifacts.costs),
    ]


def _evaluation(evaluation: Evaluation) -> Origin:
    run, config = evaluation.results["run"], evaluation.config
    requests = max(map(len, evaluation.traces.values()))
    about = (
        f"{config['pair']['name']}, temperature {evaluation.temperature:g},"
        f" {', '.join(evaluation.datasets)}: {requests // config['repeats']} prompts, repeats:"
        f" {config['repeats']}; {run['date']}"
    )
    return Origin("evaluation", str(evaluation.folder), about, _machine(run), run["command"])


def _harvest(harvest: Harvest) -> Origin:
    about = (
        f"{harvest.pair.name}, temperature {harvest.warps.target.temperature:g},"
        f" {harvest.manifest.prompts.count} prompts, rounds of {harvest.gamma} tokens"
    )
    facts = harvest.manifest.written
    return Origin("harvest", str(harvest.folder), about, _versions(facts), facts.get("command", ""))


def _checkpoint(checkpoint: Checkpoint) -> Origin:
    made = checkpoint.config.get("provenance", {})
    trained = made.get("data", {}).get("folder", "")
    about = f"{checkpoint.config['predictor']}{f', trained on {trained}' if trained else ''}"
    return Origin(
        "checkpoint", str(checkpoint.folder), about, _versions(made), made.get("command", "")
    )


def _tuned(what: str, found: Json) -> Origin:
    about = f"{found['pair']['name']}{', cost ' + found['cost'] if 'cost' in found else ''}"
    measured_on = found["measured_on"]
    return Origin(
        what, found["file"], about, _machine(measured_on) if measured_on else "", found["command"]
    )


def _machine(facts: Mapping[str, Any]) -> str:
    """Processor, dtypes, threads and versions, of `decoding.models.machine.setup_facts`."""
    parts = [
        in_words(facts["hardware"]),
        in_words(facts["dtypes"]),
        f"{facts['threads']} threads",
        _versions(facts),
    ]
    return ", ".join(filter(None, parts))


def _versions(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())
