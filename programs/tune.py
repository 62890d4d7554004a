"""Choose the threshold of every stop rule for your hardware: replay a harvest, price the counts."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig

from data_gen.storage.dataset import read_manifest
from decoding.cost import CostTable
from decoding.stopping.base import TunableRule
from evaluation.replay import thresholds
from evaluation.replay.candidates import (
    candidates_of,
    check_sizes,
    given_cost,
    refuse_foreign_checkpoint,
    replayer,
)
from evaluation.replay.check import check_replay, excused, in_lines
from evaluation.replay.measuring import measured_cost
from evaluation.replay.simulate import Replayer
from evaluation.replay.tuning import (
    Candidate,
    Choice,
    choose,
    dominated_share,
    frontier,
    hindsight,
    oracle_totals,
    span,
)
from runtime.errors import UserError
from runtime.files import checked_folder, file_hash, file_name, refuse_foreign_file, write_json

MARK = "python scripts/tune.py"  # in what it writes
MEASURED = ("measure", "measured")  # costs of this machine


def main(cfg: DictConfig) -> None:
    """Harvest and costs in, thresholds out; with check=true, whether replay is decode."""
    out, manifest = out_file(cfg), read_manifest(cfg.data)
    check(cfg, manifest)
    refuse_foreign_file(out, MARK)
    stops = {name: tunable(cfg, name) for name in cfg.methods}
    if cfg.check:
        found = check_replay(cfg, manifest, stops)
        write_json(out, {"command": command(), "rules": found})
        print(f"\n{in_lines(found)}\n\nsaved {out}")
        sys.exit(not excused(found))
    facts = tuned(cfg, manifest, stops)
    thresholds.write(out, facts)
    print(f"\n{report(cfg, facts)}\n\nsaved {out}")


def tuned(
    cfg: DictConfig, manifest: Mapping[str, Any], stops: Mapping[str, TunableRule]
) -> dict[str, Any]:
    """What the file of thresholds holds."""
    given = {"chosen": cfg.cost, **cfg.what_if}
    tables = {
        name: given_cost(node, manifest) for name, node in given.items() if "_target_" in node
    }
    chosen_on, judged_on = (
        replayer(cfg, manifest, split, stops) for split in (cfg.choose, cfg.judge)
    )
    first, second = (candidates_of(cfg, stops, found) for found in (chosen_on, judged_on))
    if "chosen" not in tables:
        tables = {"chosen": measured_cost(cfg, manifest, stops), **tables}
    results = {name: tune(first, second, judged_on, table) for name, table in tables.items()}
    return {
        **about(cfg, manifest, stops),
        "measured_on": tables["chosen"].measured_on,
        "results": results,
        "frontier": frontiers(second),
        "oracle_calls": oracle_totals(judged_on.table) if judged_on.table.greedy else None,
    }


def command() -> str:
    return shlex.join(["python", "scripts/tune.py", *sys.argv[1:]])


def tunable(cfg: DictConfig, name: str) -> TunableRule:
    """The rule of that name. Raises UserError for one that has no replay policy."""
    stop: TunableRule = instantiate(cfg.rules[name])
    if not hasattr(stop, "policy"):
        raise UserError(
            f"rules.{name}: expected a rule that can be replayed, got {type(stop).__name__}. Give"
            " one that has a `policy`"
        )
    return stop


def cost_name() -> str:
    """The choice of `cost`."""
    return str(HydraConfig.get().runtime.choices["cost"])


def out_file(cfg: DictConfig) -> Path:
    """What a run with the costs of another machine finds is kept apart."""
    if cfg.check:
        default = f"runs/{file_name(cfg.pair.name)}-replay-check.json"
        return checked_folder("out", cfg.out or default, "file")
    suffix = "" if cost_name() in MEASURED else f"-{cost_name()}"
    default = f"runs/{file_name(cfg.pair.name)}-thresholds-T{cfg.warp.temperature}{suffix}.json"
    return checked_folder("out", default if cfg.out is None else cfg.out, "file")


def check(cfg: DictConfig, manifest: Mapping[str, Any]) -> None:
    """Refuse settings that cannot work, before anything is computed."""
    check_sizes(cfg, manifest)
    if "_target_" not in cfg.cost:
        refuse_foreign_file(Path(cfg.cost.file), MARK, "cost.file")
    for key in ("warp", "draft_warp"):
        if instantiate(cfg[key]).to_dict() != manifest[key]:
            raise UserError(
                f"{key}: {cfg.data} was harvested with {manifest[key]}. Give the same, or another"
                " data="
            )
    for name in cfg.methods:
        if "checkpoint" in cfg.rules[name]:
            folder, gamma_max = Path(cfg.rules[name].checkpoint), cfg.gamma_max or manifest["gamma"]
            refuse_foreign_checkpoint(folder, manifest, f"rules.{name}.checkpoint", gamma_max)


# Judging ------------------------------------------------------------------------------------------


def tune(
    chosen_on: Sequence[Candidate],
    judged_on: Sequence[Candidate],
    replayer: Replayer,
    table: CostTable,
) -> dict[str, Any]:
    """What is known about one cost table."""
    least = hindsight(replayer, table)
    choices = choose(chosen_on, judged_on, table, least)
    plain = float(table.plain(judged_on[0].counts).sum())
    return {
        "cost": table.to_dict(),
        "oracle_speedup": plain / float(least.sum()),
        "advice": next(
            (choice.rule for choice in choices if choice.speculate), thresholds.NO_ADVICE
        ),
        "rules": {choice.rule: asdict(choice) for choice in choices},
    }


def frontiers(candidates: Sequence[Candidate]) -> dict[str, Any]:
    """Of every rule: its discard and verification rates, and the share of fixed draft lengths that
    it dominates."""
    by_rule = {
        rule: [c for c in candidates if c.rule == rule]
        for rule in dict.fromkeys(c.rule for c in candidates)
    }
    edges = {rule: frontier(found) for rule, found in by_rule.items()}
    fixed = edges.get("fixed", [])
    return {
        rule: {
            "points": [[candidate.threshold, *candidate.rates] for candidate in found],
            "fixed_dominated": dominated_share(found, fixed) if fixed and rule != "fixed" else None,
        }
        for rule, found in edges.items()
    }


# Reporting ----------------------------------------------------------------------------------------


def about(
    cfg: DictConfig, manifest: Mapping[str, Any], stops: Mapping[str, TunableRule]
) -> dict[str, Any]:
    """What the thresholds belong to."""
    rules = {}
    for name, stop in stops.items():
        folder, setting = cfg.rules[name].get("checkpoint"), stop.setting
        rules[name] = {
            "setting": setting,
            "stop": thresholds.rule_settings(cfg.rules[name], setting),
            "checkpoint": (
                thresholds.checkpoint_hash(folder, f"rules.{name}.checkpoint") if folder else None
            ),
        }
    return {
        **{key: manifest[key] for key in ("pair", "warp", "draft_warp")},
        "gamma": cfg.gamma_max or manifest["gamma"],
        "max_new_tokens": cfg.max_new_tokens or manifest["max_new_tokens"],
        "data": {"folder": str(cfg.data), "sha256": file_hash(Path(cfg.data) / "manifest.json")},
        "cost": cost_name(),
        "chosen_on": cfg.choose,
        "judged_on": cfg.judge,
        "rules": rules,
        "command": command(),
    }


def report(cfg: DictConfig, facts: Mapping[str, Any]) -> str:
    """One table per cost table, and what the frontiers say."""
    parts = []
    for name, found in facts["results"].items():
        lines = [
            (
                "## cost"
                f" {name}{' (' + facts['cost'] + ')' if name == 'chosen' else ''}{heading(found)}"
            ),
            (
                "| rule | threshold | speculate | speed-up, modelled | 95 % interval | regret to"
                " the oracle | discard | verification |"
            ),
            "|---|---|---|---|---|---|---|---|",
        ]
        parts.append(
            "\n".join([*lines, *(row(Choice(**choice)) for choice in found["rules"].values())])
        )
    for rule, edge in facts["frontier"].items():
        if edge["fixed_dominated"] is not None:
            parts.append(
                f"{rule}: its frontier dominates {edge['fixed_dominated']:.0%} of that of fixed"
                " lengths"
            )
    if facts["oracle_calls"]:
        draft, target = facts["oracle_calls"]
        parts.append(
            f"oracle of SpecDec++, drafts of any length: {draft} draft and {target} target calls"
        )
    parts.append(
        f"thresholds and advice chosen on {cfg.choose}, figures of {cfg.judge}; prefill is left out"
    )
    return "\n\n".join(parts)


def heading(found: Mapping[str, Any]) -> str:
    """The advice and how it does on the prompts it is judged on."""
    advised = found["rules"].get(found["advice"])
    speed = f" {advised['speedup']:.2f}x" if advised else ""
    free = "" if found["cost"]["calls"] else "; predictions cost nothing here"
    return f": {found['advice']}{speed}; oracle {found['oracle_speedup']:.2f}x{free}"


def row(choice: Choice) -> str:
    rates = f"{choice.discard_rate:.3f} | {choice.verification_rate:.3f}"
    speed = f"{choice.speedup:.3f} | {span(choice.interval)}"
    worth = "yes" if choice.speculate else "no"
    return (
        f"| {choice.rule} | {choice.threshold:.3g} | {worth} | {speed} | {choice.regret:.1%} |"
        f" {rates} |"
    )
