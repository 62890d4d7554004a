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
from decoding.models.eagle.draft import FILE
from decoding.settings import Pair
from decoding.stopping.base import TunableRule, setting_of
from decoding.stopping.rollout_table import RolloutTable
from evaluation import methods, table
from evaluation.overlapped.walk import BranchRecords, Overlapped, settings_of, traces
from evaluation.page import simulated as simulated_draft
from evaluation.page import times
from evaluation.replay import read
from evaluation.replay.read import REPLAYED
from evaluation.replay.simulate import WALKS, Replayer
from evaluation.table import MODELLED, counted, over, prompts, ratio, ratio_of, timed
from evaluation.timeline import Devices, modelled_seconds
from predictors.base import read_config
from runtime.errors import UserError
from runtime.files import checked_folder, refuse_foreign_file, table_beside, write_json
from runtime.intervals import METHOD, Estimate
from runtime.job import command_line, command_of
from runtime.text import printable

FIGURES = {
    "tokens_per_call": ("emitted", "rounds"),
    "accepted_length": ("run_tokens", "runs"),
    "rollback": ("lost", "steps"),
}
"""What is read off a table: above / below, sums over prompts."""
HEAD = ["method", "setting", "tokens/call", "M", "RB", "speed-up, modelled"]
OVERLAPPED = "decoding.engines.overlapped.OverlappedEngine"
Swept = Mapping[tuple[str, str, float | None], pd.DataFrame]
"""Measurements by split (`choose`, `judge`), method and value of its setting."""


def simulate(cfg: DictConfig) -> None:
    """Write a table per speed ratio."""
    out, harvest = checked_folder("out", cfg.out, "file"), Harvest.open(cfg.data)
    refuse_foreign_file(out, "tune")
    parquet = table_beside(out)
    elsewhere = [Harvest.open(folder, "judge_data") for folder in cfg.judge_data]
    check(cfg, harvest, elsewhere)
    read.warn_of_repeats(*((each, "all") for each in [harvest, *elsewhere]))
    simulated = [Simulated.of(cfg, name) for name in cfg.methods]
    if any(method.overlapped for method in simulated):
        refuse_reading_draft(cfg)
    settings: Any = OmegaConf.to_container(cfg, resolve=True)
    names = ["data", "judge_data", "gamma", "gammas", "candidates", "checkpoint", "method"]
    facts = {name: settings[name] for name in [*names, "methods"]}
    with read.tracking(cfg, "simulate", elsewhere) as logger:
        frames = swept(cfg, simulated, harvest, elsewhere)
        cells = {f"{c:.12g}": cell(cfg, simulated, frames, c) for c in cfg.ratios}
        command = {"command": command_line()}
        write_json(out, {**command, **harvest.context, **facts, "cells": cells})
        table.save(pd.concat(frames.values(), ignore_index=True), parquet)
        logger.artifact("overlapped", "results", out)
    pages = [page(cfg, c, rows, simulated) for c, rows in cells.items()]
    heading = f"# {printable(harvest.pair.name)}"
    parts = [answer(cfg, cells), heading, *pages, *simulated_draft(cfg.pair), f"saved {out}"]
    print("\n\n".join(["", *parts]))


@dataclass(frozen=True)
class Simulated:
    """A method of the config: its stop rule, draft length, and the settings of its overlapped
    engine, None if the models take turns. value: of the setting that is swept, None if there is
    none."""

    name: str
    stop: Any
    gamma: int
    overlapped: Overlapped | None
    value: float | None

    @classmethod
    def of(cls, cfg: DictConfig, name: str) -> "Simulated":
        """Return the method `name`. Raises UserError for one that cannot be replayed, in turn or
        side by side."""
        key, gamma = f"method.{name}", gamma_of(cfg, name)
        settings = configured(cfg, name)
        engine = settings.engine._target_
        if engine not in (OVERLAPPED, REPLAYED["engine"]):
            raise UserError(
                f"{key}.engine: expected serial, overlapped or pearl, got"
                f" {engine.rpartition('.')[2]}. Name another method"
            )
        parts = instantiate(settings.engine).keywords
        stop = parts["stop"]
        value = setting_of(stop) if isinstance(stop, TunableRule) else None
        if engine == OVERLAPPED:
            return cls(name, stop, gamma, settings_of(parts), value)
        for part in ("structure", "verifier"):
            if settings[part]._target_ != REPLAYED[part]:
                raise UserError(
                    f"{part}: expected {REPLAYED[part]} in {key}, got {type(parts[part]).__name__}."
                    " Leave it as it is"
                )
        if value is None:
            raise UserError(
                f"{key}.stop: expected a rule that can be replayed, got {type(stop).__name__}."
                " Give one that has a `policy`"
            )
        return cls(name, stop, gamma, None, value)

    @property
    def branch_steps(self) -> int | None:
        """Return the most draft steps of a branch, its candidate included; None without
        branches."""
        return 1 + self.overlapped.continuation if self.overlapped else None

    def grid(self, points: int) -> Sequence[float | None]:
        return [None] if self.value is None else list(self.stop.grid(points, self.gamma))

    def measured(
        self, rounds: RolloutTable, value: float | None, cfg: DictConfig, dataset: str
    ) -> pd.DataFrame:
        """Return its rows on every recorded prompt, with this value of its setting, priced at
        every speed ratio in draft forwards."""
        kind = "expected" if cfg.warp.temperature else "counted"
        if not self.overlapped:
            replayed = Replayer(rounds, self.gamma).replay(self.stop.policy(rounds), value or 0.0)
            rows = counted(kind, self.name, replayed, rounds.prompt_ids, value, dataset)
            forwards, calls = rows["draft_forwards"], rows["rounds"]
            return rows.assign(**{at(c): forwards + c * calls for c in cfg.ratios})
        settings = self.overlapped
        if value is not None:
            settings = replace(settings, threshold=value)
        walks = WALKS if cfg.warp.temperature else 1  # a greedy target draws no random numbers
        walked = traces(rounds, settings, range(walks))
        rows = timed({self.name: walked}).assign(kind=kind, dataset=dataset, setting=value)
        devices = {at(c): Devices.of_ratio(c) for c in cfg.ratios}
        priced = {
            name: [modelled_seconds(trace, each) for trace in walked]
            for name, each in devices.items()
        }
        return rows.assign(**priced)


