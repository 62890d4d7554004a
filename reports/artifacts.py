"""The artifacts that figures are made from, found in folders of any depth: evaluations with their
traces, harvests, checkpoints, tunings and costs.

Files of other programs or of another version of this one are ignored; damaged ones are refused by
name."""

import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from pydantic import field_validator

from data_gen.storage.chunks import MANIFEST, PLAN
from data_gen.storage.dataset import Harvest
from data_gen.storage.shards import SCHEMA_VERSION
from decoding.cost import read_cost
from decoding.models.machine import DECIDES_COSTS
from decoding.trace import Trace, read_traces
from evaluation.replay import thresholds
from evaluation.table import BASELINE, Summary, by_dataset, summary, timed
from predictors.base import FORMAT_VERSION, read_config, read_metrics
from runtime.errors import UserError
from runtime.json_files import CHECKSUM, OpenForm, Size, read_json, read_object
from serving.schedule import read_schedule

KEY = "run"
RESULTS, WEIGHTS, REPORT = "results.json", "model.safetensors", "report.json"
OF_EVALUATION = {"summary", "requests", "checkpoints", "run", "methods", "tried"}
OF_EVALUATION |= {"sha256", CHECKSUM}
OF_RUN = {"command", "config", "pair", "date", "versions", *DECIDES_COSTS}
OF_TUNING = {"format_version", "results", "frontier", "rules"}
OF_SCHEDULE = {"ranges", "costs", "command", "details"}
OF_COSTS = {"seconds", "regression", "pair", "measured_on", "command"}
Json = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Evaluation:
    """One run of scripts/evaluate.py.

    results: its results.json; traces: method -> every request of every repeat, in the order they
    were decoded."""

    folder: Path
    results: Json
    traces: Mapping[str, Sequence[Trace]]

    @property
    def config(self) -> Json:
        config: Json = self.results["run"]["config"]
        return config

    def settings(self, name: str) -> Json:
        """Return the settings a method was decoded with, including the values of tuned and tried
        ones."""
        decoded = self.results.get("methods", {}).get(name)
        settings: Json = decoded["settings"] if decoded else self.config["method"].get(name, {})
        return settings

    def speculates(self, name: str) -> bool:
        """Return whether a method drafts; False if tuning chose to decode without a draft."""
        return bool(self.results.get("methods", {}).get(name, {}).get("speculates", True))

    @cached_property
    def measurements(self) -> pd.DataFrame:
        """The table of measurements (`evaluation.table`)."""
        return timed(self.traces)

    @cached_property
    def summary(self) -> dict[str, Summary]:
        """Every figure of every method, on all prompts and by dataset (by its name in tables)."""
        parts = by_dataset(self.measurements)
        return {name: summary(rows) for name, rows in parts.items()}

    @property
    def temperature(self) -> float:
        return float(self.config["warp"]["temperature"])

    @property
    def datasets(self) -> list[str]:
        return sorted({trace.dataset for traces in self.traces.values() for trace in traces})


@dataclass(frozen=True)
class Checkpoint:
    """A folder of train.py; config: its config.json, with provenance, and its metrics.json under
    `metrics`."""

    folder: Path
    config: Json

    @property
    def training_data(self) -> str:
        """The identity of the harvest it was trained on."""
        data = self.config["provenance"]["data"]
        return str(data.get("identity") or data["sha256"])  # what earlier versions wrote


@dataclass(frozen=True)
class Artifacts:
    """All artifacts of a report. thresholds: files of scripts/tune.py; costs: files of
    cost=measure; schedules: of tune.py with batch, each with its `file`; left_alone: other files,
    and why they are not read."""

    evaluations: Sequence[Evaluation] = ()
    harvests: Sequence[Harvest] = ()
    checkpoints: Sequence[Checkpoint] = ()
    thresholds: Sequence[Json] = ()
    costs: Sequence[Json] = ()
    schedules: Sequence[Json] = ()
    left_alone: Mapping[Path, str] = field(default_factory=dict)
    _read: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, key: Hashable, read: Callable[[], T]) -> T:
        """Return `read()`, cached by `key` for all figures that need it."""
        if key not in self._read:
            self._read[key] = read()
        kept: T = self._read[key]
        return kept


