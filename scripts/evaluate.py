"""Decode real prompts with several methods and compare them: speed, acceptance, losslessness.

    python scripts/evaluate.py
    python scripts/evaluate.py warp=greedy draft_warp.temperature=0 limit=20
    python scripts/evaluate.py methods=[custom] stop=entropy verifier=block profile=true
    python scripts/evaluate.py methods=[custom] engine=lookahead

Needs the pair (python scripts/build_pair.py) and, for specdecpp and hrad, their checkpoints (python train.py). Takes
the thresholds of scripts/tune.py where there are some for this pair and these warps, unless others are given. Writes
results.json, table.md, the traces of every method and the texts of their tokens (vocabulary.json) to `out`. An
interrupted run goes on when started again.
"""

import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from data_gen.prompts import load_prompts
from data_gen.requests import refuse_other_shares, requests_of_split
from decoding import energy, report, thresholds, vocabulary
from decoding.benchmark import Engine, Request, Traces, of_dataset, run, warm_up
from decoding.journal import Journal, file_hashes, journal_path
from decoding.lossless import broken_invariants, greedy_differences
from decoding.machine import setup_facts
from decoding.methods import FIXED, check_checkpoints, checkpoint_config, engine, is_lossless, method_names
from decoding.metrics import Metrics, measure, measure_overlap, profile, tokens_per_second
from decoding.models import ModelPair, load_pair, pair_identity
from decoding.report import BASELINE
from decoding.timeline import modelled
from decoding.trace import Trace, write_traces
from predictors.cli import hydra_script
from predictors.storage import checked_folder, only_writer, refuse_foreign, replaced_folder, write_json

MARKER = "results.json"  # what a folder of results is known by


@hydra_script("evaluate")
def main(cfg: DictConfig) -> None:
    """Models and prompts in, tables out."""
    names = method_names(cfg, HydraConfig.get().overrides.task)
    out = checked_folder("out", cfg.out)
    refuse_foreign(out, MARKER)
    checkpoints = {name: checkpoint_config(cfg, name) for name in names}
    pair = load_pair(cfg.pair)
    check_checkpoints(cfg, pair, checkpoints)
    for name, trained in checkpoints.items():
        if trained:
            data = trained.get("provenance", {}).get("data")
            check_splits(cfg, data, f"{cfg.method[name].stop.checkpoint} was trained")
    use_thresholds(cfg, pair)
    requests = load_requests(cfg, pair)
    for name in names:
        engine(cfg, name, pair)  # what does not fit together is refused before anything is decoded
    with only_writer(out), open_journal(cfg, names, pair, requests) as journal:
        logger = instantiate(cfg.logger)
        logger.start("evaluate", OmegaConf.to_container(cfg, resolve=True))
        try:
            grid = fixed_grid(cfg, pair, requests, journal) if FIXED in names else {}
            engines = {label(name, grid): engine(cfg, name, pair, best_gamma(grid)) for name in names}
            traces = decode(cfg, engines, requests, cfg.repeats, f"methods, gamma {best_gamma(grid)}", journal)
            results = evaluate(cfg, pair, requests, traces, grid)
            results["resumed"] = journal.resumed
            text = report.page(cfg, results, label(FIXED, grid))
            save(cfg, pair, requests, {**results, "checkpoints": checkpoints}, text, traces)
            journal.remove()
            print(f"\n{text}\n\nsaved in {cfg.out}")
            metrics = results["metrics"]["all"].items()
            logger.log({f"{name}/{key}": value for name, m in metrics for key, value in flat(m)})
            logger.artifact("evaluation", "results", out)
        finally:
            logger.finish()


# Setting up ----------------------------------------------------------------------------------------------------------


