"""Decode real prompts with several methods and compare them: speed, acceptance, losslessness."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from data_gen.prompts import load_prompts
from data_gen.requests import Request, normalised, requests_of_split
from decoding.models.loading import ModelPair, load_pair, pair_identity
from decoding.models.machine import other_machine, setup_facts
from decoding.settings import Pair
from decoding.trace import Trace, write_traces
from evaluation import energy, page, table, token_texts
from evaluation.decode import Plan, Traces, decode, make_ready
from evaluation.journal import Journal, file_hashes, journal_path
from evaluation.lossless import evidence
from evaluation.methods import (
    Method,
    alternatives,
    cautions,
    check_checkpoints,
    check_costs,
    check_splits,
    checkpoint_configs,
    chosen,
    configured,
    engine,
    is_lossless,
    method_names,
    set_keys,
    tuned_elsewhere,
    tuned_methods,
    tuned_names,
)
from evaluation.replay import thresholds
from evaluation.speedup_bound import draft_along
from evaluation.table import tokens_per_second
from evaluation.timeline import priced
from runtime.compatibility import of_earlier
from runtime.errors import UserError
from runtime.files import file_hash, file_name, replaced_folder
from runtime.job import command_line
from runtime.json_files import write_checksummed
from runtime.text import printable

CHOSEN_ON = "calibration"  # the split whose prompts settings are tried on


@dataclass(frozen=True)
class Comparison:
    """methods: by name, the baseline first; checkpoints: what each was trained for, by the key that
    names it; tried: of a method that is not settled yet, the ways to settle it, by what is set;
    tried_on: the prompts for that, none of them of the test split; advice: the `rule` that tuning
    with costs of this machine says to use, and the `file` that says so"""

    methods: dict[str, Method]
    checkpoints: dict[str, dict[str, Any]]
    pair: ModelPair
    requests: list[Request]
    tried: dict[str, dict[str, Method]] = field(default_factory=dict)
    tried_on: list[Request] = field(default_factory=list)
    advice: dict[str, str] | None = None


def prepare(cfg: DictConfig) -> Comparison:
    """Load what `cfg` asks for and settle what can be settled without decoding. What does not fit
    together is refused before anything is decoded (UserError)."""
    overrides = list(HydraConfig.get().overrides.task)
    names = method_names(cfg, overrides)
    checkpoints = {name: checkpoint_configs(cfg, name) for name in names}
    pair = load_pair(Pair.of(cfg.pair))
    for name, trained in checkpoints.items():
        check_checkpoints(cfg, pair, name, trained)
    for warning in check_costs(cfg, pair, names):
        print(warning)
    methods = {name: Method(name, configured(cfg, name)) for name in names}
    tuned, advice = use_thresholds(cfg, pair, names, overrides)
    tried = {
        name: found
        for name in names
        if name not in tuned and (found := alternatives(cfg, name, overrides))
    }
    methods |= tuned
    for method in [*methods.values(), *(one for found in tried.values() for one in found.values())]:
        engine(method, pair)
    pending = any(len(found) > 1 for found in tried.values())
    tried_on = load_requests(cfg, pair, CHOSEN_ON, cfg.tried_prompts) if pending else []
    return Comparison(
        methods,
        {key: of for trained in checkpoints.values() for key, of in trained.items()},
        pair,
        load_requests(cfg, pair, cfg.split, cfg.limit, tried_on),
        tried,
        tried_on,
        advice,
    )


def use_thresholds(
    cfg: DictConfig, pair: ModelPair, names: Sequence[str], overrides: Sequence[str]
) -> tuple[dict[str, Method], dict[str, str] | None]:
    """Return the methods that the file `cfg.thresholds` settles, where there is one and it is of
    this pair and these distributions, and what it advises (`Comparison`). Says which."""
    asked = "thresholds" in set_keys(overrides)
    if cfg.thresholds is None or not (asked or Path(cfg.thresholds).is_file()):
        return {}, None
    found = thresholds.read(Path(cfg.thresholds))
    warps = {key: instantiate(cfg[key]).to_dict() for key in ("warp", "draft_warp")}
    if other := thresholds.misfit(found, {"pair": pair_identity(pair), **warps}):
        other += of_earlier(found["pair"])
        if asked:
            raise UserError(
                f"thresholds: {cfg.thresholds} was tuned for another {other}. Tune this one:"
                " python scripts/tune.py, or use none: thresholds=null"
            )
        print(f"thresholds: those of {cfg.thresholds} are for another {other}, left out")
        return {}, None
    if tuned_names(names, found):
        check_splits(cfg, found["data"], f"thresholds={cfg.thresholds} was tuned")
        if cfg.split == "all":
            print(
                "warning: split=all judges every prompt, those too that thresholds were chosen on"
                f" where the prompts of {found['data']['folder']} are among them. Take other"
                " prompts or split=test"
            )
    tuned, lines = tuned_methods(cfg, names, found, overrides)
    here = setup_facts(pair)
    lines += tuned_elsewhere(cfg, found, overrides, here)
    print("\n".join(map(printable, lines)))
    rule = found["results"]["chosen"]["advice"]
    advises = rule in tuned or rule == thresholds.NO_ADVICE
    if not (advises and found["measured_on"]) or other_machine(found["measured_on"], here):
        return tuned, None
    return tuned, {"rule": rule, "file": str(cfg.thresholds)}


def load_requests(
    cfg: DictConfig, pair: ModelPair, split: str, limit: int | None, besides: Sequence[Request] = ()
) -> list[Request]:
    """`limit` prompts of the split, evenly spaced; of the whole set none with a text of
    `besides`."""
    prompts = load_prompts(cfg.dataset)
    if split == "all":
        aside = {(request.dataset, request.prompt_id) for request in besides}
        texts = {normalised(p.text) for p in prompts if (p.dataset, p.id) in aside}
        prompts = [prompt for prompt in prompts if normalised(prompt.text) not in texts]
    tokens, shares = cfg.max_new_tokens, cfg.splits
    return requests_of_split(prompts, pair, tokens, split, shares, limit, drafted=False)


# The journal --------------------------------------------------------------------------------------


def open_journal(cfg: DictConfig, compared: Comparison) -> Journal[Trace]:
    """Of an interrupted run of exactly these settings, prompts, models, files, devices and
    versions, or a new one."""
    methods = {name: method.to_dict() for name, method in compared.methods.items()}
    tried = {
        name: {label: one.to_dict() for label, one in found.items()}
        for name, found in compared.tried.items()
    }
    facts = [
        methods,
        tried,
        {key: OmegaConf.to_container(cfg[key]) for key in ("warp", "draft_warp")},
        [cfg.max_new_tokens, cfg.repeats, cfg.seed],
        [
            [request.dataset, request.prompt_id, request.tokens.tolist()]
            for request in (*compared.requests, *compared.tried_on)
        ],
        pair_identity(compared.pair),
        setup_facts(compared.pair),
        file_hashes([named_files(method.settings) for method in compared.methods.values()]),
    ]
    journal = Journal(journal_path(Path(cfg.out), facts), Trace)
    if journal.resumed:
        print(
            f"going on after {journal.resumed} turns of an earlier run ({journal.path}; delete it"
            " to start over)"
        )
    return journal


def named_files(settings: DictConfig) -> Any:
    """The settings without the models that `pair_identity` knows, and with the folder of a draft
    that it does not."""
    found: Any = OmegaConf.to_container(settings)
    own = found["engine"]
    models = own.pop("models", {})
    if "assistant" in own:
        own["assistant"] = str(
            Path(own["assistant"] or models.get("assistant") or models["draft"]).expanduser()
        )
    return found


# Decoding -----------------------------------------------------------------------------------------


def settle(
    cfg: DictConfig, compared: Comparison, journal: Journal[Trace]
) -> tuple[dict[str, Method], dict[str, dict[str, float]]]:
    """Try what is to be tried, in passes of their own. Returns all methods as they are compared,
    and tokens/s of what was tried, by method and by what was set."""
    methods, speeds = dict(compared.methods), dict[str, dict[str, float]]()
    for name, tried in compared.tried.items():
        speeds[name] = {}
        if len(tried) > 1:
            engines = {label: engine(one, compared.pair) for label, one in tried.items()}
            plan = Plan(1, cfg.max_new_tokens, cfg.seed)
            traces = decode(engines, compared.tried_on, plan, journal, f"{name}, tried")
            speeds[name] = {label: tokens_per_second(found) for label, found in traces.items()}
        where = f"on {len(compared.tried_on)} prompt(s) of the {CHOSEN_ON} split"
        methods[name] = chosen(tried, speeds[name], where)
    return methods, {name: found for name, found in speeds.items() if found}


def run_facts(cfg: DictConfig, pair: ModelPair) -> dict[str, Any]:
    """What results say of the run that made them."""
    return {
        "command": command_line(),
        "config": OmegaConf.to_container(cfg, resolve=True),
        "pair": pair_identity(pair),
        **setup_facts(pair),
        "energy": energy.meter().about,
        "date": time.strftime("%Y-%m-%d"),
    }


# Made ready before anything is decoded ------------------------------------------------------------


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
        "run": run_facts(cfg, compared.pair),
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
    how = f"Chosen by tuning on other prompts ({advice['file']})"
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
