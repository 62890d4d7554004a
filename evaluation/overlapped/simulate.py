"""Count and price decoding methods from harvests, engines side by side included: no model runs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from data_gen.samples import refuse_other_distributions
from data_gen.storage.dataset import Harvest
from decoding.models.draft_model import beside
from decoding.models.eagle.checkpoint import find_checkpoint
from decoding.models.eagle.maps import FILE
from decoding.settings import Pair
from decoding.stopping.base import TunableRule, setting_of
from decoding.stopping.rollout_table import RolloutTable
from evaluation.overlapped.walk import BranchRecords, is_serial, refuse_short, settings_of, traces
from evaluation.page import simulated as simulated_draft
from evaluation.replay.candidates import refuse_foreign_checkpoint, refuse_other_warps
from evaluation.replay.read import read_table
from evaluation.replay.simulate import WALKS, Replayer
from evaluation.table import MODELLED, counted, over, prompts, ratio, ratio_of, save, timed
from evaluation.timeline import Devices, modelled_seconds
from predictors.base import read_config
from runtime.errors import UserError
from runtime.files import checked_folder, refuse_foreign_file, write_json
from runtime.intervals import METHOD, Estimate
from runtime.job import command_line
from runtime.text import printable

COLUMNS = ("emitted", "rounds", "steps", "lost", "run_tokens", "runs")
HEAD = ("tokens/call", "M", "RB", "speed-up, modelled")


def simulate(cfg: DictConfig) -> None:
    """Harvests in, a table per speed ratio out."""
    out, harvest = checked_folder("out", cfg.out, "file"), Harvest.open(cfg.data)
    refuse_foreign_file(out, "tune")
    elsewhere = [Harvest.open(folder, "judge_data") for folder in cfg.judge_data]
    check(cfg, harvest, elsewhere)
    methods = [simulated(cfg, name) for name in cfg.methods]
    if any(not method.serial for method in methods):
        refuse_reading_draft(cfg)
    chosen_on, *judged_on = (tables(cfg, each, methods) for each in [harvest, *elsewhere])
    measurements = swept(cfg, methods, chosen_on, judged_on)
    found = {f"{c:g}": cell(cfg, methods, measurements, c) for c in cfg.ratios}
    save(measurements, out.with_suffix(".parquet"))
    command = command_line()
    write_json(out, {"command": command, **about(cfg, harvest), "cells": found})
    pages = [page(cfg, c, rows, methods) for c, rows in found.items()]
    heading = f"# {printable(harvest.pair.name)}"
    print("\n\n".join([heading, *pages, *simulated_draft(cfg.pair), f"saved {out}"]))


@dataclass(frozen=True)
class Simulated:
    """A method of the config: how it stops, the arguments of its engine, and its draft length."""

    name: str
    stop: Any
    serial: bool
    parts: Mapping[str, Any]
    gamma: int

    @property
    def branch_steps(self) -> int | None:
        """Most draft steps of a branch, its candidate included; None where there are none."""
        return None if self.serial else 1 + settings_of(self.parts).continuation

    @property
    def value(self) -> float | None:
        """Of the setting that is swept; None where it has none."""
        return setting_of(self.stop) if isinstance(self.stop, TunableRule) else None

    def grid(self, points: int, gamma: int) -> Sequence[float | None]:
        return list(self.stop.grid(points, gamma)) if self.value is not None else [None]

    def measured(
        self, table: RolloutTable, value: float | None, cfg: DictConfig, dataset: str
    ) -> pd.DataFrame:
        """Return its rows on every prompt of a table, with this value of its setting, priced at
        every speed ratio in draft forwards."""
        kind = "expected" if cfg.warp.temperature else "counted"
        if self.serial:
            replayed = Replayer(table, self.gamma).replay(self.stop.policy(table), value or 0.0)
            rows = counted(kind, self.name, replayed, table.prompt_ids, value, dataset)
            forwards, calls = rows["draft_forwards"], rows["rounds"]
            return rows.assign(**{at(c): forwards + c * calls for c in cfg.ratios})
        settings = settings_of(self.parts)
        if value is not None:
            settings = replace(settings, threshold=value)
        walks = WALKS if cfg.warp.temperature else 1  # a greedy target draws no coins
        walked = traces(table, settings, range(walks))
        rows = timed({self.name: walked}).assign(kind=kind, dataset=dataset, setting=value)
        devices = {at(c): Devices.of_ratio(c) for c in cfg.ratios}
        priced = {
            name: [modelled_seconds(trace, each) for trace in walked]
            for name, each in devices.items()
        }
        return rows.assign(**priced)


def check(cfg: DictConfig, harvest: Harvest, elsewhere: Sequence[Harvest]) -> None:
    """Refuse what cannot work, before anything is computed."""
    refuse_other_warps(cfg, harvest)
    if (name := harvest.pair.name) != cfg.pair.name:
        raise UserError(
            f"pair: expected {name}, whose harvest {cfg.data} is, got {cfg.pair.name}. Give that"
            " pair, or another data="
        )
    for other in elsewhere:
        refuse_other_distributions(other, harvest, "judge_data", str(cfg.data))
    for name in cfg.methods:
        if OmegaConf.select(cfg.method[name], "stop.checkpoint"):
            refuse_other_gamma(cfg, name)
            refuse_foreign_checkpoint(
                Path(cfg.checkpoint), harvest, "checkpoint", gamma_of(cfg, name)
            )


def gamma_of(cfg: DictConfig, name: str) -> int:
    gamma: int = cfg.gammas.get(name, cfg.gamma)
    return gamma


def refuse_other_gamma(cfg: DictConfig, name: str) -> None:
    """Of a method whose branches ask a predictor that was trained for another draft length."""
    trained = read_config(Path(cfg.checkpoint), "checkpoint").get("gamma")
    branches = "gamma_max" in (cfg.method[name].get("structure") or {})
    if branches and trained != gamma_of(cfg, name):
        raise UserError(
            f"gammas.{name}: expected {trained}, the tokens that {cfg.checkpoint} was trained for,"
            f" got {gamma_of(cfg, name)}. Give that, or another checkpoint"
        )


def refuse_reading_draft(cfg: DictConfig) -> None:
    """Of a harvest that no engine with both models side by side could have made."""
    folder = Path(cfg.pair.draft).expanduser()
    here = (folder / "config.json").is_file()
    if beside(folder, FILE) or (here and find_checkpoint(Pair.of(cfg.pair).model("draft"))):
        raise UserError(
            "pair.draft: expected a draft that does not read its target's hidden states, since"
            f" here the two run side by side, got {cfg.pair.draft}. Harvest with another, such as"
            " pair=smollm2"
        )


def simulated(cfg: DictConfig, name: str) -> Simulated:
    key = f"method.{name}"
    made = instantiate(configured(cfg, name).engine)
    parts = getattr(made, "keywords", {})
    serial = is_serial(getattr(made, "func", made), parts, key)
    found = Simulated(name, parts["stop"], serial, parts, gamma_of(cfg, name))
    if serial and not isinstance(found.stop, TunableRule):
        raise UserError(
            f"{key}.stop: expected a rule that can be replayed, got {type(found.stop).__name__}."
            " Give one that has a `policy`"
        )
    if not serial:
        settings_of(parts)
    return found


def configured(cfg: DictConfig, name: str) -> DictConfig:
    """The settings of a method, with the draft length, `candidates` and `checkpoint` of this run in
    their places."""
    found: Any = OmegaConf.to_container(cfg.method[name], resolve=True)
    given = {
        "structure": {"gamma_max": gamma_of(cfg, name), "candidates": cfg.candidates.get(name)},
        "stop": {"gamma": gamma_of(cfg, name), "checkpoint": cfg.checkpoint},
    }
    for part in (found, found["engine"]):  # the engine's own are copies
        for group, settings in given.items():
            for key in settings.keys() & (part.get(group) or {}).keys():
                part[group][key] = settings[key] or part[group][key]
    settings_of_method: DictConfig = DictConfig({"method": {name: found}}).method[name]
    return settings_of_method


def tables(cfg: DictConfig, harvest: Harvest, methods: Sequence[Simulated]) -> RolloutTable:
    asked = [method.stop for method in methods if isinstance(method.stop, TunableRule)]
    table = read_table(harvest, "all", [BranchRecords(), *asked], Pair.of(cfg.pair))
    refuse_short(table, max(method.gamma for method in methods))
    return table


def about(cfg: DictConfig, harvest: Harvest) -> dict[str, Any]:
    settings: Any = OmegaConf.to_container(cfg, resolve=True)
    names = ["data", "judge_data", "gamma", "gammas", "candidates", "checkpoint"]
    names += ["method", "methods"]
    return {**harvest.context, **{name: settings[name] for name in names}}


# Cells --------------------------------------------------------------------------------------------


def swept(
    cfg: DictConfig,
    methods: Sequence[Simulated],
    chosen_on: RolloutTable,
    judged_on: Sequence[RolloutTable],
) -> pd.DataFrame:
    """Return every method with every value of its setting, as it is set (`grid` False) and from its
    grid. `split` says on which prompts: those that values are chosen on, or are judged on."""
    parts = []
    for split, tables in {"choose": [chosen_on], "judge": judged_on}.items():  # may be empty
        for method in methods:
            grid = list(dict.fromkeys([method.value, *method.grid(cfg.points, method.gamma)]))
            parts += [
                method.measured(table, value, cfg, f"{split} {number}").assign(split=split)
                for value in grid
                for number, table in enumerate(tables)
            ]
    return pd.concat(parts, ignore_index=True)


def cell(
    cfg: DictConfig, methods: Sequence[Simulated], measurements: pd.DataFrame, c: float
) -> list[dict[str, Any]]:
    """Return the rows of one speed ratio: every method as it is set, and with the value of its
    setting that is fastest on the prompts of `data`."""

    judge = "judge" if cfg.judge_data else "choose"

    def rows(name: str, value: float | None, split: str) -> pd.DataFrame:
        setting = measurements["setting"]
        same = setting.isna() if value is None else setting == value
        return measurements[
            (measurements["policy"] == name) & (measurements["split"] == split) & same
        ]

    found = dict[tuple[str, bool], tuple[float | None, pd.DataFrame]]()
    for method in methods:
        found[method.name, False] = method.value, rows(method.name, method.value, judge)
        if method.value is not None:
            grid = method.grid(cfg.points, method.gamma)
            spent = [rows(method.name, value, "choose")[at(c)].sum() for value in grid]
            value = grid[spent.index(min(spent))]
            found[method.name, True] = value, rows(method.name, value, judge)
    sums = {key: prompts(each, *COLUMNS, at(c)) for key, (_, each) in found.items()}
    # what the others are compared with: tuned where that can be
    rivals = {name: sums[name, (name, True) in sums] for name in cfg.against}
    return [
        {
            "method": name,
            "tuned": tuned,
            "value": value,
            "prompts": len(mine),
            "tokens_per_call": list(ratio(each, "emitted", "rounds")),
            "accepted_length": list(ratio(each, "run_tokens", "runs")),
            "rollback": list(ratio(each, "lost", "steps")),
            "speedup": list(
                ratio_of(c * mine["emitted"].to_numpy(float), mine[at(c)].to_numpy(float))
            ),
            "over": {
                other: {
                    "speed": list(over(mine, theirs, "emitted", at(c))),
                    "rollback": list(over(mine, theirs, "lost", "steps")),
                }
                for other, theirs in rivals.items()
            },
        }
        for (name, tuned), (value, each) in found.items()
        for mine in [sums[name, tuned]]
    ]


def at(c: float) -> str:
    """Return the column of seconds at a speed ratio, in draft forwards."""
    return f"{MODELLED} c={c:g}"


# Reporting ----------------------------------------------------------------------------------------


def page(
    cfg: DictConfig, c: str, rows: Sequence[Mapping[str, Any]], methods: Sequence[Simulated]
) -> str:
    """A table. An interval of a ratio over prompts stands behind it."""
    compared = [f"speed over {name}" for name in cfg.against]
    compared += [f"RB over {name}'s" for name in cfg.against]
    head = ["method", "setting", *HEAD, *compared]
    lines = [f"## c = {c}, gamma {cfg.gamma}, {rows[0]['prompts']} prompts", cells(head)]
    lines.append("|---" * len(head) + "|")
    for row in rows:
        value = "" if row["value"] is None else f"{row['value']:.3g}" + " tuned" * row["tuned"]
        facts = ("tokens_per_call", "accepted_length", "rollback", "speedup")
        over = [row["over"][name][key] for key in ("speed", "rollback") for name in cfg.against]
        shown = [said(Estimate(*one)) for one in [*(row[fact] for fact in facts), *over]]
        lines.append(cells([row["method"], value, *shown]))
    return "\n".join([*lines, "", METHOD, *unequal_budgets(cfg, float(c), methods)])


def unequal_budgets(cfg: DictConfig, c: float, methods: Sequence[Simulated]) -> Iterator[str]:
    """A line for methods whose branches take longer than the target call that they run beside."""
    longer = [(one, steps) for one in methods if (steps := one.branch_steps or 0) > c]
    if longer:
        named = ", ".join(f"{one.name} {steps}" for one, steps in longer)
        equal = " ".join(
            f"{'+' * (one.name not in cfg.gammas)}gammas.{one.name}={int(one.gamma - steps + c)}"
            for one, steps in longer
            if one.gamma - steps + c >= 1
        )
        yield (
            f"Unequal budgets: a branch takes more draft steps than a target call lasts ({c:g}):"
            f" {named}." + f" Equal ones: {equal}, with a predictor trained so" * bool(equal)
        )


def cells(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"


def said(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.2f}"
    return f"{estimate.value:.2f} ({estimate.low:.2f}-{estimate.high:.2f})"