def use_thresholds(cfg: DictConfig, pair: ModelPair) -> None:
    """Put tuned thresholds into `cfg.method` where `cfg.thresholds` has some for this run, and say which."""
    overrides = list(HydraConfig.get().overrides.task)
    if cfg.thresholds is None or not ("thresholds" in thresholds.keys(overrides) or Path(cfg.thresholds).is_file()):
        return
    run = {"pair": pair_identity(pair), **{key: instantiate(cfg[key]).to_dict() for key in ("warp", "draft_warp")}}
    found = thresholds.read(Path(cfg.thresholds))
    if other := thresholds.misfit(found, run):
        print(f"thresholds: those of {cfg.thresholds} are for another {other}, left out")
        return
    if thresholds.tuned(cfg, found):
        check_splits(cfg, found["data"], f"thresholds={cfg.thresholds} was tuned")
    print("\n".join(thresholds.apply(cfg, found, overrides, setup_facts(pair))))


def check_splits(cfg: DictConfig, data: Mapping[str, str] | None, where: str) -> None:
    """Refuse test prompts that the harvest `data` has not kept for tests. where: what was made of it."""
    if data and cfg.split != "all":
        refuse_other_shares(data, cfg.splits, where)


def load_requests(cfg: DictConfig, pair: ModelPair) -> list[Request]:
    """`cfg.limit` prompts of the split, evenly spaced."""
    prompts, shares = load_prompts(cfg.dataset), cfg.splits
    return requests_of_split(prompts, pair, cfg.max_new_tokens, cfg.split, shares.calibration, shares.test, cfg.limit)


def open_journal(cfg: DictConfig, names: Sequence[str], pair: ModelPair, requests: Sequence[Request]) -> Journal:
    """Of an interrupted run of exactly these settings, prompts, models, files, devices and versions, or a new one."""
    methods = {name: OmegaConf.to_container(cfg.method[name], resolve=True) for name in names}
    settings = {key: OmegaConf.to_container(cfg[key]) for key in ("warp", "draft_warp")}
    sizes = [cfg.max_new_tokens, cfg.repeats, cfg.seed, list(cfg.gammas) if FIXED in names else []]
    prompts = [[request.dataset, request.prompt_id, request.tokens.tolist()] for request in requests]
    facts = [methods, settings, sizes, prompts, pair_identity(pair), setup_facts(pair), file_hashes(methods)]
    journal = Journal(journal_path(Path(cfg.out), facts))
    if journal.resumed:
        print(f"going on after {journal.resumed} turns of an earlier run ({journal.path}; delete it to start over)")
    return journal


# Measuring -----------------------------------------------------------------------------------------------------------


def fixed_grid(cfg: DictConfig, pair: ModelPair, requests: list[Request], journal: Journal) -> dict[int, float]:
    """Tokens/s of every fixed draft length in one pass of its own, so that the comparison itself stays unbiased."""
    if len(cfg.gammas) == 1:
        return {cfg.gammas[0]: 0.0}
    engines = {str(gamma): engine(cfg, FIXED, pair, gamma) for gamma in cfg.gammas}
    traces = decode(cfg, engines, requests, 1, "fixed gammas", journal)
    return {int(gamma): tokens_per_second(repeats[0]) for gamma, repeats in traces.items()}


def best_gamma(grid: Mapping[int, float]) -> int | None:
    return max(grid, key=lambda gamma: grid[gamma]) if grid else None


def label(name: str, grid: Mapping[int, float]) -> str:
    return f"best fixed gamma ({best_gamma(grid)})" if name == FIXED and grid else name


def decode(
    cfg: DictConfig, engines: dict[str, Engine], requests: list[Request], repeats: int, stage: str, journal: Journal
) -> Traces:
    """Every method on every request, after a warm-up, with a progress bar that counts tokens."""
    tokens, done = 0, sum(len(turn) for key, turn in journal.turns.items() if key.startswith(f"{stage}/"))
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


def evaluate(
    cfg: DictConfig, pair: ModelPair, requests: list[Request], traces: Traces, grid: Mapping[int, float]
) -> dict[str, Any]:
    """Metrics per dataset and method, the evidence for losslessness, and where time went."""
    datasets = sorted({request.dataset for request in requests})
    pooled = {name: [trace for repeat in repeats for trace in repeat] for name, repeats in traces.items()}
    overlaps = {name: found for name, repeats in pooled.items() if (found := measure_overlap(repeats))}
    metrics = {"all": measure_all(traces)}
    if len(datasets) > 1:
        metrics |= {d: measure_all({name: of_dataset(t, d) for name, t in traces.items()}) for d in datasets}
    return {
        "metrics": metrics,
        "fixed_grid": dict(grid),
        "lossless": lossless(cfg, pair, requests, traces),
        "overlap": overlaps,  # of the methods whose models run side by side
        "modelled": modelled(cfg.modelled, pair, [request.tokens for request in requests], pooled, BASELINE),
        "profile": {name: profile(found) for name, found in pooled.items()},
    }


