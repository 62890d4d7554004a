"""What the programs that compare methods share: the parts of their configs made ready, and decoding
in turns."""

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from data_gen.prompts import load_prompts
from data_gen.requests import Request, refuse_other_shares, requests_of_split
from decoding.models.loading import ModelPair, load_pair, pair_identity
from decoding.models.machine import setup_facts
from decoding.trace import Trace
from evaluation import energy
from evaluation.interleaving import Engine, Traces, run, warm_up
from evaluation.journal import Journal, file_hashes, journal_path
from evaluation.methods import (
    FIXED,
    check_checkpoints,
    check_costs,
    checkpoint_configs,
    engine,
    method_names,
)
from evaluation.metrics import tokens_per_second
from evaluation.replay import thresholds


@dataclass(frozen=True)
class Comparison:
    """names: of methods, the baseline first; checkpoints: what each was trained for, by the key
    that names it."""

    names: list[str]
    checkpoints: dict[str, dict[str, Any]]
    pair: ModelPair
    requests: list[Request]


def prepare(cfg: DictConfig) -> Comparison:
    """Load what `cfg` asks for, with tuned thresholds put into `cfg.method`. What does not fit
    together is refused before anything is decoded (UserError)."""
    names = method_names(cfg, HydraConfig.get().overrides.task)
    by_method = {name: checkpoint_configs(cfg, name) for name in names}
    checkpoints = {key: trained for found in by_method.values() for key, trained in found.items()}
    pair = load_pair(cfg.pair)
    for name, found in by_method.items():
        check_checkpoints(cfg, pair, name, found)
    for warning in check_costs(cfg, pair, names):
        print(warning)
    for key, trained in checkpoints.items():
        check_splits(
            cfg,
            trained.get("provenance", {}).get("data"),
            f"{OmegaConf.select(cfg, key)} was trained",
        )
    use_thresholds(cfg, pair)
    requests = load_requests(cfg, pair)
    for name in names:
        engine(cfg, name, pair)
    return Comparison(names, checkpoints, pair, requests)


def use_thresholds(cfg: DictConfig, pair: ModelPair) -> None:
    """Put tuned thresholds into `cfg.method` where `cfg.thresholds` has some for this run, and say
    which."""
    overrides = list(HydraConfig.get().overrides.task)
    if cfg.thresholds is None or not (
        "thresholds" in thresholds.keys(overrides) or Path(cfg.thresholds).is_file()
    ):
        return
    run = {
        "pair": pair_identity(pair),
        **{key: instantiate(cfg[key]).to_dict() for key in ("warp", "draft_warp")},
    }
    found = thresholds.read(Path(cfg.thresholds))
    if other := thresholds.misfit(found, run):
        print(f"thresholds: those of {cfg.thresholds} are for another {other}, left out")
        return
    if thresholds.tuned(cfg, found):
        check_splits(cfg, found["data"], f"thresholds={cfg.thresholds} was tuned")
    print("\n".join(thresholds.apply(cfg, found, overrides, setup_facts(pair))))


def check_splits(cfg: DictConfig, data: Mapping[str, str] | None, where: str) -> None:
    """Refuse test prompts that the harvest `data` has not kept for tests. where: what was made of
    it."""
    if data and cfg.split != "all":
        refuse_other_shares(data, cfg.splits, where)


def load_requests(cfg: DictConfig, pair: ModelPair) -> list[Request]:
    """`cfg.limit` prompts of the split, evenly spaced."""
    prompts, shares = load_prompts(cfg.dataset), cfg.splits
    return requests_of_split(
        prompts, pair, cfg.max_new_tokens, cfg.split, shares.calibration, shares.test, cfg.limit
    )


def open_journal(cfg: DictConfig, compared: Comparison, *more: Any) -> Journal:
    """Of an interrupted run of exactly these settings, prompts, models, files, devices and
    versions, or a new one. more: settings that only this program has, as JSON holds them."""
    names, pair = compared.names, compared.pair
    methods = {name: OmegaConf.to_container(cfg.method[name], resolve=True) for name in names}
    settings = {key: OmegaConf.to_container(cfg[key]) for key in ("warp", "draft_warp")}
    sizes = [cfg.max_new_tokens, cfg.repeats, cfg.seed, list(cfg.gammas) if FIXED in names else []]
    prompts = [
        [request.dataset, request.prompt_id, request.tokens.tolist()]
        for request in compared.requests
    ]
    facts = [
        methods,
        settings,
        sizes,
        prompts,
        pair_identity(pair),
        setup_facts(pair),
        file_hashes(methods),
        *more,
    ]
    journal = Journal(journal_path(Path(cfg.out), facts))
    if journal.resumed:
        print(
            f"going on after {journal.resumed} turns of an earlier run ({journal.path}; delete it"
            " to start over)"
        )
    return journal


def fixed_grid(
    cfg: DictConfig, pair: ModelPair, requests: Sequence[Request], journal: Journal
) -> dict[int, float]:
    """Tokens/s of every fixed draft length in one pass of its own, so that the comparison itself
    stays unbiased."""
    if len(cfg.gammas) == 1:
        return {cfg.gammas[0]: 0.0}
    engines = {str(gamma): engine(cfg, FIXED, pair, gamma) for gamma in cfg.gammas}
    return {
        int(gamma): speed
        for gamma, speed in one_pass(cfg, engines, requests, "fixed gammas", journal).items()
    }


def one_pass(
    cfg: DictConfig,
    engines: Mapping[str, Engine],
    requests: Sequence[Request],
    stage: str,
    journal: Journal,
) -> dict[str, float]:
    """Tokens/s of each engine."""
    traces = decode(cfg, engines, requests, 1, stage, journal)
    return {name: tokens_per_second(repeats[0]) for name, repeats in traces.items()}


def best_gamma(grid: Mapping[int, float]) -> int | None:
    return max(grid, key=lambda gamma: grid[gamma]) if grid else None


def label(name: str, grid: Mapping[int, float]) -> str:
    return f"best fixed gamma ({best_gamma(grid)})" if name == FIXED and grid else name


def decode(
    cfg: DictConfig,
    engines: Mapping[str, Engine],
    requests: Sequence[Request],
    repeats: int,
    stage: str,
    journal: Journal,
) -> Traces:
    """Every method on every request, after a warm-up, with a progress bar that counts tokens."""
    tokens, done = (
        0,
        sum(len(turn) for key, turn in journal.turns.items() if key.startswith(f"{stage}/")),
    )
    total = len(engines) * len(requests) * repeats
    if done < total:
        warm_up(engines, requests[0])
    with tqdm(total=total, initial=done, desc=stage, unit="request") as bar:

        def advance(trace: Trace) -> None:
            nonlocal tokens
            tokens += len(trace.tokens)
            bar.update()
            bar.set_postfix_str(f"{tokens / bar.format_dict['elapsed']:.0f} tokens/s")

        return run(
            engines,
            requests,
            repeats=repeats,
            max_new_tokens=cfg.max_new_tokens,
            seed=cfg.seed,
            advance=advance,
            journal=journal,
            stage=stage,
        )


def run_facts(cfg: DictConfig, pair: ModelPair, script: str) -> dict[str, Any]:
    """What results say of the run that made them."""
    return {
        "command": shlex.join(["python", script, *sys.argv[1:]]),
        "config": OmegaConf.to_container(cfg, resolve=True),
        "pair": pair_identity(pair),
        **setup_facts(pair),
        "energy": energy.meter().about,
        "date": time.strftime("%Y-%m-%d"),
    }