def check(cfg: DictConfig, harvest: Harvest, elsewhere: Sequence[Harvest]) -> None:
    """Raise UserError for settings that do not work, before anything is computed."""
    read.refuse_other_warps(cfg, harvest)
    if (name := harvest.pair.name) != cfg.pair.name:
        raise UserError(
            f"pair: expected {name}, whose harvest {cfg.data} is, got {cfg.pair.name}. Give that"
            " pair, or another data="
        )
    for other in elsewhere:
        refuse_other_distributions(other, harvest, "judge_data", str(cfg.data))
    longest = max(gamma_of(cfg, name) for name in cfg.methods)
    longer = ("anchors.stride=1", f"gamma={longest + 1}")
    for each in [harvest, *elsewhere]:
        if longest >= each.gamma:
            raise UserError(
                f"gamma: expected less than the {each.gamma} tokens of the harvest's rounds, got"
                f" {longest}. Lower it, or harvest longer rounds:"
                f" {command_of('gen_data', *longer, f'out={each.folder}-{longest + 1}')}"
            )
    folder = Path(cfg.checkpoint)
    for name in cfg.methods:
        if not OmegaConf.select(cfg.method[name], "stop.checkpoint"):
            continue
        gamma, trained = gamma_of(cfg, name), read_config(folder, "checkpoint").get("gamma")
        branches = "gamma_max" in (cfg.method[name].get("structure") or {})
        if branches and trained is not None and trained != gamma:
            raise UserError(
                f"gammas.{name}: expected {trained}, the tokens that {folder} was trained for, got"
                f" {gamma}. Give that, or another checkpoint"
            )
        read.refuse_foreign_checkpoint(folder, harvest, "checkpoint", gamma)


def refuse_reading_draft(cfg: DictConfig) -> None:
    """Raise UserError for a harvest whose draft cannot run beside its target."""
    folder = Path(cfg.pair.draft).expanduser()
    here = (folder / "config.json").is_file()
    if beside(folder, FILE) or (here and find_checkpoint(Pair.of(cfg.pair).model("draft"))):
        raise UserError(
            "pair.draft: expected a draft that does not read its target's hidden states, since"
            f" here the two run side by side, got {cfg.pair.draft}. Harvest with another, such as"
            " pair=smollm2"
        )


def gamma_of(cfg: DictConfig, name: str) -> int:
    gamma: int = cfg.gammas.get(name, cfg.gamma)
    return gamma


def configured(cfg: DictConfig, name: str) -> DictConfig:
    """Return the settings of a method, with the draft length, `candidates` and `checkpoint` of this
    run filled in."""
    parts: Any = OmegaConf.to_container(cfg.method[name], resolve=True)
    gamma = gamma_of(cfg, name)
    given = {
        "structure": {"gamma_max": gamma, "candidates": cfg.candidates.get(name)},
        "stop": {"gamma": gamma, "checkpoint": cfg.checkpoint},
    }
    for holder in (parts, parts["engine"]):  # the engine of `custom` has the top level's parts
        for part, values in given.items():
            if holder.get(part):
                kept = {key: each for key, each in values.items() if each and key in holder[part]}
                holder[part] |= kept
    changes = {part: parts[part] for part in ("engine", *given) if parts.get(part)}
    return methods.configured(cfg, name, changes)


# Cells --------------------------------------------------------------------------------------------


def swept(
    cfg: DictConfig, simulated: Sequence[Simulated], harvest: Harvest, elsewhere: Sequence[Harvest]
) -> Swept:
    """Return every method with every value of its setting (the configured one and its grid), on the
    prompts for choosing and on those for judging."""
    asked = [method.stop for method in simulated if isinstance(method.stop, TunableRule)]
    frames, pair = {}, Pair.of(cfg.pair)
    for split, harvests in {"choose": [harvest], "judge": elsewhere}.items():
        recorded = [
            read.read_table(each, "all", [BranchRecords(), *asked], pair) for each in harvests
        ]
        for method in simulated if recorded else ():
            for value in dict.fromkeys([method.value, *method.grid(cfg.points)]):
                parts = [
                    method.measured(rounds, value, cfg, f"{split} {number}").assign(split=split)
                    for number, rounds in enumerate(recorded)
                ]
                frames[split, method.name, value] = pd.concat(parts, ignore_index=True)
    return frames


