"""Finding what a report is made from: evaluations, harvests, checkpoints, tunings and costs, in
folders of any depth.

What is of another program or of another version of this one is left alone; what is damaged is
refused by name."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import field_validator

from data_gen.storage.chunks import MANIFEST, PLAN
from data_gen.storage.dataset import Harvest
from data_gen.storage.shards import SCHEMA_VERSION
from decoding.cost import read_cost
from decoding.models.machine import DECIDES_COSTS
from decoding.trace import Trace, read_traces
from evaluation.replay import thresholds
from evaluation.table import BASELINE
from predictors.base import FORMAT_VERSION, read_config, read_metrics
from reports.artifacts import Artifacts, Checkpoint, Evaluation, Json
from runtime.errors import UserError
from runtime.json_files import CHECKSUM, OpenForm, Size, read_json, read_object
from serving.schedule import read_schedule

KEY = "run"
RESULTS, WEIGHTS, REPORT = "results.json", "model.safetensors", "report.json"
OF_EVALUATION = {*("summary", "requests", "sha256", "checkpoints", "run", "methods", "tried")}
OF_RUN = {"command", "config", "pair", "date", "versions", *DECIDES_COSTS}
OF_TUNING = {"format_version", "results", "frontier", "rules"}
OF_SCHEDULE = {"ranges", "costs", "command", "details"}
OF_COSTS = {"seconds", "regression", "pair", "measured_on", "command"}


class Warp(OpenForm):
    """Of the target."""

    temperature: float


class Config(OpenForm):
    """What of the settings every figure asks."""

    warp: Warp
    repeats: int


class Run(OpenForm):
    """How it came about."""

    command: str
    config: Config


class Results(OpenForm):
    """What of results.json every figure asks."""

    requests: dict[str, Size]
    run: Run
    checksum: str

    @field_validator("requests")
    @classmethod
    def _beside_the_baseline(cls, requests: dict[str, int]) -> dict[str, int]:
        if BASELINE not in requests:
            raise ValueError(f"no {BASELINE}")
        return requests


class Foreign(Exception):
    """Not made by this version of this toolkit. The message says what it is instead."""


def gather(folders: Sequence[Path]) -> Artifacts:
    """Everything in `folders` and the folders in them, in the order of their names; hidden folders
    are passed over.

    Raises UserError for a folder that is not there, for what is damaged, and where there is nothing
    to report on."""
    found: dict[str, list[Any]] = {kind: [] for kind in ("evaluations", "harvests", "checkpoints")}
    found |= {kind: [] for kind in ("thresholds", "costs", "schedules")}
    left: dict[Path, str] = {}
    for path in _markers(folders):
        try:
            kind, thing = _read(path)
            found[kind].append(thing)
        except Foreign as reason:
            left[path] = str(reason)
    if not any(found.values()):
        where = ", ".join(map(str, folders)) or "runs, data or checkpoints"
        raise UserError(
            f"{KEY}: expected evaluations, harvests, checkpoints or tunings in {where}, got none."
            " Decode something: python scripts/evaluate.py"
        )
    return Artifacts(**found, left_alone=left)


def _markers(folders: Sequence[Path]) -> Iterator[Path]:
    """One path for each thing there may be: of a folder that is one thing its marker, else every
    JSON file."""
    seen = set[Path]()
    for top in folders:
        if not top.is_dir():
            raise UserError(
                f"{KEY}: expected a folder, got {top}, which is none. Write {KEY}=<folder of runs,"
                " harvests or checkpoints>"
            )
        for parent, inner, names in os.walk(top, followlinks=True):
            folder = Path(parent)
            if folder.resolve() in seen:  # links may lead in a circle
                inner.clear()
                continue
            seen.add(folder.resolve())
            inner[:] = sorted(name for name in inner if not name.startswith("."))
            yield from (
                [] if REPORT in names else (folder / name for name in _of_folder(sorted(names)))
            )


def _of_folder(names: Sequence[str]) -> list[str]:
    marker = next(
        (marker for marker in (RESULTS, MANIFEST, PLAN, WEIGHTS) if marker in names), None
    )
    return (
        [marker]
        if marker
        else [name for name in names if name.endswith(".json") and not name.startswith(".")]
    )


def _read(path: Path) -> tuple[str, Any]:
    """Its kind, a field of `Artifacts`, and what is there."""
    readers: dict[str, tuple[str, Callable[[Path], Any]]] = {
        RESULTS: ("evaluations", read_evaluation),
        MANIFEST: ("harvests", read_harvest),
        PLAN: ("harvests", _unfinished),
        WEIGHTS: ("checkpoints", read_checkpoint),
    }
    if path.name in readers:
        kind, reader = readers[path.name]
        return kind, reader(path.parent)
    return _read_file(path)


def read_evaluation(folder: Path) -> Evaluation:
    """Raises Foreign where results.json is of another program or version, UserError where it or a
    trace is damaged."""
    path, remedy = folder / RESULTS, "Run scripts/evaluate.py again, or move it away"
    results = read_object(path, KEY, remedy)
    if not (results.keys() >= {*OF_EVALUATION, CHECKSUM} and OF_RUN <= set(results["run"] or ())):
        raise Foreign("not written by this version of scripts/evaluate.py")
    results = read_json(path, Results, KEY, remedy).written
    requests, command = results["requests"], results["run"]["command"]
    traces = _traces(folder)
    if lacking := [name for name, count in requests.items() if len(traces.get(name, ())) != count]:
        raise UserError(
            f"{KEY}: {folder} has not all traces of {', '.join(lacking)}. Run again: {command}"
        )
    return Evaluation(folder, results, {method: traces[method] for method in requests})


def _traces(folder: Path) -> dict[str, list[Trace]]:
    """By method, whatever the file is called."""
    found: dict[str, list[Trace]] = {}
    for path in sorted(folder.glob("traces-*.jsonl")):
        try:
            for trace in read_traces(path):
                found.setdefault(trace.method, []).append(trace)
        except UserError as error:
            raise UserError(f"{KEY}: {error}") from error
    return found


def read_harvest(folder: Path) -> Harvest:
    """Raises Foreign where manifest.json is of another program or version, UserError where it is
    damaged."""
    found = read_object(
        folder / MANIFEST, KEY, "Run the command that harvested it again, or move it away"
    )
    if found.get("schema_version") != SCHEMA_VERSION:
        raise Foreign("not a dataset of this version of scripts/gen_data.py")
    return Harvest.open(folder, KEY)


def _unfinished(folder: Path) -> Harvest:
    raise Foreign(f"a harvest that is not finished: run its command again, out={folder}")


def read_checkpoint(folder: Path) -> Checkpoint:
    """Raises Foreign where the folder holds another kind of model, UserError where it is
    damaged."""
    path = folder / "config.json"
    found = (
        read_object(path, KEY, "Train it again: python train.py, or move it away")
        if path.is_file()
        else {}
    )
    if "predictor" not in found or found.get("format_version") != FORMAT_VERSION:
        raise Foreign("a model, but no predictor of this version of train.py")
    return Checkpoint(folder, {**read_config(folder, KEY), "metrics": read_metrics(folder, KEY)})


def _read_file(path: Path) -> tuple[str, Json]:
    """A file of scripts/tune.py: thresholds, costs or a schedule."""
    try:
        found = read_object(path, KEY, "")
    except UserError:
        raise Foreign("no JSON object") from None
    try:
        if found.keys() >= OF_TUNING and found["format_version"] == thresholds.FORMAT_VERSION:
            return "thresholds", {**thresholds.read(path), "file": str(path)}
        if found.keys() >= OF_COSTS:
            read_cost(path)
            return "costs", {**found, "file": str(path)}
        if found.keys() >= OF_SCHEDULE and "scheduler" in (found["details"] or ()):
            read_schedule(path)
            return "schedules", {**found, "file": str(path)}
    except UserError as error:
        raise UserError(f"{KEY}: {str(error).partition(': ')[2]}") from error
    raise Foreign("nothing a report reads")
