"""Choose the threshold of every stop rule for your hardware: replay a harvest, price the counts.

    python scripts/tune.py
    python scripts/tune.py cost=measured
    python scripts/tune.py cost=a100 methods=[fixed,confidence]

Needs a harvest with a round at every position (python scripts/gen_data.py anchors.stride=1) and, for specdecpp and
hrad, their checkpoints (python train.py). cost=measure decodes a few prompts to learn what forwards cost here; with
any other `cost` no model runs. Thresholds are chosen on one split and judged on another. Writes `out`, which
evaluate.py reads.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from data_gen.prompts import load_prompts
from data_gen.requests import requests_of_split
from data_gen.rollout_table import read_table
from data_gen.shards import read_manifest
from decoding import thresholds
from decoding.benchmark import Engine, request_seed
from decoding.cost import CostTable, observed_cost, regress_traces
from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.engines.serial import SerialEngine
from decoding.growth import StopRule
from decoding.models import load_pair, pair_identity
from decoding.policies import policy_of, threshold_of
from decoding.replay import Replayer
from decoding.sampling import Sampler
from decoding.stopping.fixed import Fixed
from decoding.structures.chain import Chain
from decoding.trace import Trace
from decoding.tuning import Candidate, Choice, choose, dominated_share, frontier, hindsight, sweep
from decoding.verifiers.token import TokenVerifier
from predictors.base import read_config, refuse_mismatch, write_json
from predictors.cli import hydra_script
from predictors.errors import UserError, checked_count, is_count

PLAIN = "autoregressive"


@hydra_script("tune")
def main(cfg: DictConfig) -> None:
    """Harvest and costs in, thresholds out."""
    manifest = read_manifest(cfg.data)
    check(cfg, manifest)
    stops: dict[str, StopRule] = {name: instantiate(cfg.rules[name]) for name in cfg.methods}
    costs = {"chosen": cost(cfg, manifest, stops), **{name: instantiate(node) for name, node in cfg.what_if.items()}}
    chosen_on, judged_on = (replayer(cfg, manifest, split, stops) for split in (cfg.choose, cfg.judge))
    first, second = (candidates_of(cfg, stops, found) for found in (chosen_on, judged_on))
    results = {name: tune(first, second, judged_on, table) for name, table in costs.items()}
    facts = {**about(cfg, manifest, stops), "results": results, "frontier": frontiers(second)}
    thresholds.write(Path(cfg.out), facts)
    print(f"\n{report(cfg, results, facts['frontier'])}\n\nsaved {cfg.out}")


def check(cfg: DictConfig, manifest: Mapping[str, Any]) -> None:
    """Refuse settings that cannot work, before anything is computed."""
    unknown = [name for name in cfg.methods if name not in cfg.rules]
    if unknown or not cfg.methods:
        raise UserError(
            f"methods: {list(cfg.methods)} must name some of {', '.join(cfg.rules)}, or define rules.<name>"
        )
    check_sizes(cfg, manifest)
    for key in ("warp", "draft_warp"):
        if instantiate(cfg[key]).to_dict() != manifest[key]:
            raise UserError(f"{key}: {cfg.data} was harvested with {manifest[key]}. Give the same, or another data=")
    for name in cfg.methods:
        if "checkpoint" in cfg.rules[name]:
            refuse_foreign_checkpoint(Path(cfg.rules[name].checkpoint), manifest, f"rules.{name}.checkpoint")


def check_sizes(cfg: DictConfig, manifest: Mapping[str, Any]) -> None:
    """The harvest must hold what is to be replayed."""
    for key in ("points", *(key for key in ("gamma_max", "max_new_tokens") if cfg[key] is not None)):
        checked_count(key, cfg[key])
    for key in ("gamma_max", "max_new_tokens"):
        harvested = manifest["gamma" if key == "gamma_max" else key]
        if cfg[key] is not None and cfg[key] > harvested:
            raise UserError(f"{key}: {cfg[key]} is more than the {harvested} harvested in {cfg.data}. Lower it")


def refuse_foreign_checkpoint(folder: Path, manifest: Mapping[str, Any], key: str) -> None:
    """Raise UserError where it was trained for another pair or other laws than the harvest's."""
    trained = {name: manifest[name] for name in ("pair", "warp", "draft_warp")}
    refuse_mismatch(read_config(folder, key), trained, f"{key}: {folder}")