def cell(
    cfg: DictConfig, simulated: Sequence[Simulated], frames: Swept, c: float
) -> list[dict[str, Any]]:
    """Return the rows of one speed ratio: every method as configured, and with the value of its
    setting that is fastest on the prompts of `data`."""
    judge, seconds = "judge" if cfg.judge_data else "choose", at(c)
    values = dict[tuple[str, bool], float | None]()
    for method in simulated:
        values[method.name, False] = method.value
        if method.value is not None:
            grid = method.grid(cfg.points)
            spent = [frames["choose", method.name, value][seconds].sum() for value in grid]
            values[method.name, True] = grid[spent.index(min(spent))]
    sums = {
        (name, tuned): prompts(frames[judge, name, value], "emitted", "steps", "lost", seconds)
        for (name, tuned), value in values.items()
    }
    # the methods to compare with, tuned if possible
    rivals = {name: sums[name, (name, True) in sums] for name in cfg.against}
    rows = []
    for (name, tuned), value in values.items():
        each, mine = frames[judge, name, value], sums[name, tuned]
        plain, spent = c * mine["emitted"].to_numpy(float), mine[seconds].to_numpy(float)
        row: dict[str, Any] = {"method": name, "tuned": tuned, "value": value}
        row["prompts"] = len(mine)
        row |= {figure: list(ratio(each, *columns)) for figure, columns in FIGURES.items()}
        row["speedup"] = list(ratio_of(plain, spent))
        row["over"] = {
            other: {
                "speed": list(over(mine, rival, "emitted", seconds)),
                "rollback": list(over(mine, rival, "lost", "steps")),
            }
            for other, rival in rivals.items()
        }
        rows.append(row)
    return rows


def at(c: float) -> str:
    """Return the column of seconds at a speed ratio, in draft forwards."""
    return f"{MODELLED} c={c:.12g}"


# In words -----------------------------------------------------------------------------------------


def answer(cfg: DictConfig, cells: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return two lines: which method is fastest at every speed ratio, then how sure that is."""
    parts = []
    for c, rows in cells.items():
        best = max(rows, key=lambda row: row["speedup"][0])
        value = "" if best["value"] is None else f" at {best['value']:.3g}"
        named, speed = f"{best['method']}{value}", Estimate(*best["speedup"])
        if speed.value > 1:
            parts.append(f"{named} for c = {c} ({times(speed)})")
        else:
            parts.append(f"nothing for c = {c} ({named} is at {times(speed)})")
    judged = f"other prompts, of {', '.join(cfg.judge_data)}"
    if not cfg.judge_data:
        judged = "the same prompts, so likely optimistic: judge_data=[<harvest>] takes others"
    return (
        f"Fastest over plain decoding, modelled: {'; '.join(parts)}.\nSettings chosen on"
        f" {cfg.data}, speeds of {judged}; {METHOD}."
    )


def page(
    cfg: DictConfig, c: str, rows: Sequence[Mapping[str, Any]], simulated: Sequence[Simulated]
) -> str:
    """Return the table of one speed ratio. An interval of a ratio over prompts stands behind it."""
    head = [*HEAD, *(f"speed over {name}" for name in cfg.against)]
    lines = []
    for row in rows:
        value = "" if row["value"] is None else f"{row['value']:.3g}" + " tuned" * row["tuned"]
        shown = [row[figure] for figure in (*FIGURES, "speedup")]
        for key in ("speed", "rollback"):
            shown += [row["over"][name][key] for name in cfg.against]
        lines.append(
            [row["method"], value, *(table.with_interval(Estimate(*each)) for each in shown)]
        )
    written = table.markdown([*head, *(f"RB over {name}'s" for name in cfg.against)], lines)
    title = f"## c = {c}, gamma {cfg.gamma}, {rows[0]['prompts']} prompts"
    return "\n".join([title, written, "", METHOD, *unequal_budgets(cfg, float(c), simulated)])


def unequal_budgets(cfg: DictConfig, c: float, simulated: Sequence[Simulated]) -> Iterator[str]:
    """Yield a line for each method whose branches take longer than the target call beside them."""
    longer = [(each, steps) for each in simulated if (steps := each.branch_steps or 0) > c]
    if longer:
        named = ", ".join(f"{each.name} {steps}" for each, steps in longer)
        equal = " ".join(
            f"{'+' * (each.name not in cfg.gammas)}gammas.{each.name}={int(each.gamma - steps + c)}"
            for each, steps in longer
            if each.gamma - steps + c >= 1
        )
        yield (
            f"Unequal budgets: a branch takes more draft steps than a target call lasts ({c:g}):"
            f" {named}." + f" Equal ones: {equal}, with a predictor trained so" * bool(equal)
        )
