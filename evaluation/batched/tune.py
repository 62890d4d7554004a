"""Draft lengths by how many requests are decoded together: of tune.py, with batch=[...]."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from data_gen.storage.dataset import Harvest
from decoding.batch_cost import BatchCost, write_batch_cost
from decoding.models.loading import load_pair, pair_identity
from decoding.models.machine import setup_facts
from evaluation.batched.lengths import BatchChoice
from evaluation.batched.measuring import measured
from evaluation.replay.candidates import candidates_of, replayer
from evaluation.replay.tuning import Candidate, span
from runtime.errors import UserError
from runtime.files import refuse_foreign_file

MARK = "python scripts/tune.py"  # in what it writes


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


def fixed(cfg: DictConfig, gamma: int, harvest: Harvest, split: str) -> list[Candidate]:
    found = replayer(cfg, gamma, harvest, split, [])
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
