"""Decode real prompts with several methods and compare them: speed, acceptance, losslessness."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from decoding.trace import Trace, write_traces
from evaluation import results, tables, token_texts
from evaluation.choices import cautions
from evaluation.interleaving import Traces, make_ready
from evaluation.journal import Journal
from evaluation.methods import engine
from evaluation.metrics import Metrics
from evaluation.paired import page as paired_page
from evaluation.paired.comparison import against_of
from evaluation.runner import Comparison, decode, run_facts, settle
from runtime.files import file_name, replaced_folder
from runtime.json_files import write_checksummed

MARKER = "results.json"  # what a folder of results is known by
PAGES = {"table": tables.page, "paired": paired_page.page}


def compare(
    cfg: DictConfig, compared: Comparison, journal: Journal[Trace]
) -> tuple[dict[str, Any], Traces]:
    """Settle, decode and measure. Returns what results.json says, and the traces."""
    methods, tried = settle(cfg, compared, journal)
    engines = {name: engine(method, compared.pair) for name, method in methods.items()}
    print("".join(f"{line}\n" for line in cautions(methods, engines)), end="")
    left_out = make_ready(engines, compared.requests, cfg.max_new_tokens)
    engines = {name: one for name, one in engines.items() if name not in left_out}
    notes = [f"{name} {methods[name].note}" for name in compared.tried]
    stage = ": ".join(["methods", *notes, *(f"without {name}" for name in left_out)])
    traces = decode(cfg, engines, compared.requests, cfg.repeats, journal, stage)
    ours = {name for name, one in engines.items() if results.records_drafts(one)}
    found = {
        "methods": {name: method.to_dict() for name, method in methods.items()},
        **results.found_in(cfg, compared, traces),
        "against": against_of(cfg.against, traces),
        "tried": tried,
        "left_out": left_out,
        "lossless": results.lossless(cfg, compared, traces, methods, ours),
        "resumed": journal.resumed,
        "run": run_facts(cfg, compared.pair, "scripts/evaluate.py"),
        "checkpoints": compared.checkpoints,
    }
    if cfg.presentation == "paired":
        found |= paired_page.paired(cfg, compared, traces, ours)
    return found, traces


def save(
    cfg: DictConfig, compared: Comparison, found: Mapping[str, Any], text: str, traces: Traces
) -> None:
    """All files or none; an earlier evaluation of the same name is replaced."""
    everything = results.pooled(traces)
    prompts = {(one.dataset, one.prompt_id): one.tokens for one in compared.requests}
    with replaced_folder(Path(cfg.out), MARKER) as folder:
        write_checksummed(folder / MARKER, plainly(found))
        (folder / "table.md").write_text(text + "\n", encoding="utf-8")
        for name, of in everything.items():
            write_traces(folder / f"traces-{file_name(name)}.jsonl", of)
        said = [trace for of in everything.values() for trace in of]
        token_texts.write(folder, token_texts.of_traces(compared.pair.tokenizer, said, prompts))


def plainly(found: Any) -> Any:
    """As JSON has it: dataclasses as mappings."""
    if hasattr(found, "__dataclass_fields__"):
        return asdict(found)
    if isinstance(found, Mapping):
        return {key: plainly(value) for key, value in found.items()}
    return found


def flat(metrics: Mapping[str, Metrics]) -> dict[str, float]:
    """Numbers of every method; a spread is logged by its median."""
    return {
        f"{name}/{key}": value["median"] if isinstance(value, dict) else value
        for name, of in metrics.items()
        for key, value in json.loads(json.dumps(of.to_dict())).items()
        if value is not None
    }