# Replaying -----------------------------------------------------------------------------------------------------------


def replayer(cfg: DictConfig, manifest: Mapping[str, Any], split: str, stops: Mapping[str, StopRule]) -> Replayer:
    table = read_table(cfg.data, split, stops.values(), cfg.pair)
    if cfg.max_new_tokens is not None:
        table = table.shortened(cfg.max_new_tokens)
    return Replayer(table, cfg.gamma_max or manifest["gamma"])


def candidates_of(cfg: DictConfig, stops: Mapping[str, StopRule], replayer: Replayer) -> list[Candidate]:
    policies = {name: policy_of(stop, replayer.table) for name, stop in stops.items()}
    levels = np.linspace(0, 1, cfg.points + 1).tolist()
    lengths = list(range(1, int(replayer.limit.max()) + 1))
    grid = {name: lengths if isinstance(stop, Fixed) else levels for name, stop in stops.items()}
    return sweep(replayer, policies, grid)


def tune(
    chosen_on: Sequence[Candidate], judged_on: Sequence[Candidate], replayer: Replayer, table: CostTable
) -> dict[str, Any]:
    """What is known about one cost table."""
    least = hindsight(replayer, table)
    choices = choose(chosen_on, judged_on, table, least)
    plain = float(table.plain(judged_on[0].counts).sum())
    return {
        "cost": table.to_dict(),
        "oracle_speedup": plain / float(least.sum()),
        "advice": choices[0].rule if choices[0].speedup > 1 else "do not speculate",
        "rules": {choice.rule: asdict(choice) for choice in choices},
    }


def frontiers(candidates: Sequence[Candidate]) -> dict[str, Any]:
    """Of every rule: its discard and verification rates, and the share of fixed draft lengths that it dominates."""
    by_rule = {rule: [c for c in candidates if c.rule == rule] for rule in dict.fromkeys(c.rule for c in candidates)}
    edges = {rule: frontier(found) for rule, found in by_rule.items()}
    fixed = edges.get("fixed", [])
    return {
        rule: {
            "points": [[candidate.threshold, *candidate.rates] for candidate in found],
            "fixed_dominated": dominated_share(found, fixed) if fixed and rule != "fixed" else None,
        }
        for rule, found in edges.items()
    }


# Costs ---------------------------------------------------------------------------------------------------------------


def cost(cfg: DictConfig, manifest: Mapping[str, Any], stops: Mapping[str, StopRule]) -> CostTable:
    """The table of `cfg.cost`; where it says how to measure, from real decodes."""
    if "_target_" in cfg.cost:
        given: CostTable = instantiate(cfg.cost)
        return given
    traces, identity = decode_some(cfg, manifest, stops)
    plain = traces.pop(PLAIN)
    table = observed_cost(traces, plain)
    fit = regress_traces([trace for found in (plain, *traces.values()) for trace in found])
    Path(cfg.cost.file).parent.mkdir(parents=True, exist_ok=True)
    seconds, command = table.to_dict(), shlex.join(["python", "scripts/tune.py", *sys.argv[1:]])
    facts = {"seconds": seconds, "regression": asdict(fit), "pair": identity, "command": command}
    write_json(Path(cfg.cost.file), facts)
    print(f"{cost_lines(table)}\n{fit}; saved {cfg.cost.file}")
    return table


