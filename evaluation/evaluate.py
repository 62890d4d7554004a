"""Decode real prompts with several methods and compare them: speed, acceptance, losslessness."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from hydra.utils import instantiate
from omegaconf import DictConfig

from decoding.trace import Trace, write_traces
from evaluation import page, table, token_texts
from evaluation.choices import cautions
from evaluation.decode import Plan, Traces, decode, make_ready
from evaluation.journal import Journal
from evaluation.lossless import evidence
from evaluation.methods import Method, engine, is_lossless
from evaluation.runner import Comparison, run_facts, settle
from evaluation.speedup_bound import draft_along
from evaluation.timeline import priced
from runtime.files import file_hash, file_name, replaced_folder
from runtime.json_files import write_checksummed

MARKER = "results.json"  # what a folder of results is known by


def compare(
    cfg: DictConfig, compared: Comparison, journal: Journal[Trace]
) -> tuple[dict[str, Method], dict[str, Any], Traces, pd.DataFrame]:
    """Settle, decode and measure. Returns the methods, what results.json says, the traces and the
    table of measurements."""
    methods, tried = settle(cfg, compared, journal)
    engines = {name: engine(method, compared.pair) for name, method in methods.items()}
    print("".join(f"{line}\n" for line in cautions(methods, engines)), end="")
    left_out = make_ready(engines, compared.requests, cfg.max_new_tokens)
    engines = {name: one for name, one in engines.items() if name not in left_out}
    notes = [f"{name} {methods[name].note}" for name in compared.tried]
    stage = ": ".join(["methods", *notes, *(f"without {name}" for name in left_out)])
    plan = Plan(cfg.repeats, cfg.max_new_tokens, cfg.seed)
    traces = decode(engines, compared.requests, plan, journal, stage)
    prompts = [request.tokens for request in compared.requests]
    measurements = priced(table.timed(traces), traces, cfg.modelled, compared.pair, prompts)
    against = fastest(measurements, cfg.against)
    recorded = [name for name, one in engines.items() if getattr(one, "records_drafts", True)]
    lossy = [name for name, one in methods.items() if name in traces and not is_lossless(one)]
    greedy = cfg.warp.temperature == 0
    parts = table.by_dataset(measurements)
    results = {
        "methods": {name: method.to_dict() for name, method in methods.items()},
        "summary": {
            name: table.summary(part, set(against.values())) for name, part in parts.items()
        },
        "prompts": {name: table.count_prompts(part) for name, part in parts.items()},
        "requests": {name: len(decoded) for name, decoded in traces.items()},
        "against": against,
        "tried": tried,
        "left_out": left_out,
        "lossless": evidence(
            compared.pair, prompts, traces, lossy, recorded, cfg.max_new_tokens, greedy
        ),
        "resumed": journal.resumed,
        "run": run_facts(cfg, compared.pair, "scripts/evaluate.py"),
        "checkpoints": compared.checkpoints,
        "draft": bound(cfg, compared, traces) if cfg.bound else None,
    }
    return methods, results, traces, measurements


def fastest(measurements: pd.DataFrame, against: Mapping[str, Any]) -> dict[str, str]:
    """Return the method that each of `against` stands for: the fastest of those that were decoded.
    What none was decoded of is left out."""
    speeds = table.compare(measurements)
    decoded = {what: [name for name in names if name in speeds] for what, names in against.items()}
    return {
        what: max(names, key=lambda name: speeds[name].value)
        for what, names in decoded.items()
        if names
    }


def bound(cfg: DictConfig, compared: Comparison, traces: Traces) -> dict[str, Any]:
    """Return how the draft matches the target along plain decoding, and what that allows."""
    requests = compared.requests
    plain = traces[table.BASELINE][: len(requests)]
    prompts = [request.tokens for request in requests]
    warp, draft_warp = instantiate(cfg.warp), instantiate(cfg.draft_warp)
    return draft_along(compared.pair, prompts, plain, warp, draft_warp, cfg.longest_draft)


def answer(
    methods: Mapping[str, Method], measurements: pd.DataFrame, advice: Mapping[str, str] | None
) -> list[str]:
    """Return two lines on what to use. advice: what tuning says, and where."""
    labels = {name: page.labelled(name, one.to_dict()["settings"]) for name, one in methods.items()}
    drafting = [name for name, method in methods.items() if method.speculates]
    if advice is None:
        return page.answer(measurements, labels, drafting)
    how = f"chosen by tuning on other prompts ({advice['file']})"
    return page.answer(measurements, labels, drafting, advice["rule"], how)


def save(
    cfg: DictConfig,
    compared: Comparison,
    results: Mapping[str, Any],
    whole: str,
    traces: Traces,
    measurements: pd.DataFrame,
) -> None:
    """Write all files or none; an earlier evaluation of the same name is replaced."""
    prompts = {(one.dataset, one.prompt_id): one.tokens for one in compared.requests}
    with replaced_folder(Path(cfg.out), MARKER) as folder:
        table.save(measurements, folder / table.FILE)
        sha256 = {table.FILE: file_hash(folder / table.FILE)}
        write_checksummed(folder / MARKER, {**results, "sha256": sha256})
        (folder / "table.md").write_text(whole + "\n", encoding="utf-8")
        for name, decoded in traces.items():
            write_traces(folder / f"traces-{file_name(name)}.jsonl", decoded)
        every = [trace for decoded in traces.values() for trace in decoded]
        token_texts.write(folder, token_texts.of_traces(compared.pair.tokenizer, every, prompts))


def logged(results: Mapping[str, Any]) -> dict[str, float]:
    """Return every figure of every method on all prompts, by one name each."""
    return {
        f"{name}/{figure}": estimate.value
        for name, row in results["summary"][table.ALL].items()
        for figure, estimate in row.items()
    }


def saved(cfg: DictConfig) -> str:
    return (
        f"saved in {cfg.out}: table.md (everything; verbose=true prints it), {table.FILE} (pandas)"
        f" and {MARKER}; python scripts/report.py run={cfg.out} draws it"
    )
