"""Choose the threshold of every stop rule for your hardware: replay a harvest, price the counts.

    python scripts/tune.py
    python scripts/tune.py cost=measured
    python scripts/tune.py cost=a100 methods=[fixed,confidence]

Needs a harvest with a round at every position (python scripts/gen_data.py anchors.stride=1
out=data/rounds) and, for specdecpp and hrad, their checkpoints (python train.py). cost=measure
decodes a few prompts to learn what forwards cost here; with any other `cost` no model runs.
Thresholds are chosen on one split and judged on another. Writes `out`: evaluate.py takes the
thresholds of measured costs by itself, those of other costs where `thresholds` names the file."""

import runtime.openmp  # noqa: F401  (before torch loads)

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from data_gen.prompts import load_prompts
from data_gen.requests import requests_of_split
from data_gen.storage.dataset import read_manifest
from decoding.cost import CostTable, observed_cost, regress_traces
from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.engines.serial import SerialEngine
from decoding.models.loading import ModelPair, load_pair, pair_identity
from decoding.models.machine import setup_facts
from decoding.sampling import Sampler
from decoding.stopping.base import TunableRule
from decoding.stopping.never import Never
from decoding.structures.chain import Chain
from decoding.trace import Trace
from decoding.verifiers.token import TokenVerifier
from evaluation.interleaving import Engine, request_seed
from evaluation.replay import thresholds
from evaluation.replay.candidates import (
    candidates_of,
    check_out,
    check_sizes,
    check_splits,
    given_cost,
    refuse_foreign_checkpoint,
    refuse_other_pair,
    replayer,
)
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
from runtime.cli import hydra_script
from runtime.errors import UserError, checked_count, is_count
from runtime.files import checked_folder, file_hash, write_json

PLAIN = "autoregressive"
MEASURED = ("measure", "measured")  # costs of this machine


@hydra_script("tune")
def main(cfg: DictConfig) -> None:
    """Harvest and costs in, thresholds out."""
    out, manifest = out_file(cfg), read_manifest(cfg.data)
    check(cfg, manifest)
    check_out(out)
    given = {"chosen": cfg.cost, **cfg.what_if}
    tables = {
        name: given_cost(node, manifest) for name, node in given.items() if "_target_" in node
    }
    stops: dict[str, TunableRule] = {name: instantiate(cfg.rules[name]) for name in cfg.methods}
    chosen_on, judged_on = (
        replayer(cfg, manifest, split, stops) for split in (cfg.choose, cfg.judge)
    )
    first, second = (candidates_of(cfg, stops, found) for found in (chosen_on, judged_on))
    if "chosen" not in tables:
        tables = {"chosen": measured_cost(cfg, manifest, stops), **tables}
    results = {name: tune(first, second, judged_on, table) for name, table in tables.items()}
    facts = {
        **about(cfg, manifest, stops),
        "measured_on": tables["chosen"].measured_on,
        "results": results,
        "frontier": frontiers(second),
    }
    facts["oracle_calls"] = oracle_totals(judged_on.table) if judged_on.table.greedy else None
    thresholds.write(out, facts)
    print(f"\n{report(cfg, facts)}\n\nsaved {out}")


def cost_name() -> str:
    """The choice of `cost`."""
    return str(HydraConfig.get().runtime.choices["cost"])


def out_file(cfg: DictConfig) -> Path:
    """What a run with the costs of another machine finds is kept apart."""
    suffix = "" if cost_name() in MEASURED else f"-{cost_name()}"
    default = f"runs/{cfg.pair.name}-thresholds-T{cfg.warp.temperature}{suffix}.json"
    return checked_folder("out", default if cfg.out is None else cfg.out, "file")


def check(cfg: DictConfig, manifest: Mapping[str, Any]) -> None:
    """Refuse settings that cannot work, before anything is computed."""
    unknown = [name for name in cfg.methods if name not in cfg.rules]
    if unknown or not cfg.methods:
        raise UserError(
            f"methods: {list(cfg.methods)} must name some of {', '.join(cfg.rules)}, or define"
            " rules.<name>"
        )
    check_sizes(cfg, manifest)
    check_splits(cfg)
    if "_target_" not in cfg.cost:
        check_measuring(cfg.cost)
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