def decode_some(
    cfg: DictConfig, manifest: Mapping[str, Any], stops: Mapping[str, StopRule]
) -> tuple[dict[str, list[Trace]], dict[str, Any]]:
    """Traces of plain decoding, of fixed draft lengths and of every rule, request by request in turn; the pair."""
    if not (OmegaConf.is_list(cfg.cost.gammas) and cfg.cost.gammas and all(map(is_count, cfg.cost.gammas))):
        raise UserError(f"cost.gammas: {cfg.cost.gammas} must be draft lengths from 1 on, e.g. cost.gammas=[1,4,16]")
    pair = load_pair(cfg.pair)
    identity = pair_identity(pair)
    refuse_mismatch(manifest, {"pair": identity}, f"data: {cfg.data}")
    warp, draft_warp, eos = instantiate(cfg.warp), instantiate(cfg.draft_warp), frozenset(pair.eos_ids)
    rules: dict[str, StopRule] = {f"fixed {gamma}": Fixed(gamma) for gamma in cfg.cost.gammas}
    rules |= {name: stop for name, stop in stops.items() if not isinstance(stop, Fixed)}
    chain: Any = Chain(max(cfg.gamma_max or manifest["gamma"], *cfg.cost.gammas))
    verifier: Any = TokenVerifier()
    engines: dict[str, Engine] = {PLAIN: AutoregressiveEngine(pair, warp, eos)}
    for name, stop in rules.items():
        engines[name] = SerialEngine(pair, chain, stop, verifier, warp, draft_warp, eos)
    tokens, shares = checked_count("cost.max_new_tokens", cfg.cost.max_new_tokens), cfg.splits
    requests = requests_of_split(
        load_prompts(cfg.dataset), pair, tokens, "calibration", shares.calibration, shares.test, cfg.cost.limit
    )
    traces: dict[str, list[Trace]] = {name: [] for name in engines}
    for request in tqdm(requests, desc="cost", unit="prompt"):
        for name, engine in engines.items():
            sampler = Sampler.seeded(request_seed(cfg.seed, request, 0))
            traces[name].append(engine.decode(request.tokens, tokens, sampler))
    return traces, identity


# Reporting -----------------------------------------------------------------------------------------------------------


def about(cfg: DictConfig, manifest: Mapping[str, Any], stops: Mapping[str, StopRule]) -> dict[str, Any]:
    """What the thresholds belong to."""
    rules = {}
    for name, stop in stops.items():
        folder = cfg.rules[name].get("checkpoint")
        rules[name] = {
            "rule": cfg.rules[name]["_target_"],
            "setting": threshold_of(stop)[0],
            "checkpoint": thresholds.checkpoint_hash(folder) if folder else None,
        }
    return {
        **{key: manifest[key] for key in ("pair", "warp", "draft_warp")},
        "gamma": cfg.gamma_max or manifest["gamma"],
        "max_new_tokens": cfg.max_new_tokens or manifest["max_new_tokens"],
        "data": {"folder": str(cfg.data), "sha256": thresholds.file_hash(Path(cfg.data) / "manifest.json")},
        "chosen_on": cfg.choose,
        "judged_on": cfg.judge,
        "rules": rules,
        "command": shlex.join(["python", "scripts/tune.py", *sys.argv[1:]]),
    }


def report(cfg: DictConfig, results: Mapping[str, Any], edges: Mapping[str, Any]) -> str:
    """One table per cost table, and what the frontiers say."""
    parts = []
    for name, found in results.items():
        lines = [
            f"## cost {name}: {found['advice']}; oracle {found['oracle_speedup']:.2f}x",
            "| rule | threshold | speed-up, modelled | 95 % interval | regret to the oracle | discard | verification |",
            "|---|---|---|---|---|---|---|",
        ]
        parts.append("\n".join([*lines, *(row(Choice(**choice)) for choice in found["rules"].values())]))
    for rule, edge in edges.items():
        if edge["fixed_dominated"] is not None:
            parts.append(f"{rule}: its frontier dominates {edge['fixed_dominated']:.0%} of that of fixed lengths")
    parts.append(f"thresholds chosen on {cfg.choose}, judged on {cfg.judge}; prefill is left out")
    return "\n\n".join(parts)


def row(choice: Choice) -> str:
    low, high = choice.interval
    rates = f"{choice.discard_rate:.3f} | {choice.verification_rate:.3f}"
    speed = f"{choice.speedup:.3f} | {low:.3f}-{high:.3f}"
    return f"| {choice.rule} | {choice.threshold:.3g} | {speed} | {choice.regret:.1%} | {rates} |"


def cost_lines(table: CostTable) -> str:
    rows = ", ".join(
        f"{count}: {seconds * 1e3:.1f}" for count, seconds in zip(table.target.rows, table.target.seconds, strict=True)
    )
    calls = ", ".join(f"{rule} {seconds * 1e3:.2f}" for rule, seconds in table.calls.items())
    return (
        f"ms: draft {table.draft * 1e3:.2f}; target by rows {rows}; without a draft {table.autoregressive * 1e3:.1f}; "
        f"per number a rule computes: {calls}"
    )


if __name__ == "__main__":
    main()
