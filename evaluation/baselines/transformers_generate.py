"""Our decoding methods against `generate` of transformers: plain, compiled, assisted, with prompt
lookup.

Everything runs in one process on the same prompts, dtype, warp, ends of a response and number of
tokens; on each prompt the methods take turns. The models of transformers are loaded apart from
ours, as `from_pretrained` gives them, and the assistant keeps its whole vocabulary."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from transformers import PreTrainedModel

from data_gen.requests import Request, spread
from decoding.models.loading import ModelPair, load_plain
from decoding.models.machine import in_words, setup_facts
from evaluation import tables
from evaluation.baselines.generate_engine import GenerateEngine, compiled_settings, not_compiled
from evaluation.interleaving import Engine, Traces, of_dataset
from evaluation.journal import file_hashes
from evaluation.lossless import greedy_differences
from evaluation.methods import FIXED, engine
from evaluation.paired_comparison import fastest, paired_comparisons, paired_table
from evaluation.runner import (
    best_gamma,
    decode,
    fixed_grid,
    label,
    one_pass,
    open_journal,
    prepare,
    run_facts,
)
from evaluation.speedup_bound import match, speedup_bound
from evaluation.tables import BASELINE
from evaluation.timeline import COST_ROWS, measured_devices
from runtime.errors import UserError, checked_count, is_count
from runtime.files import checked_folder, only_writer, refuse_foreign, replaced_folder, write_json

MARKER = "decode.json"  # what a folder of results is known by
THEIRS = "transformers "  # what the names of its methods begin with
GENERATE = f"{THEIRS}generate"
Settings = dict[str, Any]
"""Of a GenerationConfig, whether there is an assistant, and whether the forward is compiled."""


def benchmark_decode(cfg: DictConfig) -> str:
    """Measure, save in `cfg.out`, and say what was found. Raises UserError for settings that cannot
    work."""
    out = checked_folder("out", cfg.out)
    refuse_foreign(out, MARKER)
    for key in ("tried_prompts", "longest_draft"):
        checked_count(key, cfg[key])
    asked = generate_settings(cfg)
    compared = prepare(cfg)
    pair, requests = compared.pair, compared.requests
    assistant = assistant_of(cfg, pair)
    theirs = generate_engines(cfg, pair, asked, assistant, longest_request(cfg, requests))
    shortest = min((request.tokens for request in requests), key=len)
    left_out = without_compiled(
        theirs, [name for name, found in asked.items() if "compile" in found[0]], shortest
    )
    assistant_files = file_hashes(None if assistant is None else str(Path(assistant).expanduser()))
    settings = [asked, sorted(left_out), cfg.tried_prompts, assistant, assistant_files]
    with only_writer(out), open_journal(cfg, compared, *settings) as journal:
        tried = spread(requests, cfg.tried_prompts)
        grid = fixed_grid(cfg, pair, tried, journal) if FIXED in compared.names else {}
        ours = {
            label(name, grid): engine(cfg, name, pair, best_gamma(grid)) for name in compared.names
        }
        best: dict[str, Engine] = {}
        tries = {FIXED: {str(gamma): speed for gamma, speed in grid.items()}}
        for name, found in theirs.items():
            if len(found) > 1:
                tries[name] = one_pass(cfg, found, tried, name, journal)
            chosen = (
                max(found, key=lambda one: tries[name][one])
                if len(found) > 1
                else next(iter(found))
            )
            best[chosen] = found[chosen]
        engines = ours | best
        stage = ", ".join(
            ["methods", *(name for name in engines if name.endswith(")"))]
        )  # and what was chosen
        turns = {name: engines[name] for name in alternating(list(ours), list(best))}
        decoded = decode(cfg, turns, requests, cfg.repeats, stage, journal)
        traces = {name: decoded[name] for name in engines}
        results: dict[str, Any] = {
            "methods": {
                dataset: paired_comparison(found, list(ours))
                for dataset, found in by_dataset(traces).items()
            },
            "draft": draft_of(cfg, pair, requests, traces),
            "tries": tries,
            "left_out": left_out,
            "lossless": lossless(cfg, pair, requests, traces),
            "resumed": journal.resumed,
        }
        text = page(cfg, pair, results)
        facts = {"prompts": of_prompts(traces), "run": run_facts(cfg, pair, "scripts/benchmark.py")}
        with replaced_folder(out, MARKER) as folder:
            write_json(
                folder / MARKER, {**results, "methods": plainly(results["methods"]), **facts}
            )
            (folder / "table.md").write_text(text + "\n", encoding="utf-8")
        journal.remove()
    return f"\n{text}\n\nsaved in {cfg.out}"


def alternating(ours: Sequence[str], theirs: Sequence[str]) -> list[str]:
    """One of each as long as there are: what disturbs the machine for a while then hits both
    sides."""
    both = [name for pair in zip(ours, theirs, strict=False) for name in pair]
    return [*both, *ours[len(theirs) :], *theirs[len(ours) :]]


# Methods of transformers --------------------------------------------------------------------------


SCHEDULES = ("constant", "heuristic", "heuristic_transient")
ALLOWED: dict[
    str, Callable[[Any], bool]
] = {  # transformers itself checks none of them but the last
    "assistant": lambda value: isinstance(value, bool),
    "compile": lambda value: value is True,
    "num_assistant_tokens": is_count,
    "num_assistant_tokens_schedule": lambda value: value in SCHEDULES,
    "assistant_confidence_threshold": (
        lambda value: type(value) in (int, float) and 0 <= value <= 1
    ),
    "prompt_lookup_num_tokens": is_count,
    "max_matching_ngram_size": is_count,
    "cache_implementation": lambda value: isinstance(value, str),
}


def generate_settings(cfg: DictConfig) -> dict[str, list[Settings]]:
    """By method, the settings to choose from: every combination where some are lists. Raises
    UserError for none, for what `ALLOWED` does not allow, and where plain generation, which all are
    compared with, is left out or changed."""
    asked = cfg.transformers
    given: Any = OmegaConf.to_container(asked, resolve=True) if OmegaConf.is_dict(asked) else {}
    if given.get("generate") != {}:
        raise UserError(
            "transformers.generate: plain generation is what all is compared with. Leave it as {}"
        )
    found = {}
    for name, settings in given.items():
        if not isinstance(settings, dict):
            raise UserError(
                f"transformers.{name}: {settings} are no settings. Write e.g."
                " {prompt_lookup_num_tokens: 5}"
            )
        values = {
            key: value if isinstance(value, list) else [value] for key, value in settings.items()
        }
        for key, choices in values.items():
            if key not in ALLOWED:
                raise UserError(
                    f"transformers.{name}.{key}: it is no setting of this comparison. Use"
                    f" {', '.join(ALLOWED)}"
                )
            if not (choices and all(map(ALLOWED[key], choices))):
                raise UserError(
                    f"transformers.{name}.{key}: {settings[key]} cannot be. See conf/benchmark.yaml"
                )
        if "compile" in values and len(values) > 1:
            raise UserError(
                f"transformers.{name}.compile: it goes with no other setting. Write {{compile:"
                " true}"
            )
        found[name] = [
            dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())
        ]
    return found


def assistant_of(cfg: DictConfig, pair: ModelPair) -> str | None:
    """Folder or hub id of the draft model of assisted generation; None: it is `pair.draft`. Raises
    UserError where that reads its target and there is no other."""
    if cfg.assistant is not None and not isinstance(cfg.assistant, str):
        raise UserError(
            f"assistant: {cfg.assistant} is no model. Write assistant=<folder or hub id>, or null"
        )
    if cfg.assistant is not None or not pair.draft.reads_target:
        return cfg.assistant
    if (ordinary := cfg.pair.get("assistant")) is None:
        raise UserError(
            "assistant: pair.draft is an EAGLE-style draft that reads its target's hidden states,"
            " which transformers cannot use. Give an ordinary draft: assistant=<folder or hub id>"
        )
    return str(ordinary)


def generate_engines(
    cfg: DictConfig,
    pair: ModelPair,
    asked: Mapping[str, Sequence[Settings]],
    assistant: str | None,
    longest: int,
) -> dict[str, dict[str, GenerateEngine]]:
    """By method and name of the choice. longest: tokens of a request, which a compiled one has room
    for. Raises UserError for settings that transformers refuses."""
    target, draft = load_plain("target", cfg.pair).eval(), load_assistant(cfg, assistant).eval()
    sizes = [model.config.get_text_config().vocab_size for model in (draft, target)]
    if sizes[0] != sizes[1] and any(
        settings.get("assistant") for choices in asked.values() for settings in choices
    ):
        raise UserError(
            f"assistant: it has {sizes[0]} tokens, the target {sizes[1]}; transformers wants as"
            " many. Give another, or leave out what needs one, e.g. ~transformers.assisted"
        )
    warp, eos_ids = instantiate(cfg.warp), frozenset(pair.eos_ids)
    found: dict[str, dict[str, GenerateEngine]] = {}
    for name, choices in asked.items():
        varied = [
            key for key in choices[0] if len({str(settings[key]) for settings in choices}) > 1
        ]
        engines: dict[str, GenerateEngine] = {}
        for settings in choices:
            said = f" ({', '.join(str(settings[key]) for key in varied)})" if varied else ""
            own = {
                key: value for key, value in settings.items() if key not in ("assistant", "compile")
            }
            if "compile" in settings:
                own = compiled_settings(longest)
            drafting = draft if settings.get("assistant") else None
            try:
                engines[f"{THEIRS}{name}{said}"] = GenerateEngine(
                    target, drafting, warp, eos_ids, own
                )
            except ValueError as error:
                raise UserError(
                    f"transformers.{name}: {str(error).splitlines()[0]}. Mend its settings"
                ) from error
        found[f"{THEIRS}{name}"] = engines
    return found


def longest_request(cfg: DictConfig, requests: Sequence[Request]) -> int:
    """Tokens of prompt and response."""
    return max(len(request.tokens) for request in requests) + int(cfg.max_new_tokens)


def without_compiled(
    theirs: dict[str, dict[str, GenerateEngine]], compiled: Sequence[str], prompt: Tensor
) -> dict[str, str]:
    """Compile the methods named `compiled`, before anything is timed, and take those that do not
    compile here out of `theirs`. Says so, and returns why, by method."""
    left_out = {}
    for name in (f"{THEIRS}{one}" for one in compiled):
        print(f"{name}: compiling, which takes a minute or so and is not timed", flush=True)
        for one in theirs[name].values():
            if why := not_compiled(one, prompt):
                left_out[name] = why
                print(
                    f"{name}: left out, it does not compile here ({why}). Install a C++ compiler"
                    " such as g++"
                )
    for name in left_out:
        del theirs[name]
    return left_out


def load_assistant(cfg: DictConfig, assistant: str | None) -> PreTrainedModel:
    """`assistant`, or `pair.draft` where that is None. Raises UserError where it is missing."""
    if assistant is None:
        return load_plain("draft", cfg.pair)
    models: Any = OmegaConf.merge(cfg.pair, {"draft": assistant})
    try:
        return load_plain("draft", models)
    except UserError as error:
        raise UserError(str(error).replace("pair.draft", "assistant", 1)) from error


# What was found -----------------------------------------------------------------------------------


def by_dataset(traces: Traces) -> dict[str, Traces]:
    """Of all prompts and, where there are several datasets, of each."""
    datasets = sorted({trace.dataset for trace in traces[BASELINE][0]})
    each = {
        dataset: {name: of_dataset(found, dataset) for name, found in traces.items()}
        for dataset in datasets
    }
    return each if len(each) == 1 else {"all": traces, **each}


def paired_comparison(traces: Traces, ours: Sequence[str]) -> dict[str, Any]:
    """best: of transformers, by its ratio to plain generation."""
    best = fastest(traces, [name for name in traces if name not in ours], GENERATE)
    against = {"generate": GENERATE, "our plain": BASELINE, "best of transformers": best}
    return {"best": best, "paired_comparisons": paired_comparisons(traces, against, ours)}


def plainly(methods: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON has it."""
    return {
        dataset: {
            **found,
            "paired_comparisons": {
                name: asdict(one) for name, one in found["paired_comparisons"].items()
            },
        }
        for dataset, found in methods.items()
    }


