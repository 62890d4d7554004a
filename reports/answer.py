"""The answer at the top of a report: the rule to use on this machine, its speed-up, whether the
output is the target's, the calibration of predictions, and the command."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isnan

from decoding.models.machine import other_machine
from evaluation.methods import chosen_here
from evaluation.page import answer, chosen, labelled
from evaluation.table import ALL, BASELINE, compare
from reports.artifacts import Artifacts, Checkpoint, Evaluation, Json, grouped
from reports.harvest_data import models
from reports.runs import method, setting
from runtime.intervals import Estimate

NUMBERS = ("threshold", "gamma")  # tuned settings, by the last part of their keys
ONE_RUN = {"methods", "limit", "repeats", "experiment", "out", "tried"}
"""Settings of a command that say which comparison it was."""


@dataclass(frozen=True)
class Bar:
    """One method's measured speed. settings: the numbers of its stop rule, or that it was decoded
    without a draft; chosen: whether it is the one to use."""

    method: str
    settings: str
    tokens_per_second: float
    speed: Estimate
    chosen: bool


@dataclass(frozen=True)
class Answer:
    """The answer for one pair, machine and temperature.

    where: these in words; use: the advice, a sentence; why: its basis and how it was chosen; bars:
    every method, fastest first; datasets: of its prompts; lossless, calibration: lines; command:
    decodes with the advised method; origin: the evaluation's folder"""

    where: str
    use: str
    why: str
    bars: Sequence[Bar]
    datasets: str
    lossless: Sequence[str]
    calibration: Sequence[str]
    command: str
    origin: str

    @property
    def longest(self) -> float:
        """The end of the axis."""
        ends = [end for bar in self.bars for end in (bar.speed.value, bar.speed.high) if end]
        return 1.05 * max([1.0, *ends])


def answers(artifacts: Artifacts) -> list[Answer]:
    """Return one answer for each pair, machine and temperature of an evaluation; of several
    evaluations, the last of those with the most requests is used."""

    def where(evaluation: Evaluation) -> tuple[str | float, ...]:
        words = setting(evaluation)
        return words["models"], words["machine"], words["draft"], evaluation.temperature

    def requests(evaluation: Evaluation) -> int:
        return sum(map(len, evaluation.traces.values()))

    largest = [
        max(reversed(alike), key=requests) for alike in grouped(artifacts.evaluations, where)
    ]
    given = (_answer(evaluation, artifacts) for evaluation in largest)
    return [each for each in given if each is not None]


def _answer(evaluation: Evaluation, artifacts: Artifacts) -> Answer | None:
    """Return the answer of an evaluation, None if nothing was compared with plain decoding."""
    if not evaluation.traces.get(BASELINE):
        return None
    speeds, table = compare(evaluation.measurements), evaluation.summary[ALL]
    names = sorted(
        (name for name in speeds if name != BASELINE), key=lambda name: -speeds[name].value
    )
    if not names:
        return None
    where, run = setting(evaluation), evaluation.results["run"]
    tuning, advised = _tuning(evaluation, artifacts), None
    how = chosen_here({name: evaluation.settings(name) for name in names}, run["command"])
    if tuning is not None:
        advised = tuning["results"]["chosen"]["advice"]
        split = f"the {tuning['chosen_on']} split of {tuning['data']['folder']} ({tuning['file']})"
        how = f"Tuning on {split} with costs of this machine says: {advised}"
    shown = {name: name.replace("_", " ") for name in names}
    labels = {name: labelled(shown[name], evaluation.settings(name)) for name in names}
    drafting = [name for name in names if evaluation.speculates(name)]
    use, why = answer(evaluation.measurements, labels, drafting, advised, how, evaluation.config)
    best = chosen(speeds, drafting, advised)
    on = f"{where['pair']}, T = {evaluation.temperature:g}, {where['machine']}"
    command = shlex.split(run["command"])
    kept = [part for part in command if re.split(r"[.=]", part)[0] not in ONE_RUN]
    return Answer(
        where="; ".join(filter(None, [on, where["simulated"]])),
        use=use,
        why=why,
        bars=[
            Bar(
                shown[name],
                _numbers(evaluation, name)
                if name in drafting
                else "plain decoding: no draft is worth it",
                table[name]["tokens/s"].value,
                speeds[name],
                name == best,
            )
            for name in names
        ],
        datasets=", ".join(evaluation.datasets),
        lossless=evaluation.results["lossless"],
        calibration=list(_calibration(evaluation, artifacts.checkpoints)),
        command=shlex.join([*kept, f"methods=[{best or BASELINE}]"]),
        origin=str(evaluation.folder),
    )


def _tuning(evaluation: Evaluation, artifacts: Artifacts) -> Json | None:
    """Return the choice of scripts/tune.py for this pair and these distributions, with costs of
    this machine; the last one if there are several."""
    run, wanted = evaluation.results["run"], _temperatures(evaluation.config)
    fitting = [
        tuning
        for tuning in artifacts.thresholds
        if models(tuning["pair"]) == models(run["pair"])
        and _temperatures(tuning) == wanted
        and tuning["measured_on"]
        and not other_machine(tuning["measured_on"], run)
    ]
    return fitting[-1] if fitting else None


def _temperatures(config: Json) -> tuple[float, float]:
    """Return the temperatures of the target and of the draft."""
    target = config["warp"]
    draft = config.get("draft_warp") or target
    return float(target["temperature"]), float(draft["temperature"])


def _numbers(evaluation: Evaluation, name: str) -> str:
    """Return the tuned numbers of a method's stop rule, e.g. "threshold 0.56"."""
    numbers = [
        (key.rpartition(".")[2], value)
        for key, value in method(evaluation, name).settings.items()
        if key.startswith("stop.") and key.rpartition(".")[2] in NUMBERS
    ]
    return ", ".join(f"{key} {value:g}" for key, value in numbers if value is not None)


def _calibration(evaluation: Evaluation, checkpoints: Sequence[Checkpoint]) -> Iterator[str]:
    """Yield a line for each checkpoint used in decoding: the calibration error of its head's
    predictions on prompts it has not seen."""
    used = [made["sha256"] for made in evaluation.results["checkpoints"].values()]
    for checkpoint in (one for one in checkpoints if one.config["sha256"] in used):
        for prompts, kinds in checkpoint.config["metrics"]["reliability"].items():
            for stages in (kinds[kind] for kind in ("class", "token") if kind in kinds):
                before, after = (
                    _percent(stages[stage]["ece"]) for stage in ("as trained", "calibrated")
                )
                yield (
                    f"{checkpoint.folder.name}, {prompts}: predictions are off by {after} on"
                    f" average, by {before} before calibration"
                )


def _percent(estimate: Sequence[float | None]) -> str:
    """Return an estimate in percent. estimate: value, low, high; the ends None or NaN if there are
    none."""
    value, *ends = (
        f"{100 * number:.1f}" for number in estimate if number is not None and not isnan(number)
    )
    return f"{value} % ({'-'.join(ends)})" if ends else f"{value} %"
