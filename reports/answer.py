"""What a report says first: which rule to use on this machine, how much faster it is, whether the
output is the target's, how well predictions are calibrated, and the command."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isnan

from decoding.models.machine import other_machine
from evaluation.page import CHOSEN_HERE, answer, chosen, labelled
from evaluation.table import BASELINE, SPEEDUP, compare
from reports.artifacts import Artifacts, Checkpoint, Evaluation, Json
from reports.harvest_data import models
from reports.runs import Run, pooled, runs
from reports.settings import setting
from runtime.intervals import Estimate

NUMBERS = ("threshold", "gamma")  # what tuning settles, by the last part of their keys
KINDS = ("class", "token")  # of reliability: what the head itself predicts
STAGES = ("as trained", "calibrated")
ONE_RUN = (
    "methods",
    "limit",
    "repeats",
    "experiment",
    "out",
    "tried",
)  # of a command: which comparison it was


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
    """For one pair, machine and temperature.

    where: these in words; use: what to use, a sentence; why: what that rests on and how it was
    chosen; bars: every method, fastest first; datasets: of its prompts; lossless, calibration:
    lines; command: decodes with it; origin: the evaluation's folder"""

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
        """Of the axis."""
        ends = [end for bar in self.bars for end in (bar.speed.value, bar.speed.high) if end]
        return 1.05 * max([1.0, *ends])


def answers(artifacts: Artifacts) -> list[Answer]:
    """One for each pair, machine and temperature that something was decoded at; of several
    evaluations the one with the most requests."""
    largest: dict[tuple[str, ...], Evaluation] = {}
    for evaluation in artifacts.evaluations:
        where = setting(evaluation)
        parts = (where["models"], where["machine"], where["draft"], f"{evaluation.temperature}")
        if parts not in largest or _requests(evaluation) >= _requests(largest[parts]):
            largest[parts] = evaluation
    found = (_answer(evaluation, artifacts) for evaluation in largest.values())
    return [each for each in found if each is not None]


def _requests(evaluation: Evaluation) -> int:
    return sum(map(len, evaluation.traces.values()))


def _answer(evaluation: Evaluation, artifacts: Artifacts) -> Answer | None:
    """None where nothing was compared with plain decoding."""
    ranked = sorted(_compared(evaluation), key=lambda run: -run.estimate(SPEEDUP).value)
    if not ranked:
        return None
    tuning = _tuning(evaluation, artifacts)
    advised, how = (None, CHOSEN_HERE) if tuning is None else _advice(tuning)
    labels = {run.name: labelled(run.label, evaluation.settings(run.name)) for run in ranked}
    drafting = [run.name for run in ranked if _speculates(run)]
    use, why = answer(evaluation.measurements, labels, drafting, advised, how)
    name = chosen(compare(evaluation.measurements), drafting, advised)
    best = next((run for run in ranked if run.name == name), None)
    bars = [_bar(run, run is best) for run in ranked]
    where = setting(evaluation)
    on = f"{where['pair']}, T = {evaluation.temperature:g}, {where['machine']}"
    return Answer(
        where="; ".join(filter(None, [on, where["simulated"]])),
        use=use,
        why=why,
        bars=bars,
        datasets=", ".join(evaluation.datasets),
        lossless=evaluation.results["lossless"],
        calibration=list(_calibration(evaluation, artifacts.checkpoints)),
        command=_command(evaluation.results["run"]["command"], best),
        origin=str(evaluation.folder),
    )


def _compared(evaluation: Evaluation) -> list[Run]:
    """Every method but plain decoding, all datasets together."""
    return [run for run in pooled(runs([evaluation])) if run.name != BASELINE and run.baseline]


# Which to use -------------------------------------------------------------------------------------


def _tuning(evaluation: Evaluation, artifacts: Artifacts) -> Json | None:
    """What scripts/tune.py chose for this pair and these distributions, with costs of this machine;
    the last one found."""
    run, wanted = evaluation.results["run"], _temperatures(evaluation.config)
    found = [
        one
        for one in artifacts.thresholds
        if models(one["pair"]) == models(run["pair"])
        and _temperatures(one) == wanted
        and one["measured_on"]
        and not other_machine(one["measured_on"], run)
    ]
    return found[-1] if found else None


def _temperatures(config: Json) -> tuple[float, float]:
    """Of the target and of the draft."""
    target = config["warp"]
    draft = config.get("draft_warp") or target
    return float(target["temperature"]), float(draft["temperature"])


def _advice(tuning: Json) -> tuple[str, str]:
    """Return what tuning on other prompts says to use, and how it was chosen."""
    advice, folder = tuning["results"]["chosen"]["advice"], tuning["data"]["folder"]
    split = f"the {tuning['chosen_on']} split of {folder} ({tuning['file']})"
    return advice, f"Tuning on {split} with costs of this machine says: {advice}"


def _speculates(run: Run) -> bool:
    return run.evaluation.speculates(run.name)


def with_settings(run: Run) -> str:
    """The numbers its stop rule was given, e.g. "threshold 0.56"."""
    numbers = [
        (key.rpartition(".")[2], value)
        for key, value in run.method.settings.items()
        if key.startswith("stop.") and key.rpartition(".")[2] in NUMBERS
    ]
    return ", ".join(f"{name} {value:g}" for name, value in numbers if value is not None)


def _bar(run: Run, chosen: bool) -> Bar:
    settings = with_settings(run) if _speculates(run) else "plain decoding: no draft is worth it"
    return Bar(run.label, settings, run.estimate("tokens/s").value, run.estimate(SPEEDUP), chosen)


def _command(command: str, best: Run | None) -> str:
    """That of the evaluation, with this method alone."""
    kept = [part for part in shlex.split(command) if re.split(r"[.=]", part)[0] not in ONE_RUN]
    name = BASELINE if best is None else best.name
    return shlex.join([*kept, f"methods=[{name}]"])


# Calibration --------------------------------------------------------------------------------------


def _calibration(evaluation: Evaluation, checkpoints: Sequence[Checkpoint]) -> Iterator[str]:
    """A line for each checkpoint that was decoded with: its error on prompts it has not seen."""
    used = [made["sha256"] for made in evaluation.results["checkpoints"].values()]
    for checkpoint in checkpoints:
        if checkpoint.config["sha256"] in used:
            yield from _errors(checkpoint)


def _errors(checkpoint: Checkpoint) -> Iterator[str]:
    for prompts, kinds in checkpoint.config["metrics"]["reliability"].items():
        for kind in KINDS:
            if kind in kinds:
                before, after = (_percent(kinds[kind][stage]["ece"]) for stage in STAGES)
                yield (
                    f"{checkpoint.folder.name}, {prompts}: predictions are off by {after} on"
                    f" average, by {before} before calibration"
                )


def _percent(estimate: Sequence[float | None]) -> str:
    """estimate: value, low, high; the ends None or NaN where there are none."""
    value, *ends = (
        f"{100 * number:.1f}" for number in estimate if number is not None and not isnan(number)
    )
    return f"{value} % ({'-'.join(ends)})" if ends else f"{value} %"