def draft_of(
    cfg: DictConfig, pair: ModelPair, requests: Sequence[Request], traces: Traces
) -> dict[str, Any]:
    """The draft against the target along the responses of plain decoding, and what its acceptance
    and the forwards' costs allow."""
    warp, draft_warp = instantiate(cfg.warp), instantiate(cfg.draft_warp)
    plain = traces[BASELINE][0]
    texts = [
        [*request.tokens.tolist(), *trace.tokens]
        for request, trace in zip(requests, plain, strict=True)
    ]
    devices = measured_devices(pair, sorted(texts, key=len)[len(texts) // 2], cfg.longest_draft + 1)
    matches = [
        match(pair, request.tokens, trace.tokens, warp, draft_warp, cfg.longest_draft)
        for request, trace in zip(requests, plain, strict=True)
    ]
    found = {}
    for dataset in by_dataset(traces):
        kept = [
            one
            for one, trace in zip(matches, plain, strict=True)
            if dataset in ("all", trace.dataset)
        ]
        best = speedup_bound([one.chance for one in kept], devices, cfg.longest_draft)
        found[dataset] = {
            "positions": sum(len(one.overlap) for one in kept),
            "overlap": mean_of([one.overlap for one in kept]),
            "greedy": mean_of([one.greedy for one in kept]),
            "accepted": mean_of([one.chance[0] for one in kept]),
            "accepted_after": [
                mean_of([one.chance[depth, depth:] for one in kept if depth < len(one.chance)])
                for depth in range(1, max(len(one.chance) for one in kept))
            ],
            "speedup_bound": asdict(best),
        }
    rows = [count for count in COST_ROWS if count <= cfg.longest_draft + 1]
    costs = {"draft": devices.draft(1), "target": {count: devices.target(count) for count in rows}}
    return {"seconds": costs, "datasets": found}


def mean_of(values: Sequence[Tensor]) -> float:
    """Over all positions of all responses."""
    return float(torch.cat(list(values)).double().mean())


def lossless(
    cfg: DictConfig, pair: ModelPair, requests: Sequence[Request], traces: Traces
) -> list[str]:
    """Greedy: equality with plain generation, and how near a tie each difference is."""
    if cfg.warp.temperature != 0:
        return [
            "sampled: outputs differ by their draws; our distributions are proven by enumeration"
            " (tests/contract)"
        ]
    prompts = [request.tokens for request in requests]
    found = {
        name: [
            difference
            for ours, theirs in zip(repeats, traces[GENERATE], strict=True)
            for difference in greedy_differences(
                pair.target, prompts, ours, theirs, pair.target.model.dtype
            )
        ]
        for name, repeats in traces.items()
        if name != GENERATE
    }
    return tables.lossless_lines(found, len(requests) * cfg.repeats, GENERATE)


def of_prompts(traces: Traces) -> dict[str, list[dict[str, Any]]]:
    """What the medians are of: tokens and seconds of every request, repeat by repeat."""
    return {
        name: [
            {
                "prompt_id": t.prompt_id,
                "dataset": t.dataset,
                "tokens": len(t.tokens),
                "seconds": t.seconds,
            }
            for repeat in repeats
            for t in repeat
        ]
        for name, repeats in traces.items()
    }


def page(cfg: DictConfig, pair: ModelPair, results: Mapping[str, Any]) -> str:
    """Everything in words and tables."""
    parts = [
        f"# {cfg.pair.name}: decoding {cfg.dataset.name}, {tables.setting(cfg)}",
        conditions(cfg, pair),
    ]
    for dataset, found in results["methods"].items():
        best = f"Best of transformers: {found['best']}."
        parts += [f"## {dataset}", paired_table(found["paired_comparisons"]), best]
        parts += draft_lines(results["draft"]["datasets"][dataset])
    seconds = results["draft"]["seconds"]
    rows = ", ".join(f"{count}: {1e3 * value:.1f}" for count, value in seconds["target"].items())
    parts += [
        f"Measured: ms of a draft forward {1e3 * seconds['draft']:.1f}, of a target forward by its"
        f" rows {rows}."
    ]
    for name, tried in results["tries"].items():
        if len(tried) > 1:
            speeds = ", ".join(f"{one}: {speed:.1f}" for one, speed in tried.items())
            parts += [
                f"{name}, tokens/s in the pass over {cfg.tried_prompts} prompt(s) that chose:"
                f" {speeds}"
            ]
    for name, why in results["left_out"].items():
        parts += [f"{name}: left out, it did not compile ({why})."]
    if results["resumed"]:
        parts += [
            f"Measured in more than one sitting: {results['resumed']} turns before the last one."
        ]
    return "\n\n".join([*parts, "## Lossless", *results["lossless"]])


def conditions(cfg: DictConfig, pair: ModelPair) -> str:
    """Where, with what and how it was measured."""
    facts = setup_facts(pair)
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return (
        f"{in_words(facts['hardware'])}, {facts['threads']} threads, {in_words(facts['dtypes'])};"
        f" {versions}. Measured: tokens/s of whole requests, prefill included, until EOS or"
        f" {cfg.max_new_tokens} tokens, medians over prompts; ratios on the same prompt, on which"
        f" the methods take turns, {cfg.repeats} repeat(s), medians with 95 % bootstrap intervals"
        " over prompts."
    )


def draft_lines(found: Mapping[str, Any]) -> list[str]:
    """found: of `draft_of`, one dataset."""
    best, later = (
        found["speedup_bound"],
        ", ".join(f"{value:.3f}" for value in found["accepted_after"]),
    )
    reads = (
        f" (then {later}, for it reads its own states after the first token of a draft)"
        if later
        else ""
    )
    return [
        (
            f"The draft along the {found['positions']} tokens of plain decoding: acceptance sum"
            f" min(p, q) at temperature 1 {found['overlap']:.3f}, greedy agreement"
            f" {found['greedy']:.3f}."
        ),
        (
            f"Modelled: a token accepted with probability {found['accepted']:.3f} under these"
            f" warps{reads}, drafts of {best['gamma']} would make {best['tokens_per_round']:.2f}"
            f" tokens per target call and {best['speedup']:.2f}x the speed of our plain decoding,"
            " if nothing but forwards cost time."
        ),
    ]
