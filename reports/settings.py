"""Which evaluations one table may hold: methods are compared with others of their setting alone."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from decoding.models.machine import in_words
from evaluation.page import simulated
from reports.artifacts import Artifacts, Evaluation
from reports.figure import Builder, Figure
from reports.harvest_data import models

Build = Callable[[Sequence[Evaluation]], Figure]
Alike = Sequence[tuple[str, Sequence[Evaluation]]]

SIMULATED = "simulated draft, measured times say nothing of speed"


def each_setting(build: Build) -> Callable[[Artifacts], list[Builder]]:
    """`Entry.builders` of a figure that evaluations of one setting make."""

    def builders(artifacts: Artifacts) -> list[Builder]:
        return [
            partial(_told, build, told, evaluations)
            for told, evaluations in by_setting(artifacts.evaluations)
        ]

    return builders


def setting(evaluation: Evaluation) -> dict[str, str]:
    """What two evaluations have to share for one table to hold both: the pair, what it ran on, and
    the draft's distribution beside the target's. In words, by which `by_setting` tells them
    apart."""
    run, config = evaluation.results["run"], evaluation.config
    draft = (config.get("draft_warp") or config["warp"])["temperature"]
    return {
        "models": models(run["pair"]),
        "pair": run["pair"]["name"],
        "machine": (
            f"{in_words(run['hardware'])}, {in_words(run['dtypes'])}, threads: {run['threads']}"
        ),
        "draft": "" if draft == evaluation.temperature else f"draft at T = {draft:g}",
        "simulated": SIMULATED if simulated(config.get("pair", {})) else "",
    }


def by_setting(evaluations: Sequence[Evaluation]) -> Alike:
    """Evaluations of each setting, with what tells it from the others, and that its draft is
    simulated; one empty group where there are none."""
    settings = [setting(evaluation) for evaluation in evaluations]
    differ = [
        key for key in ("pair", "machine", "draft") if len({each[key] for each in settings}) > 1
    ]
    found: dict[str, tuple[str, list[Evaluation]]] = {}
    for each, evaluation in zip(settings, evaluations, strict=True):
        told = "; ".join(each[key] for key in (*differ, "simulated") if each[key])
        key = " ".join([each["models"], each["machine"], each["draft"]])
        found.setdefault(key, (told, []))[1].append(evaluation)
    return list(found.values()) or [("", [])]


def _told(build: Build, told: str, evaluations: Sequence[Evaluation]) -> Figure:
    """With what is told of its setting in the title."""
    figure = build(evaluations)
    return replace(figure, title=f"{figure.title} ({told})") if told else figure
