"""Evaluations as figures read them: one method on one dataset at one temperature, and what its
config says of it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from decoding.trace import Trace
from evaluation.table import (
    ALL,
    BASELINE,
    MODELLED,
    RATIOS,
    SPEEDUP,
    over,
    prompts,
    ratio,
    shown_as,
)
from evaluation.timeline import TABLES, Devices, modelled_seconds
from reports.artifacts import Evaluation, Json
from reports.figure import Missing
from runtime.intervals import Estimate

PARTS = ("engine", "structure", "verifier", "stop")
CALLS, LENGTH, ROLLBACK = "tokens/target call", "accepted length M", "rollback RB"
BEST_FIXED = "fixed"  # its length is the best that was tried, which evaluations need not share


@dataclass(frozen=True)
class Method:
    """Class names of its parts, "" where it has none; settings: theirs by dotted key, e.g.
    `stop.threshold`."""

    engine: str
    structure: str
    verifier: str
    stop: str
    settings: Mapping[str, Any]

    def without(self, key: str) -> str:
        """All of it but one setting, to tell whether methods differ in that one alone."""
        parts = [getattr(self, part) for part in PARTS]
        return json.dumps(
            [parts, {name: v for name, v in sorted(self.settings.items()) if name != key}],
            default=str,
        )


@dataclass(frozen=True)
class Run:
    """One method of one evaluation on one of its datasets. dataset: as it is shown (`shown_as`), or
    `ALL` of them together; traces: of every repeat; baseline: plain decoding's; rows, plain: of
    both, in the table of measurements."""

    name: str
    method: Method
    dataset: str
    temperature: float
    traces: Sequence[Trace]
    baseline: Sequence[Trace]
    evaluation: Evaluation
    rows: pd.DataFrame = field(repr=False, compare=False)
    plain: pd.DataFrame = field(repr=False, compare=False)

    def estimate(self, name: str) -> Estimate:
        """Return a figure of the table of measurements: a key of `RATIOS`, or `SPEEDUP`."""
        if name == SPEEDUP:
            return self._speed(self.rows, self.plain, "seconds")
        return ratio(self.rows, *RATIOS[name])

    def modelled_speedup(self, c: float) -> Estimate:
        """Return the speed over plain decoding, a target forward priced at c draft forwards."""
        devices = Devices.of_ratio(c)
        ours, plain = (
            rows.assign(**{MODELLED: [modelled_seconds(trace, devices) for trace in traces]})
            for rows, traces in ((self.rows, self.traces), (self.plain, self.baseline))
        )
        return self._speed(ours, plain, MODELLED)

    def _speed(self, ours: pd.DataFrame, plain: pd.DataFrame, seconds: str) -> Estimate:
        if self.name == BASELINE:
            return Estimate(1.0)
        mine, other = (prompts(rows, "emitted", seconds) for rows in (ours, plain))
        return over(mine, other, "emitted", seconds)

    @property
    def label(self) -> str:
        return self.name.replace("_", " ")

    @property
    def prompts(self) -> set[tuple[str, str]]:
        return {(trace.dataset, trace.prompt_id) for trace in self.traces}


def branches(how: Method) -> bool:
    """SpecBranch's engine."""
    return how.engine == "OverlappedEngine" and not how.settings.get("engine.pre_verify")


def pearl(how: Method) -> bool:
    return how.engine == "OverlappedEngine" and not branches(how)


def method(evaluation: Evaluation, name: str) -> Method:
    """name: as in its metrics."""
    config = evaluation.settings(name)
    parts = {part: config.get(part, {}).get("_target_", "").rpartition(".")[2] for part in PARTS}
    settings = {
        key: value for part in PARTS for key, value in _settings(config.get(part, {}), part)
    }
    for key in [
        key
        for key in settings
        if key.split(".")[:2] in (["engine", part] for part in (*PARTS, "warp"))
    ]:
        del settings[key]  # what the engine was given: the method's own parts once more
    return Method(**parts, settings=settings)


