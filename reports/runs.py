"""Evaluations as figures read them: runs of one method on one dataset at one temperature, their
settings, and the evaluations that one table may hold."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pandas as pd

from decoding.models.machine import in_words
from decoding.trace import Trace
from evaluation.page import simulated
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
from reports.artifacts import Artifacts, Evaluation, Json, grouped
from reports.figure import Builder, Figure, Missing, Record, estimated
from reports.harvest_data import models
from runtime.intervals import Estimate
from runtime.text import plural

PARTS = ("engine", "structure", "verifier", "stop")
CALLS, LENGTH, ROLLBACK = "tokens/target call", "accepted length M", "rollback RB"
BEST_FIXED = "fixed"  # its length is the best that was tried, and may differ between evaluations
SIMULATED = "simulated draft, measured times say nothing of speed"


@dataclass(frozen=True)
class Method:
    """A method by the class names of its parts, "" if it has none; settings: those of the parts by
    dotted key, e.g. `stop.threshold`."""

    engine: str
    structure: str
    verifier: str
    stop: str
    settings: Mapping[str, Any]

    def without(self, key: str) -> str:
        """Return the method without one setting, to test whether methods differ only in that."""
        settings = sorted((name, value) for name, value in self.settings.items() if name != key)
        return json.dumps([[getattr(self, part) for part in PARTS], settings], default=str)

    @property
    def branches(self) -> bool:
        """Return whether its engine is SpecBranch's."""
        return self.engine == "OverlappedEngine" and not self.settings.get("engine.pre_verify")

    @property
    def pearl(self) -> bool:
        return self.engine == "OverlappedEngine" and not self.branches

    @property
    def chain(self) -> bool:
        """Return whether a serial engine drafts a chain and verifies it token by token."""
        parts = (self.engine, self.structure, self.verifier)
        return parts == ("SerialEngine", "Chain", "TokenVerifier")


Wanted = Callable[[Method], bool]


def method(evaluation: Evaluation, name: str) -> Method:
    """Return a method as it was decoded. name: as in its metrics."""
    parts = {part: evaluation.settings(name).get(part, {}) for part in PARTS}
    classes = {part: parts[part].get("_target_", "").rpartition(".")[2] for part in PARTS}
    # The engine's arguments repeat the method's other parts.
    parts["engine"] = {
        key: value for key, value in parts["engine"].items() if key not in (*PARTS, "warp")
    }
    return Method(**classes, settings=dict(_settings(parts)))


