"""Expected acceptance of several methods along the responses of a harvest."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from tqdm import tqdm

from data_gen.storage.dataset import Harvest
from decoding.engines.serial import SerialEngine
from decoding.models.loading import ModelPair, load_pair, pair_identity
from decoding.models.machine import setup_facts
from evaluation.evaluate import named_files, run_facts
from evaluation.expected import FIGURES, Expected, Plan, Text, Turns, along, difference, measured
from evaluation.journal import Journal, file_hashes, journal_path
from evaluation.methods import (
    Method,
    check_checkpoints,
    check_costs,
    checkpoint_configs,
    configured,
    engine,
)
from evaluation.table import FILE, Row, Summary, by_dataset, markdown, ratio, save
from runtime.errors import UserError
from runtime.files import checked_folder, only_writer, refuse_foreign, replaced_folder
from runtime.intervals import METHOD
from runtime.json_files import write_checksummed
from runtime.text import printable

MARKER = "expected.json"  # what a folder of results is known by
DIFFERENCES = ("tokens", "accepted")


def expect(cfg: DictConfig) -> None:
    """Harvest and pair in, a table out."""
    out = checked_folder("out", cfg.out)
    refuse_foreign(out, MARKER)
    harvest = Harvest.open(cfg.data)
    texts = recorded(cfg, harvest)
    pair = load_pair(cfg.pair)
    refuse_other_tokenizer(pair, harvest)
    methods = {name: Method(name, configured(cfg, name)) for name in cfg.methods}
    engines = {name: serial(cfg, method, pair) for name, method in methods.items()}
    path = journal_path(out, depends_on(cfg, pair, methods, harvest, texts))
    with only_writer(out), Journal(path, Expected) as journal:
        if journal.resumed:
            print(f"going on after {journal.resumed} contexts ({path})")
        turns = walked(cfg, engines, pair, texts, journal)
        measurements = measured(turns)
        found = figures(cfg, measurements)
        facts = {
            "methods": {name: method.to_dict() for name, method in methods.items()},
            "data": {"folder": str(cfg.data), "identity": harvest.identity},
            "run": run_facts(cfg, pair, "scripts/evaluate.py"),
            "contexts": listed(turns),
        }
        text = page(cfg, found, turns, harvest)
        with replaced_folder(out, MARKER) as folder:
            write_checksummed(folder / MARKER, {**facts, "expected": found})
            save(measurements, folder / FILE)
            (folder / "table.md").write_text(text + "\n", encoding="utf-8")
        journal.remove()
    print(f"\n{text}\n\nsaved in {cfg.out}")


def recorded(cfg: DictConfig, harvest: Harvest) -> list[Text]:
    """Responses of the split, `cfg.prompts` of them, evenly spaced; an empty one is left out."""
    found = [
        Text(
            prompt.dataset,
            prompt.prompt_id,
            torch.tensor([*prompt.prompt_tokens, *prompt.response_tokens]),
            len(prompt.prompt_tokens),
        )
        for prompt in harvest.prompts(cfg.split)
        if prompt.prompt_tokens and prompt.response_tokens
    ]
    if not found:
        raise UserError(
            f"split: expected responses, got none in split {cfg.split} of {cfg.data}. Write"
            " split=all, or harvest more prompts"
        )
    count = min(cfg.prompts or len(found), len(found))
    return [found[number * len(found) // count] for number in range(count)]


def refuse_other_tokenizer(pair: ModelPair, harvest: Harvest) -> None:
    if pair_identity(pair)["tokenizer"] != harvest.pair.tokenizer:
        raise UserError(
            f"data: {harvest.folder} was harvested with another tokenizer than that of"
            f" pair={pair.name}. Give a harvest of a pair that has it"
        )


def serial(cfg: DictConfig, method: Method, pair: ModelPair) -> SerialEngine:
    """Raises UserError for another engine, and for files that do not fit this run."""
    trained = checkpoint_configs(cfg, method.name)
    check_checkpoints(cfg, pair, method.name, trained)
    for warning in check_costs(cfg, pair, [method.name]):
        print(warning)
    found = engine(method, pair)
    if not isinstance(found, SerialEngine):
        raise UserError(
            f"methods: expected methods of engine=serial, got {method.name} of"
            f" {type(found).__name__}. Leave it out"
        )
    return found


def depends_on(
    cfg: DictConfig,
    pair: ModelPair,
    methods: Mapping[str, Method],
    harvest: Harvest,
    texts: Sequence[Text],
) -> list[Any]:
    """Everything that the figures of a context come from."""
    return [
        {name: method.to_dict() for name, method in methods.items()},
        [instantiate(cfg[key]).to_dict() for key in ("warp", "draft_warp")],
        [cfg.positions, cfg.draws, cfg.seed, harvest.identity],
        [[text.dataset, text.prompt_id] for text in texts],
        pair_identity(pair),
        [pair.target.max_length, pair.draft.max_length],
        setup_facts(pair),
        file_hashes([named_files(method.settings) for method in methods.values()]),
    ]


# Along the responses ------------------------------------------------------------------------------


def walked(
    cfg: DictConfig,
    engines: Mapping[str, SerialEngine],
    pair: ModelPair,
    texts: Sequence[Text],
    journal: Journal[Expected],
) -> Turns:
    """By prompt, every method in every context; what the journal has is taken from there."""
    plan, turns = Plan(cfg.positions, cfg.draws, cfg.seed), dict[tuple[str, str], Any]()
    total = sum(len(plan.lengths(text)) for text in texts)
    with tqdm(total=total, initial=journal.resumed, desc="contexts", unit="context") as bar:
        for number, text in enumerate(texts):
            keys = {length: f"{number}/{length}" for length in plan.lengths(text)}
            done = [length for length, key in keys.items() if key in journal.turns]
            if len(done) < len(keys):
                for length, found in along(engines, pair, text, plan, done):
                    journal.add(keys[length], found)
                    bar.update()
            rows = [journal.turns[key] for key in keys.values()]
            turns[text.dataset, text.prompt_id] = {
                name: [row[name] for row in rows] for name in engines
            }
    return turns


# The page -----------------------------------------------------------------------------------------


def figures(cfg: DictConfig, measurements: pd.DataFrame) -> dict[str, Summary]:
    """Return per dataset and method every figure per target call, and its difference to the method
    of reference."""
    against = cfg.against or cfg.methods[0]
    return {
        dataset: {
            name: {
                **{
                    figure: ratio(rows[rows["policy"] == name], column, "rounds")
                    for figure, column in FIGURES.items()
                },
                **{
                    f"{figure} less {against}": difference(rows, name, against, FIGURES[figure])
                    for figure in DIFFERENCES
                },
            }
            for name in cfg.methods
        }
        for dataset, rows in by_dataset(measurements).items()
    }


def listed(turns: Turns) -> list[dict[str, Any]]:
    """The figures themselves, a prompt each."""
    return [
        {
            "dataset": dataset,
            "prompt_id": prompt,
            "methods": {name: [one.to_dict() for one in of] for name, of in found.items()},
        }
        for (dataset, prompt), found in turns.items()
    ]


def page(cfg: DictConfig, found: Mapping[str, Summary], turns: Turns, harvest: Harvest) -> str:
    """A table of every dataset."""
    contexts = sum(len(next(iter(of.values()))) for of in turns.values())
    parts = [
        f"# {printable(cfg.pair.name)}, temperature {cfg.warp.temperature}: expected per target"
        " call",
        f"{len(turns)} prompts, {contexts} contexts, {cfg.draws} draft(s) in each; {METHOD}."
        f" Contexts are of {origin(harvest)}. Expectations over the verdicts of a draft; every"
        " method has the same contexts and random numbers, and knows nothing of earlier rounds.",
    ]
    for name, rows in found.items():
        columns = list(next(iter(rows.values())))
        lines = [
            [method, *(cell(row, column) for column in columns)] for method, row in rows.items()
        ]
        parts += [f"## {printable(name)}", markdown(["method", *columns], lines)]
    return "\n\n".join(parts)


def origin(harvest: Harvest) -> str:
    """Whose responses: the warps of the drafts may be others."""
    if harvest.manifest.responses != "generated":
        return "given responses"
    temperature = harvest.context["warp"]["temperature"]
    return f"responses of {printable(harvest.pair.name)} at temperature {temperature}"


def cell(row: Row, column: str) -> str:
    value, low, high = row[column]
    form = "{:+.3f}" if " less " in column else "{:.3f}"
    interval = "" if low is None else f" ({form.format(low)} to {form.format(high)})"
    return form.format(value) + interval