def runs(
    evaluations: Sequence[Evaluation], wanted: Callable[[Method], bool] = lambda method: True
) -> list[Run]:
    """Of the methods wanted, by temperature, in the order of the evaluations. Where two evaluations
    have the same method, dataset and temperature, the larger one."""
    found: dict[tuple[float, str, str], Run] = {}
    for evaluation in evaluations:
        for dataset in evaluation.datasets:
            rows = evaluation.measurements
            rows = rows[rows["dataset"] == dataset]
            for name, traces in evaluation.traces.items():
                how = method(evaluation, name)
                if not wanted(how):
                    continue
                ours, plain = (
                    [trace for trace in every if trace.dataset == dataset]
                    for every in (traces, evaluation.traces.get(BASELINE, ()))
                )
                called = shown_as(dataset)
                run = Run(
                    *(name, how, called, evaluation.temperature, ours, plain, evaluation),
                    *(rows[rows["policy"] == policy] for policy in (name, BASELINE)),
                )
                key = (run.temperature, called, name)
                if key not in found or len(run.traces) > len(found[key].traces):
                    found[key] = run
    return sorted(found.values(), key=lambda run: run.temperature)


def pooled(found: Sequence[Run]) -> list[Run]:
    """Datasets of a method at a temperature together."""
    groups: dict[tuple[float, str], list[Run]] = {}
    for run in found:
        groups.setdefault((run.temperature, run.name), []).append(run)
    return [
        replace(
            group[0],
            dataset=ALL if len(group) > 1 else group[0].dataset,
            traces=[trace for run in group for trace in run.traces],
            baseline=[trace for run in group for trace in run.baseline],
            rows=pd.concat([run.rows for run in group]),
            plain=pd.concat([run.plain for run in group]),
        )
        for group in groups.values()
    ]


def with_all(found: Sequence[Run]) -> list[Run]:
    """And all datasets together, where there are several."""
    return [*found, *(run for run in pooled(found) if run.dataset == ALL)]


def with_method(
    evaluations: Sequence[Evaluation], wanted: Callable[[Method], bool], missing: str
) -> list[Evaluation]:
    """Those with a method that is wanted. Raises Missing where there is none. missing: what it
    says."""
    found = [
        evaluation
        for evaluation in evaluations
        if any(wanted(method(evaluation, name)) for name in evaluation.traces)
    ]
    if not found:
        raise Missing(missing)
    return found


def sweeps(
    evaluations: Sequence[Evaluation], wanted: Callable[[Method], bool], key: str
) -> list[Run]:
    """Runs of methods that differ from another one of their evaluation in the setting `key`
    alone."""
    found = []
    for evaluation in evaluations:
        candidates = [run for run in runs([evaluation], wanted) if key in run.method.settings]
        kinds = [run.method.without(key) for run in candidates]
        values = {
            (kind, run.method.settings[key]) for kind, run in zip(kinds, candidates, strict=True)
        }
        found += [
            run
            for kind, run in zip(kinds, candidates, strict=True)
            if sum(other == kind for other, _ in values) > 1
        ]
    return found


def ratios_of(found: Sequence[Run]) -> list[float]:
    """Return the speed ratios that evaluations were asked to price, else the papers'; counts can be
    priced at any."""
    asked = {
        c for run in found for c in run.evaluation.config.get("modelled", []) if c not in TABLES
    }
    return sorted(asked) or [4, 5, 10, 15]


def extent(found: Sequence[Run]) -> str:
    """How much a figure rests on."""
    prompts = {prompt for run in found for prompt in run.prompts}
    rounds = sum(len(trace.rounds) for run in found for trace in run.traces)
    return f"{len(prompts)} prompts, {rounds} rounds"


def _settings(config: Json, prefix: str) -> list[tuple[str, Any]]:
    """Dotted keys and values, without the classes' names."""
    found: list[tuple[str, Any]] = []
    for key, value in config.items():
        if isinstance(value, dict):
            target = value.get("_target_", "").rpartition(".")[2]
            found += [(f"{prefix}.{key}", target)] if target else []
            found += _settings(value, f"{prefix}.{key}")
        elif not key.startswith("_"):
            found.append((f"{prefix}.{key}", value))
    return found