def _settings(config: Json, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values; for nested parts their class name, too."""
    for key, value in config.items():
        if isinstance(value, dict):
            if prefix and (target := value.get("_target_", "").rpartition(".")[2]):
                yield f"{prefix}{key}", target
            yield from _settings(value, f"{prefix}{key}.")
        elif not key.startswith("_"):
            yield f"{prefix}{key}", value


@dataclass(frozen=True)
class Run:
    """One method of one evaluation on one of its datasets. dataset: its name in tables
    (`shown_as`), or `ALL`; traces: of every repeat; baseline: plain decoding's; rows, plain: of
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

    @property
    def label(self) -> str:
        return self.name.replace("_", " ")

    @property
    def labels(self) -> Record:
        """The first columns of its row in a figure."""
        return {"T": self.temperature, "dataset": self.dataset, "method": self.label}

    def estimate(self, name: str) -> Estimate:
        """Return a figure of the table of measurements: a key of `RATIOS`, or `SPEEDUP`."""
        if name == SPEEDUP:
            return self._speed(self.rows, self.plain, "seconds")
        return ratio(self.rows, *RATIOS[name])

    def columns(self, *names: str) -> Record:
        """Return the cells of several figures, each with its interval."""
        return {
            column: cell
            for name in names
            for column, cell in estimated(name, self.estimate(name)).items()
        }

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


def runs(evaluations: Sequence[Evaluation], wanted: Wanted = lambda method: True) -> list[Run]:
    """Return the runs of the methods wanted, by temperature, in the order of the evaluations. If
    two evaluations have the same method, dataset and temperature, the larger one is used."""
    selected: dict[tuple[float, str, str], Run] = {}
    for evaluation in evaluations:
        for dataset in evaluation.datasets:
            rows = evaluation.measurements
            rows = rows[rows["dataset"] == dataset]
            for name, every in evaluation.traces.items():
                how = method(evaluation, name)
                if not wanted(how):
                    continue
                traces, plain = (
                    [trace for trace in decoded if trace.dataset == dataset]
                    for decoded in (every, evaluation.traces.get(BASELINE, ()))
                )
                run = Run(
                    *(name, how, shown_as(dataset), evaluation.temperature),
                    *(traces, plain, evaluation),
                    *(rows[rows["policy"] == policy] for policy in (name, BASELINE)),
                )
                key = (run.temperature, run.dataset, name)
                if key not in selected or len(traces) > len(selected[key].traces):
                    selected[key] = run
    return sorted(selected.values(), key=lambda run: run.temperature)


def pooled(selected: Sequence[Run]) -> list[Run]:
    """Return the datasets of a method at a temperature together."""
    return [
        replace(
            group[0],
            dataset=ALL if len(group) > 1 else group[0].dataset,
            traces=[trace for run in group for trace in run.traces],
            baseline=[trace for run in group for trace in run.baseline],
            rows=pd.concat([run.rows for run in group]),
            plain=pd.concat([run.plain for run in group]),
        )
        for group in grouped(selected, lambda run: (run.temperature, run.name))
    ]


def with_all(selected: Sequence[Run]) -> list[Run]:
    """Return the runs, and those of all datasets together if there are several."""
    return [*selected, *(run for run in pooled(selected) if run.dataset == ALL)]


def with_method(
    evaluations: Sequence[Evaluation], wanted: Wanted, missing: str
) -> list[Evaluation]:
    """Return the evaluations with a wanted method. Raises Missing(missing) if there are none."""
    selected = [
        evaluation
        for evaluation in evaluations
        if any(wanted(method(evaluation, name)) for name in evaluation.traces)
    ]
    if not selected:
        raise Missing(missing)
    return selected


def sweeps(evaluations: Sequence[Evaluation], wanted: Wanted, key: str) -> list[Run]:
    """Return the runs of methods that differ from another one of their evaluation in the setting
    `key` alone."""
    selected = []
    for evaluation in evaluations:
        candidates = [run for run in runs([evaluation], wanted) if key in run.method.settings]
        values: dict[str, set[Any]] = {}
        for run in candidates:
            values.setdefault(run.method.without(key), set()).add(run.method.settings[key])
        selected += [run for run in candidates if len(values[run.method.without(key)]) > 1]
    return selected


def ratios_of(selected: Sequence[Run]) -> list[float]:
    """Return the speed ratios that evaluations were asked to price, or else the papers' (counts can
    be priced at any)."""
    asked = {
        c for run in selected for c in run.evaluation.config.get("modelled", []) if c not in TABLES
    }
    return sorted(asked) or [4, 5, 10, 15]


def extent(selected: Sequence[Run]) -> str:
    """Return the size of a figure's data in words."""
    rows = pd.concat([run.rows for run in selected])
    prompts = plural(rows.groupby(["dataset", "prompt"]).ngroups, "prompt")
    return f"{prompts}, {plural(int(rows['rounds'].sum()), 'round')}"


# Evaluations that one table may hold --------------------------------------------------------------


def each_setting(
    build: Callable[[Sequence[Evaluation]], Figure],
) -> Callable[[Artifacts], list[Builder]]:
    """Return `Entry.builders` of a figure of evaluations that share a `setting`."""

    def figure(told: str, evaluations: Sequence[Evaluation]) -> Figure:
        made = build(evaluations)
        return replace(made, title=f"{made.title} ({told})") if told else made

    def builders(artifacts: Artifacts) -> list[Builder]:
        return [partial(figure, *group) for group in by_setting(artifacts.evaluations)]

    return builders


def setting(evaluation: Evaluation) -> dict[str, str]:
    """Return in words the facts that two evaluations must share to be in one table: the pair, the
    machine, and the draft's distribution relative to the target's."""
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


def by_setting(evaluations: Sequence[Evaluation]) -> list[tuple[str, list[Evaluation]]]:
    """Return the evaluations of each setting, with words that distinguish it from the others or say
    that its draft is simulated; one empty group if there are none."""
    described = [(setting(evaluation), evaluation) for evaluation in evaluations]
    differ = [
        key
        for key in ("pair", "machine", "draft")
        if len({words[key] for words, _ in described}) > 1
    ]
    groups = grouped(
        described, lambda one: tuple(one[0][key] for key in ("models", "machine", "draft"))
    )
    return [
        (
            "; ".join(group[0][0][key] for key in (*differ, "simulated") if group[0][0][key]),
            [evaluation for _, evaluation in group],
        )
        for group in groups
    ] or [("", [])]