def grouped(things: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Return the things of each key together, in the order they come."""
    groups: dict[Hashable, list[T]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return list(groups.values())


# Finding them -------------------------------------------------------------------------------------


class Warp(OpenForm):
    """The target's warp."""

    temperature: float


class Config(OpenForm):
    """The settings that every figure reads."""

    warp: Warp
    repeats: int


class Run(OpenForm):
    """The facts about a run."""

    command: str
    config: Config


class Results(OpenForm):
    """The fields of results.json that every figure reads."""

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
    """A file was not made by this version of the toolkit. The message says what it is."""


def gather(folders: Sequence[Path]) -> Artifacts:
    """Return the artifacts in `folders` and their subfolders, in the order of their names, without
    hidden folders.

    Raises UserError for a missing folder, for a damaged artifact, and if there is nothing to report
    on."""
    artifacts, left = defaultdict[str, list[Any]](list), dict[Path, str]()
    for path in _markers(folders):
        try:
            kind, artifact = _read(path)
            artifacts[kind].append(artifact)
        except Foreign as reason:
            left[path] = str(reason)
    if not artifacts:
        where = ", ".join(map(str, folders)) or "runs, data or checkpoints"
        reasons = "; ".join(f"{path}: {reason}" for path, reason in [*left.items()][:3])
        raise UserError(
            f"{KEY}: expected evaluations, harvests, checkpoints or tunings in {where}, got none"
            f"{f' ({reasons})' if reasons else ''}. Decode something: python scripts/evaluate.py"
        )
    return Artifacts(**artifacts, left_alone=left)


def _markers(folders: Sequence[Path]) -> Iterator[Path]:
    """Yield a path for each possible artifact: the marker of a folder that is one, else every JSON
    file."""
    seen = set[Path]()
    for top in folders:
        if not top.is_dir():
            raise UserError(
                f"{KEY}: expected a folder, got {top}, which is none. Write {KEY}=<folder of runs,"
                " harvests or checkpoints>"
            )
        for parent, inner, names in os.walk(top, followlinks=True):
            folder = Path(parent)
            if folder.resolve() in seen:  # links may form a cycle
                inner.clear()
                continue
            seen.add(folder.resolve())
            inner[:] = sorted(name for name in inner if not name.startswith("."))
            if REPORT in names:
                continue
            markers = [name for name in (RESULTS, MANIFEST, PLAN, WEIGHTS) if name in names]
            files = [name for name in sorted(names) if name.endswith(".json") and name[0] != "."]
            yield from (folder / name for name in markers[:1] or files)


def _read(path: Path) -> tuple[str, Any]:
    """Return the kind, a field of `Artifacts`, and the artifact. Raises Foreign if it is of another
    program or version, UserError if it is damaged."""
    folder = path.parent
    if path.name == RESULTS:
        return "evaluations", _read_evaluation(folder)
    if path.name == MANIFEST:
        again = "Run the command that harvested it again, or move it away"
        if read_object(path, KEY, again).get("schema_version") != SCHEMA_VERSION:
            raise Foreign("not a dataset of this version of scripts/gen_data.py")
        return "harvests", Harvest.open(folder, KEY)
    if path.name == PLAN:
        raise Foreign(f"a harvest that is not finished: run its command again, out={folder}")
    if path.name == WEIGHTS:
        file, again = folder / "config.json", "Train it again: python train.py, or move it away"
        config = read_object(file, KEY, again) if file.is_file() else {}
        if "predictor" not in config or config.get("format_version") != FORMAT_VERSION:
            raise Foreign("a model, but no predictor of this version of train.py")
        config = {**read_config(folder, KEY), "metrics": read_metrics(folder, KEY)}
        return "checkpoints", Checkpoint(folder, config)
    return _read_file(path)


def _read_evaluation(folder: Path) -> Evaluation:
    path, remedy = folder / RESULTS, "Run scripts/evaluate.py again, or move it away"
    results = read_object(path, KEY, remedy)
    if not (results.keys() >= OF_EVALUATION and OF_RUN <= set(results["run"] or ())):
        raise Foreign("not written by this version of scripts/evaluate.py")
    results = read_json(path, Results, KEY, remedy).written
    requests, command = results["requests"], results["run"]["command"]
    traces: dict[str, list[Trace]] = {}  # by method, whatever the file is called
    for file in sorted(folder.glob("traces-*.jsonl")):
        try:
            for trace in read_traces(file):
                traces.setdefault(trace.method, []).append(trace)
        except UserError as error:
            raise UserError(f"{KEY}: {error}") from error
    if lacking := [name for name, count in requests.items() if len(traces.get(name, ())) != count]:
        raise UserError(
            f"{KEY}: {folder} has not all traces of {', '.join(lacking)}. Run again: {command}"
        )
    return Evaluation(folder, results, {method: traces[method] for method in requests})


def _read_file(path: Path) -> tuple[str, Json]:
    """Return a file of scripts/tune.py: thresholds, costs or a schedule."""
    try:
        content = read_object(path, KEY, "")
    except UserError:
        raise Foreign("no JSON object") from None
    keys, file = content.keys(), {"file": str(path)}
    try:
        if keys >= OF_TUNING and content["format_version"] == thresholds.FORMAT_VERSION:
            return "thresholds", thresholds.read(path) | file
        if keys >= OF_COSTS:
            read_cost(path)
            return "costs", content | file
        if keys >= OF_SCHEDULE and "scheduler" in (content["details"] or ()):
            read_schedule(path)
            return "schedules", content | file
    except UserError as error:
        raise UserError(f"{KEY}: {str(error).partition(': ')[2]}") from error
    raise Foreign("nothing a report reads")
