"""What figures are made from, as found on disk: evaluations with their traces, harvests,
checkpoints, tunings."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from data_gen.storage.dataset import Harvest
from decoding.trace import Trace
from evaluation.table import Summary, by_dataset, summary, timed

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
        """Of a method as it was decoded: settings that were tuned or tried have their values."""
        decoded = self.results.get("methods", {}).get(name)
        found: Json = decoded["settings"] if decoded else self.config["method"].get(name, {})
        return found

    def speculates(self, name: str) -> bool:
        """False where tuning found no draft worth it, so that the method was decoded without
        one."""
        return bool(self.results.get("methods", {}).get(name, {}).get("speculates", True))

    @cached_property
    def measurements(self) -> pd.DataFrame:
        """The table of what was decoded (`evaluation.table`)."""
        return timed(self.traces)

    @cached_property
    def summary(self) -> dict[str, Summary]:
        """Every figure of every method, on all prompts and by dataset, as it is shown."""
        parts = by_dataset(self.measurements)
        return {name: summary(rows) for name, rows in parts.items()}

    @property
    def temperature(self) -> float:
        return float(self.config["warp"]["temperature"])

    @property
    def datasets(self) -> list[str]:
        return sorted({trace.dataset for found in self.traces.values() for trace in found})


@dataclass(frozen=True)
class Checkpoint:
    """A folder of train.py; config: its config.json, with provenance, and its metrics.json under
    `metrics`."""

    folder: Path
    config: Json


@dataclass(frozen=True)
class Artifacts:
    """All that is reported on. thresholds: files of scripts/tune.py; costs: what cost=measure
    wrote; schedules: of tune.py with batch, each with its `file`; left_alone: what was found
    besides, and why it is not read."""

    evaluations: Sequence[Evaluation] = ()
    harvests: Sequence[Harvest] = ()
    checkpoints: Sequence[Checkpoint] = ()
    thresholds: Sequence[Json] = ()
    costs: Sequence[Json] = ()
    schedules: Sequence[Json] = ()
    left_alone: Mapping[Path, str] = field(default_factory=dict)
    _read: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, key: Hashable, read: Callable[[], T]) -> T:
        """`read()`, kept for all figures that need the same of these artifacts."""
        if key not in self._read:
            self._read[key] = read()
        found: T = self._read[key]
        return found
