"""Decode real prompts with several methods and compare them: speed, acceptance, losslessness.

    python scripts/evaluate.py
    python scripts/evaluate.py warp=greedy draft_warp.temperature=0 limit=20
    python scripts/evaluate.py methods=[custom] stop=adaedl verifier=block profile=true
    python scripts/evaluate.py methods=[custom] engine=lookahead

Needs the pair (python scripts/build_pair.py) and, for specdecpp and hrad, their checkpoints (python
train.py). Takes the thresholds of scripts/tune.py where there are some for this pair and these
warps, unless others are given. Writes results.json, table.md, the traces of every method and the
texts of their tokens (token_texts.json) to `out`. An interrupted run goes on when started again.
"""

import runtime.openmp  # noqa: F401  (before torch loads)

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from data_gen.requests import Request
from decoding.models.loading import ModelPair
from decoding.trace import write_traces
from evaluation import tables, token_texts
from evaluation.interleaving import Traces, of_dataset
from evaluation.lossless import broken_invariants, greedy_differences
from evaluation.methods import FIXED, engine, is_lossless
from evaluation.metrics import Metrics, measure, measure_overlap, profile
from evaluation.runner import (
    best_gamma,
    decode,
    fixed_grid,
    label,
    open_journal,
    prepare,
    run_facts,
)
from evaluation.tables import BASELINE
from evaluation.timeline import checked_tables, modelled
from runtime.cli import hydra_script
from runtime.files import checked_folder, only_writer, refuse_foreign, replaced_folder, write_json

MARKER = "results.json"  # what a folder of results is known by


@hydra_script("evaluate")
def main(cfg: DictConfig) -> None:
    """Models and prompts in, tables out."""
    checked_tables(cfg.modelled)
    out = checked_folder("out", cfg.out)
    refuse_foreign(out, MARKER)
    compared = prepare(cfg)
    names, pair, requests = compared.names, compared.pair, compared.requests
    with only_writer(out), open_journal(cfg, compared) as journal:
        logger = instantiate(cfg.logger)
        logger.start("evaluate", OmegaConf.to_container(cfg, resolve=True))
        try:
            grid = fixed_grid(cfg, pair, requests, journal) if FIXED in names else {}
            engines = {
                label(name, grid): engine(cfg, name, pair, best_gamma(grid)) for name in names
            }
            traces = decode(
                cfg, engines, requests, cfg.repeats, f"methods, gamma {best_gamma(grid)}", journal
            )
            results = evaluate(cfg, pair, requests, traces, grid)
            results["resumed"] = journal.resumed
            text = tables.page(cfg, results, label(FIXED, grid))
            save(
                cfg, pair, requests, {**results, "checkpoints": compared.checkpoints}, text, traces
            )
            journal.remove()
            print(f"\n{text}\n\nsaved in {cfg.out}")
            metrics = results["metrics"]["all"].items()
            logger.log({f"{name}/{key}": value for name, m in metrics for key, value in flat(m)})
            logger.artifact("evaluation", "results", out)
        finally:
            logger.finish()


# Measuring ----------------------------------------------------------------------------------------


def evaluate(
    cfg: DictConfig,
    pair: ModelPair,
    requests: list[Request],
    traces: Traces,
    grid: Mapping[int, float],
) -> dict[str, Any]:
    """Metrics per dataset and method, the evidence for losslessness, and where time went."""
    datasets = sorted({request.dataset for request in requests})
    pooled = {
        name: [trace for repeat in repeats for trace in repeat] for name, repeats in traces.items()
    }
    overlaps = {
        name: found for name, repeats in pooled.items() if (found := measure_overlap(repeats))
    }
    metrics = {"all": measure_all(traces)}
    if len(datasets) > 1:
        metrics |= {
            d: measure_all({name: of_dataset(t, d) for name, t in traces.items()}) for d in datasets
        }
    return {
        "metrics": metrics,
        "fixed_grid": dict(grid),
        "lossless": lossless(cfg, pair, requests, traces),
        "overlap": overlaps,  # of the methods whose models run side by side
        "modelled": modelled(
            cfg.modelled, pair, [request.tokens for request in requests], pooled, BASELINE
        ),
        "profile": {name: profile(found) for name, found in pooled.items()},
    }


def measure_all(traces: Traces) -> dict[str, Metrics]:
    return {
        name: measure(t, None if name == BASELINE else traces[BASELINE])
        for name, t in traces.items()
    }


def lossless(
    cfg: DictConfig, pair: ModelPair, requests: list[Request], traces: Traces
) -> list[str]:
    """Greedy: equality with the baseline, and how near a tie each difference is. Sampling: the
    fixed invariants."""
    everything = [trace for repeats in traces.values() for repeat in repeats for trace in repeat]
    eos_ids = frozenset(pair.eos_ids)
    broken = {
        f for trace in everything for f in broken_invariants(trace, cfg.max_new_tokens, eos_ids)
    }
    lines = [
        f"invariants of a lossless decode: {'; '.join(sorted(broken)) or 'hold'} ({len(everything)}"
        " traces)"
    ]
    if cfg.warp.temperature != 0:
        lossy = [name for name in cfg.methods if not is_lossless(cfg.method[name])]
        said = f"NOT lossless for {', '.join(lossy)}" if lossy else "proven lossless"
        return [
            *lines,
            f"sampled: the verifier's distribution is {said} by enumeration (tests/contract)",
        ]
    prompts = [request.tokens for request in requests]
    found = {
        name: [
            difference
            for ours, theirs in zip(repeats, traces[BASELINE], strict=True)
            for difference in greedy_differences(
                pair.target, prompts, ours, theirs, pair.target.model.dtype
            )
        ]
        for name, repeats in traces.items()
        if name != BASELINE
    }
    return [*lines, *tables.lossless_lines(found, len(requests) * cfg.repeats)]


# Reporting ----------------------------------------------------------------------------------------


def save(
    cfg: DictConfig,
    pair: ModelPair,
    requests: list[Request],
    results: dict[str, Any],
    text: str,
    traces: Traces,
) -> None:
    """All files or none; an earlier evaluation of the same name is replaced."""
    out = Path(cfg.out)
    metrics = {
        d: {name: m.to_dict() for name, m in found.items()}
        for d, found in results["metrics"].items()
    }
    with replaced_folder(out, MARKER) as folder:
        overlap = {name: asdict(m) for name, m in results["overlap"].items()}
        write_json(
            folder / MARKER,
            {
                **results,
                "metrics": metrics,
                "overlap": overlap,
                "run": run_facts(cfg, pair, "scripts/evaluate.py"),
            },
        )
        (folder / "table.md").write_text(text + "\n", encoding="utf-8")
        for name, repeats in traces.items():
            file = name.split(" (")[0].replace(" ", "-")
            write_traces(folder / f"traces-{file}.jsonl", [t for repeat in repeats for t in repeat])
        everything = [
            trace for repeats in traces.values() for repeat in repeats for trace in repeat
        ]
        prompts = {token_texts.prompt_key(r.dataset, r.prompt_id): r.tokens for r in requests}
        token_texts.write(folder, token_texts.of_traces(pair.tokenizer, everything, prompts))


def flat(metrics: Metrics) -> list[tuple[str, float]]:
    """Numbers of one method; a spread is logged by its median."""
    values = json.loads(json.dumps(metrics.to_dict()))
    return [
        (key, v["median"] if isinstance(v, dict) else v)
        for key, v in values.items()
        if v is not None
    ]


if __name__ == "__main__":
    main()
