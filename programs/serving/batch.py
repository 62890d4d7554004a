"""Draft lengths by how many requests are decoded together: of tune.py, with batch=[...]."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig

from decoding.batch_cost import BatchCost, tabled, write_batch_cost
from decoding.models.loading import load_pair, pair_identity
from decoding.models.machine import setup_facts
from evaluation.batched.lengths import BatchChoice, best_lengths
from evaluation.batched.measuring import measured
from evaluation.replay.candidates import (
    candidates_of,
    check_sizes,
    refuse_other_harvests,
    refuse_other_warps,
    replayer,
)
from evaluation.replay.tuning import Candidate, span
from programs.serving import scheduler
from runtime.errors import UserError
from runtime.files import checked_folder, file_hash, file_name, refuse_foreign_file
from serving.schedule import Schedule, write_schedule

MARK = "python scripts/tune.py"  # in what it writes


def main(cfg: DictConfig, manifest: Mapping[str, Any]) -> None:
    """Harvest and costs in, schedule out."""
    check_sizes(cfg, manifest)
    refuse_other_warps(cfg, manifest)
    refuse_other_harvests(cfg, manifest)
    name = str(HydraConfig.get().runtime.choices["batch_cost"])
    default = f"runs/{file_name(cfg.pair.name)}-schedule-{name}.json"
    out = checked_folder("out", default if cfg.out is None else cfg.out, "file")
    refuse_foreign_file(out, MARK)
    gamma = cfg.gamma_max or manifest["gamma"]
    cost = priced(cfg, gamma)
    costs = tabled(cost, cfg.batch, gamma)
    chosen_on, judged_on = (_fixed(cfg, gamma, split) for split in (cfg.choose, cfg.judge))
    choices = best_lengths(chosen_on, judged_on, cost, cfg.batch, gamma)
    found = scheduler.simulated(cfg, cost, gamma) if cfg.scheduler else {}
    details = {
        **{key: manifest[key] for key in ("pair", "warp", "draft_warp")},
        "data": {"folder": str(cfg.data), "sha256": file_hash(Path(cfg.data) / "manifest.json")},
        "chosen_on": cfg.choose,
        "judged_on": cfg.judge,
        "cost": {"name": name, "made": cost.made},
        "sizes": [asdict(choice) for choice in choices],
        "scheduler": scheduler.facts(found),
    }
    schedule = Schedule.at({choice.requests: choice.length for choice in choices}, costs)
    write_schedule(out, schedule, command(), details)
    about = f"\nCosts {name} ({cost.made}), speeds modelled, {cfg.judge} prompts"
    print(about, page(choices), *scheduler.pages(found), f"saved {out}", sep="\n\n")


def command() -> str:
    return shlex.join(["python", "scripts/tune.py", *sys.argv[1:]])


def priced(cfg: DictConfig, gamma: int) -> BatchCost:
    """The costs of the config, measured here where it says so. Raises UserError for fewer rows than
    drafts of `gamma` tokens have."""
    if "_target_" in cfg.batch_cost:
        cost: BatchCost = instantiate(cfg.batch_cost)
        return cost
    asked, file = cfg.batch_cost, Path(cfg.batch_cost.file)
    if (most := max(asked.rows)) <= gamma:
        raise UserError(
            f"batch_cost.rows: expected rows up to {gamma + 1}, one more than the tokens of the"
            f" longest draft, got {most} at most. Add them, or lower gamma_max"
        )
    refuse_foreign_file(file, MARK, "batch_cost.file")
    pair = load_pair(cfg.pair)
    found = measured(pair, cfg.batch, asked.rows, asked.context, asked.repeats)
    facts = {
        "seconds": asdict(found),
        "context": asked.context,
        "pair": pair_identity(pair),
        "measured_on": setup_facts(pair),
        "command": command(),
    }
    write_batch_cost(file, facts)
    return found


def _fixed(cfg: DictConfig, gamma: int, split: str) -> list[Candidate]:
    found = replayer(cfg, gamma, cfg.data, split, [])
    return candidates_of(cfg, {"fixed": instantiate(cfg.rules.fixed)}, found)


def page(choices: Sequence[BatchChoice]) -> str:
    """A table, a row per number of requests; intervals are of 95 % over prompts."""
    lines = [
        "| requests | draft | tokens/s | without a draft | speed-up | of the best length |",
        "|---|---|---|---|---|---|",
    ]
    for one in choices:
        best = f"{one.best}: {one.best_speedup:.3f} ({span(one.best_interval)})"
        length = str(one.length) if one.length else "do not speculate"
        tokens = f"{one.tokens_per_second:.1f} ({span(one.tokens_interval)})"
        speedup = f"{one.speedup:.3f} ({span(one.interval)})"
        plain = f"{one.plain_tokens_per_second:.1f}"
        lines.append(f"| {one.requests} | {length} | {tokens} | {plain} | {speedup} | {best} |")
    return "\n".join(lines)