def measure_all(traces: Traces) -> dict[str, Metrics]:
    return {name: measure(t, None if name == BASELINE else traces[BASELINE]) for name, t in traces.items()}


def lossless(cfg: DictConfig, pair: ModelPair, requests: list[Request], traces: Traces) -> list[str]:
    """Greedy: equality with the baseline, and how near a tie each difference is. Sampling: the fixed invariants."""
    everything = [trace for repeats in traces.values() for repeat in repeats for trace in repeat]
    eos_ids = frozenset(pair.eos_ids)
    broken = {f for trace in everything for f in broken_invariants(trace, cfg.max_new_tokens, eos_ids)}
    lines = [f"invariants of a lossless decode: {'; '.join(sorted(broken)) or 'hold'} ({len(everything)} traces)"]
    if cfg.warp.temperature != 0:
        lossy = [name for name in cfg.methods if not is_lossless(cfg.method[name])]
        said = f"NOT lossless for {', '.join(lossy)}" if lossy else "proven lossless"
        return [*lines, f"sampled: the verifier's law is {said} by enumeration (tests/contract)"]
    prompts = [request.tokens for request in requests]
    found = {
        name: [
            difference
            for ours, theirs in zip(repeats, traces[BASELINE], strict=True)
            for difference in greedy_differences(pair.target, prompts, ours, theirs, pair.target.model.dtype)
        ]
        for name, repeats in traces.items()
        if name != BASELINE
    }
    return [*lines, *report.lossless_lines(found, len(requests) * cfg.repeats)]


# Reporting -----------------------------------------------------------------------------------------------------------


def save(
    cfg: DictConfig, pair: ModelPair, requests: list[Request], results: dict[str, Any], text: str, traces: Traces
) -> None:
    """All files or none; an earlier evaluation of the same name is replaced."""
    out = Path(cfg.out)
    metrics = {d: {name: m.to_dict() for name, m in found.items()} for d, found in results["metrics"].items()}
    with replaced_folder(out, MARKER) as folder:
        overlap = {name: asdict(m) for name, m in results["overlap"].items()}
        write_json(folder / MARKER, {**results, "metrics": metrics, "overlap": overlap, "run": run_facts(cfg, pair)})
        (folder / "table.md").write_text(text + "\n", encoding="utf-8")
        for name, repeats in traces.items():
            file = name.split(" (")[0].replace(" ", "-")
            write_traces(folder / f"traces-{file}.jsonl", [t for repeat in repeats for t in repeat])
        everything = [trace for repeats in traces.values() for repeat in repeats for trace in repeat]
        prompts = {vocabulary.prompt_key(r.dataset, r.prompt_id): r.tokens for r in requests}
        vocabulary.write(folder, vocabulary.of_traces(pair.tokenizer, everything, prompts))


def run_facts(cfg: DictConfig, pair: ModelPair) -> dict[str, Any]:
    return {
        "command": shlex.join(["python", "scripts/evaluate.py", *sys.argv[1:]]),
        "config": OmegaConf.to_container(cfg, resolve=True),
        "pair": pair_identity(pair),
        **setup_facts(pair),
        "energy": energy.meter().about,
        "date": time.strftime("%Y-%m-%d"),
    }


def flat(metrics: Metrics) -> list[tuple[str, float]]:
    """Numbers of one method; a spread is logged by its median."""
    values = json.loads(json.dumps(metrics.to_dict()))
    return [(key, v["median"] if isinstance(v, dict) else v) for key, v in values.items() if v is not None]


if __name__ == "__main__":
    main()
