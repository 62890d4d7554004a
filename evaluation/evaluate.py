"""Decode real prompts with several methods and compare them: speed, acceptance, losslessness."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from data_gen.prompts import load_prompts
from data_gen.requests import Request, following, identifying, kept_before, requests_of_split
from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.models.loading import ModelPair, load_pair, pair_identity
from decoding.models.machine import setup_facts
from decoding.sampling import Sampler, Warp
from decoding.settings import Pair
from decoding.trace import STAGES, Trace, write_traces
from evaluation import page, spec_bench, table, token_texts
from evaluation.decode import (
    Engine,
    Journal,
    Plan,
    Stage,
    Traces,
    decode,
    file_hashes,
    journal_path,
    make_ready,
    request_seed,
)
from evaluation.lossless import evidence
from evaluation.methods import (
    Method,
    alternatives,
    cautions,
    check_checkpoints,
    check_costs,
    checkpoint_configs,
    chosen,
    configured,
    engine,
    method_names,
    use_thresholds,
)
from evaluation.speedup_bound import draft_along
from evaluation.timeline import priced
from runtime.errors import UserError
from runtime.files import (
    checked_folder,
    file_hash,
    file_name,
    only_writer,
    refuse_foreign,
    replaced_folder,
)
from runtime.job import as_called, command_line
from runtime.json_files import write_checksummed
from runtime.text import plural
from runtime.tracking import tracked
from runtime.workers import Workers

CHOSEN_ON = "calibration"  # the split whose prompts settings are tried on
MARKER = "results.json"  # marks a folder of results


@dataclass(frozen=True)
class Comparison:
    """The parts of a comparison. methods: by name, the baseline first; checkpoints: the config of
    each, by the key that names it; tried: for a method whose settings are still to be chosen, its
    alternatives, by the settings; tried_on: the prompts for that choice, none of the test split;
    advice: the `rule` that tuning with costs of this machine advises, and the `file` with it;
    thresholds: the file that methods have theirs from"""

    methods: dict[str, Method]
    checkpoints: dict[str, dict[str, Any]]
    pair: ModelPair
    requests: list[Request]
    tried: dict[str, dict[str, Method]]
    tried_on: list[Request]
    advice: dict[str, str] | None
    thresholds: Path | None


def evaluate(cfg: DictConfig, around: Callable[[Engine], Engine] | None = None) -> None:
    """Decode, compare, print and save, as scripts/evaluate.py says.

    around: wraps every engine that is compared, to add further data to its traces"""
    out = checked_folder("out", cfg.out)
    refuse_foreign(out, MARKER)
    if around is not None and instantiate(cfg.workers).remote:
        raise UserError("workers: energy is counted in this process alone. Leave workers=... away")
    if around is not None and cfg.batch > 1:
        raise UserError("batch: energy is counted of one request at a time. Leave batch away")
    compared = prepare(cfg)
    with only_writer(out), open_journal(cfg, compared, around is not None) as journal:
        config: Any = OmegaConf.to_container(cfg, resolve=True)
        with tracked(cfg.logger, "evaluate", config, [config], list(compared.methods)) as logger:
            for key, trained in compared.checkpoints.items():
                logger.used(trained["predictor"], "predictor", Path(OmegaConf.select(cfg, key)))
            if compared.thresholds is not None:
                logger.used("thresholds", "thresholds", compared.thresholds)
            results, traces, measurements = compare(cfg, compared, journal, around)
            lines = page.answer_of(results, measurements, compared.advice)
            whole = page.page(cfg, results, lines)
            every = [trace for decoded in traces.values() for trace in decoded]
            prompts = {(one.dataset, one.prompt_id): one.tokens for one in compared.requests}
            texts = token_texts.of_traces(compared.pair.tokenizer, every, prompts)
            with replaced_folder(out, MARKER) as folder:  # all files or none
                table.save(measurements, folder / table.FILE)
                sha256 = {table.FILE: file_hash(folder / table.FILE)}
                write_checksummed(folder / MARKER, {**results, "sha256": sha256})
                (folder / "table.md").write_text(whole + "\n", encoding="utf-8")
                for name, decoded in traces.items():
                    write_traces(folder / f"traces-{file_name(name)}.jsonl", decoded)
                token_texts.write(folder, texts)
                spec_bench.write(folder / spec_bench.FOLDER, traces, compared.pair)
            journal.remove()
            shown = whole if cfg.verbose else page.page(cfg, results, lines, whole=False)
            saved = (
                f"saved in {cfg.out}: table.md (everything; verbose=true prints it), {table.FILE}"
                f" (pandas) and {MARKER}\nnext: python scripts/report.py run={cfg.out}"
            )
            print(as_called(f"\n{shown}\n\n{saved}"))
            logger.log(
                {
                    f"{name}/{figure}": estimate.value
                    for name, row in results["summary"][table.ALL].items()
                    for figure, estimate in row.items()
                }
            )
            logger.artifact("evaluation", "results", out)


def prepare(cfg: DictConfig) -> Comparison:
    """Load the parts that `cfg` asks for and settle all that can be settled without decoding.
    Raises UserError for parts that do not fit together."""
    overrides = list(HydraConfig.get().overrides.task)
    names = method_names(cfg, overrides)
    checkpoints = {name: checkpoint_configs(cfg, name) for name in names}
    pair = load_pair(Pair.of(cfg.pair))
    for name, trained in checkpoints.items():
        check_checkpoints(cfg, pair, name, trained)
    for warning in check_costs(cfg, pair, names):
        print(as_called(warning))
    methods = {name: Method(name, configured(cfg, name)) for name in names}
    tuned, advice = use_thresholds(cfg, pair, names, overrides)
    methods |= tuned
    tried = {name: alternatives(cfg, name, overrides) for name in names if name not in tuned}
    tried = {name: ways for name, ways in tried.items() if ways}
    for method in [*methods.values(), *(one for ways in tried.values() for one in ways.values())]:
        engine(method, pair)
    pending = any(len(ways) > 1 for ways in tried.values())
    keep = cfg.keep_caches and cfg.batch == 1
    tried_on = load_requests(cfg, pair, CHOSEN_ON, cfg.tried_prompts, keep) if pending else []
    requests = load_requests(cfg, pair, cfg.split, cfg.limit, keep, tried_on)
    read = {key: config for trained in checkpoints.values() for key, config in trained.items()}
    file = Path(cfg.thresholds) if tuned else None
    return Comparison(methods, read, pair, requests, tried, tried_on, advice, file)


def load_requests(
    cfg: DictConfig,
    pair: ModelPair,
    split: str,
    limit: int | None,
    keep: bool = False,
    besides: Sequence[Request] = (),
) -> list[Request]:
    """Return `limit` prompts of the split, evenly spaced; if that is the whole set, without those
    whose text is in `besides`. Conversations are asked turn by turn. keep: as in `turn_by_turn`"""
    prompts = load_prompts(cfg.dataset)
    if split == "all":
        aside = {(request.dataset, request.prompt_id) for request in besides}
        texts = {identifying(p) for p in prompts if (p.dataset, p.id) in aside}
        prompts = [prompt for prompt in prompts if identifying(prompt) not in texts]
    tokens, shares = cfg.max_new_tokens, cfg.splits
    found = requests_of_split(prompts, pair, tokens, split, shares, limit, drafted=False)
    return turn_by_turn(found, pair, instantiate(cfg.warp), tokens, cfg.seed, keep)


def turns_left_out(requests: Sequence[Request]) -> int:
    """Return how many turns of conversations were not asked, since they do not fit."""
    asked = {(request.dataset, request.prompt_id) for request in requests}
    return sum((each.dataset, name) not in asked for each in requests for name in each.ids[1:2])


def turn_by_turn(
    requests: Sequence[Request], pair: ModelPair, warp: Warp, most: int, seed: int, keep: bool
) -> list[Request]:
    """Return the requests of every turn of conversations. What has no answer in the dataset the
    target answers here, by plain decoding, in at most `most` tokens: all methods are asked the
    same.

    keep: whether a turn begins with the caches of the one before"""
    asked = list[Request]()
    engine = AutoregressiveEngine(pair, warp, frozenset(pair.eos_ids))
    answers = sum(len(request.ids) - 1 for request in requests)
    with tqdm(total=answers, desc="answering", unit=" turns", disable=not answers or None) as bar:
        for first in requests:
            assert first.prompt is not None
            kept = kept_before(first.prompt, first.tokens, pair.tokenizer)
            turn: Request | None = replace(first, kept=kept)
            while turn is not None:
                asked.append(turn if keep else replace(turn, kept=0))
                if turn.ids == [turn.prompt_id]:
                    break
                sampler = Sampler.seeded(request_seed(seed, turn, 0))
                said = engine.decode(turn.tokens, most, sampler).tokens
                turn = following(turn, said, pair, pair.target.max_length - most)
                bar.update()
    return asked


# The journal --------------------------------------------------------------------------------------


def open_journal(cfg: DictConfig, compared: Comparison, more: bool) -> Journal[Trace]:
    """Return the journal of an interrupted run of exactly these settings, prompts, models, files,
    devices and versions, or a new one.

    more: whether its traces hold further data, such as joules"""
    methods = {name: method.to_dict() for name, method in compared.methods.items()}
    tried = {
        name: {label: one.to_dict() for label, one in ways.items()}
        for name, ways in compared.tried.items()
    }
    facts = [
        methods,
        tried,
        {key: OmegaConf.to_container(cfg[key]) for key in ("warp", "draft_warp")},
        [cfg.max_new_tokens, cfg.repeats, cfg.seed, cfg.batch, more],
        [
            [each.dataset, each.category, each.prompt_id, each.tokens.tolist(), each.kept]
            for each in (*compared.requests, *compared.tried_on)
        ],
        pair_identity(compared.pair),
        setup_facts(compared.pair),
        file_hashes([named_files(method.settings) for method in compared.methods.values()]),
    ]
    journal = Journal(journal_path(Path(cfg.out), facts), Trace)
    if journal.resumed:
        print(
            f"going on after {plural(journal.resumed, 'turn')} of an earlier run ({journal.path};"
            " delete it to start over)"
        )
    return journal


def named_files(settings: DictConfig) -> Any:
    """Return the settings without the models that `pair_identity` covers, but with the folder of a
    draft that it does not cover."""
    named: Any = OmegaConf.to_container(settings)
    of_engine = named["engine"]
    models = of_engine.pop("models", {})
    if "assistant" in of_engine:
        folder = of_engine["assistant"] or models.get("assistant") or models["draft"]
        of_engine["assistant"] = str(Path(folder).expanduser())
    return named


# Decoding -----------------------------------------------------------------------------------------


def settle(
    cfg: DictConfig, compared: Comparison, journal: Journal[Trace]
) -> tuple[dict[str, Method], dict[str, dict[str, float]]]:
    """Try the alternative settings of methods, each in a separate pass. Return all methods as they
    are compared, and tokens/s of the alternatives, by method and settings."""
    methods, speeds = dict(compared.methods), dict[str, dict[str, float]]()
    plan = Plan(1, cfg.max_new_tokens, cfg.seed)
    for name, ways in compared.tried.items():
        if len(ways) > 1:
            engines = {label: engine(one, compared.pair) for label, one in ways.items()}
            make, workers = making(cfg, ways, engines, compared.tried_on)
            stage = Stage(f"trying {name}", make, compared.tried_on, plan, workers, cfg.batch)
            traces = decode(stage, journal)
            speeds[name] = {
                label: table.tokens_per_second(decoded) for label, decoded in traces.items()
            }
        where = f"on {plural(len(compared.tried_on), f'{CHOSEN_ON} prompt')}"
        methods[name] = chosen(ways, speeds.get(name, {}), where)
    return methods, speeds


def making(
    cfg: DictConfig,
    methods: Mapping[str, Method],
    engines: Mapping[str, Engine],
    requests: Sequence[Request],
) -> tuple[Callable[[], Mapping[str, Engine]], Workers]:
    """Return the workers, and what makes the engines in each: this process has `engines`."""
    workers: Workers = instantiate(cfg.workers)
    if not workers.remote:
        return lambda: engines, workers
    kept = {name: methods[name] for name in engines}
    files, longest = Pair.of(cfg.pair), cfg.max_new_tokens
    return partial(engines_elsewhere, files, kept, requests, longest), workers


def engines_elsewhere(
    files: Pair, methods: Mapping[str, Method], requests: Sequence[Request], max_new_tokens: int
) -> dict[str, Engine]:
    """Load the pair in another process, and make the engines."""
    pair = load_pair(files)
    engines = {name: engine(method, pair) for name, method in methods.items()}
    make_ready(engines, requests, max_new_tokens)
    return engines


def compare(
    cfg: DictConfig,
    compared: Comparison,
    journal: Journal[Trace],
    around: Callable[[Engine], Engine] | None = None,
) -> tuple[dict[str, Any], Traces, pd.DataFrame]:
    """Settle, decode and measure. Return the content of results.json, the traces and the table of
    measurements."""
    methods, tried = settle(cfg, compared, journal)
    engines = {name: engine(method, compared.pair) for name, method in methods.items()}
    if around is not None:
        engines = {name: around(each) for name, each in engines.items()}
    print("".join(f"{line}\n" for line in cautions(methods, engines)), end="")
    left_out = make_ready(engines, compared.requests, cfg.max_new_tokens)
    engines = {name: each for name, each in engines.items() if name not in left_out}
    notes = [f"{name} {methods[name].note}" for name in compared.tried]
    stage = ": ".join(["decoding", *notes, *(f"without {name}" for name in left_out)])
    plan = Plan(cfg.repeats, cfg.max_new_tokens, cfg.seed)
    make, workers = making(cfg, methods, engines, compared.requests)
    whole = Stage(stage, make, compared.requests, plan, workers, cfg.batch)
    traces = decode(whole, journal)
    prompts = [request.tokens for request in compared.requests]
    measurements = priced(table.timed(traces), traces, cfg.modelled, compared.pair, prompts)
    if cfg.batch > 1:  # what is decoded at once is one observation
        groups = [f"group {number}" for number, turn in enumerate(whole.turns, 1) for _ in turn]
        places = measurements.groupby("policy", sort=False).cumcount() % len(prompts)
        measurements["prompt"] = [groups[place] for place in places]
        category = measurements.groupby("prompt")["category"]
        one = category.transform("nunique") == 1
        measurements["category"] = category.transform("first").where(one, "")
        measurements[[f"{stage}_seconds" for stage in (*STAGES, "overhead")]] = np.nan
    speeds = table.compare(measurements)
    decoded = {
        what: [name for name in names if name in speeds] for what, names in cfg.against.items()
    }
    against = {
        what: max(names, key=lambda name: speeds[name].value)
        for what, names in decoded.items()
        if names
    }
    draft = None
    if cfg.bound:
        plain = traces[table.BASELINE][: len(prompts)]
        p_warp, q_warp = instantiate(cfg.warp), instantiate(cfg.draft_warp)
        draft = draft_along(compared.pair, prompts, plain, p_warp, q_warp, cfg.longest_draft)
    recorded = [name for name, each in engines.items() if each.records_drafts]
    verifiers = {
        name: instantiate(methods[name].settings.verifier)
        for name in traces
        if "verifier" in methods[name].settings  # an engine without one to choose is lossless
    }
    lossy = [name for name, verifier in verifiers.items() if not verifier.lossless]
    warp = instantiate(cfg.warp)
    parts = table.by_dataset(measurements)
    tasks = {figure: table.RATIOS[figure] for figure in page.TASKS}
    results = {
        "methods": {name: method.to_dict() for name, method in methods.items()},
        "summary": {
            name: table.summary(part, set(against.values())) for name, part in parts.items()
        },
        "prompts": {name: table.count_prompts(part) for name, part in parts.items()},
        "categories": {
            dataset: {
                name: {
                    "prompts": table.count_prompts(part),
                    "summary": table.summary(part, figures=tasks),
                }
                for name, part in categories.items()
            }
            for dataset, categories in table.by_category(measurements).items()
        },
        "positions": {
            str(name): {
                **{below: table.by_position(rows, below) for below in page.POSITIONS},
                "judged": table.listed(rows, "judged_at").sum().astype(int).tolist(),
            }
            for name, rows in measurements.groupby("policy", sort=False)
        },
        "requests": {name: len(each) for name, each in traces.items()},
        "against": against,
        "tried": tried,
        "left_out": left_out,
        "lossless": evidence(
            compared.pair, prompts, traces, lossy, recorded, cfg.max_new_tokens, warp
        ),
        "resumed": journal.resumed,
        "kept": sum(request.kept for request in compared.requests),
        "turns_left_out": turns_left_out(compared.requests),
        "run": run_facts(cfg, compared.pair),
        "checkpoints": compared.checkpoints,
        "draft": draft,
    }
    return results, traces, measurements


def run_facts(cfg: DictConfig, pair: ModelPair) -> dict[str, Any]:
    """Return the facts about a run that its results record."""
    return {
        "command": command_line(),
        "config": OmegaConf.to_container(cfg, resolve=True),
        "pair": pair_identity(pair),
        **setup_facts(pair),
        "date": time.strftime("%Y-%m-%d"),
    }