def check_measuring(cost: DictConfig) -> None:
    """What cost=measure is told."""
    if not (OmegaConf.is_list(cost.gammas) and cost.gammas and all(map(is_count, cost.gammas))):
        raise UserError(
            f"cost.gammas: {cost.gammas} must be draft lengths from 1 on, e.g. cost.gammas=[1,4,16]"
        )
    for key in ("max_new_tokens", *(["limit"] if cost.limit is not None else [])):
        checked_count(f"cost.{key}", cost[key])
    check_out(Path(cost.file))


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


# Costs --------------------------------------------------------------------------------------------


def measured_cost(
    cfg: DictConfig, manifest: Mapping[str, Any], stops: Mapping[str, TunableRule]
) -> CostTable:
    """From real decodes, saved for cost=measured."""
    pair = load_pair(cfg.pair)
    identity, setup = pair_identity(pair), setup_facts(pair)
    refuse_other_pair(identity, manifest, f"pair: {cfg.pair.name}")
    traces = decode_some(cfg, pair, cfg.gamma_max or manifest["gamma"], stops)
    plain = traces.pop(PLAIN)
    table = replace(observed_cost(traces, plain), pair=identity, measured_on=setup)
    fit = regress_traces([trace for found in (plain, *traces.values()) for trace in found])
    seconds, command = table.to_dict(), shlex.join(["python", "scripts/tune.py", *sys.argv[1:]])
    facts = {"pair": identity, "measured_on": setup, "command": command}
    write_json(
        Path(cfg.cost.file),
        {"seconds": seconds, "regression": asdict(fit), **facts},
        key="cost.file",
    )
    print(f"{cost_lines(table)}\n{fit}; saved {cfg.cost.file}")
    return table


def decode_some(
    cfg: DictConfig, pair: ModelPair, gamma_max: int, stops: Mapping[str, TunableRule]
) -> dict[str, list[Trace]]:
    """Traces of plain decoding, of fixed draft lengths and of every rule, request by request in
    turn."""
    warp, draft_warp, eos = (
        instantiate(cfg.warp),
        instantiate(cfg.draft_warp),
        frozenset(pair.eos_ids),
    )
    most = max(gamma_max, *cfg.cost.gammas)
    rules: dict[str, tuple[int, Any]] = {
        f"fixed {gamma}": (gamma, Never()) for gamma in cfg.cost.gammas
    }
    rules |= {name: (most, stop) for name, stop in stops.items() if stop.calls_cost}
    verifier: Any = TokenVerifier()
    engines: dict[str, Engine] = {PLAIN: AutoregressiveEngine(pair, warp, eos)}
    for name, (gamma, stop) in rules.items():
        chain: Any = Chain(gamma)
        engines[name] = SerialEngine(pair, chain, stop, verifier, warp, draft_warp, eos)
    tokens, shares = cfg.cost.max_new_tokens, cfg.splits
    requests = requests_of_split(
        load_prompts(cfg.dataset),
        pair,
        tokens,
        "calibration",
        shares.calibration,
        shares.test,
        cfg.cost.limit,
    )
    traces: dict[str, list[Trace]] = {name: [] for name in engines}
    for request in tqdm(requests, desc="cost", unit="prompt"):
        for name, engine in engines.items():
            sampler = Sampler.seeded(request_seed(cfg.seed, request, 0))
            traces[name].append(engine.decode(request.tokens, tokens, sampler))
    return traces


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
        "command": shlex.join(["python", "scripts/tune.py", *sys.argv[1:]]),
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


def cost_lines(table: CostTable) -> str:
    rows = ", ".join(
        f"{count}: {seconds * 1e3:.1f}"
        for count, seconds in zip(table.target.rows, table.target.seconds, strict=True)
    )
    calls = ", ".join(f"{rule} {seconds * 1e3:.2f}" for rule, seconds in table.calls.items())
    return (
        f"ms: draft {table.draft * 1e3:.2f}; target by rows {rows}; without a draft"
        f" {table.autoregressive * 1e3:.1f}; per number a rule computes: {calls}"
    )


if __name__ == "__main__":
    main()
