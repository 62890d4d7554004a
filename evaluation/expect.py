"""Expected acceptance of several methods along the responses of a harvest."""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from tqdm import tqdm

from data_gen.storage.dataset import Harvest
from decoding.draft import Draft, RoundContext
from decoding.engines.serial import SerialEngine
from decoding.interfaces import Pair
from decoding.models.loading import ModelPair, load_pair, pair_identity
from decoding.models.machine import setup_facts
from decoding.sampling import Sampler
from decoding.settings import Pair as PairSettings
from evaluation import methods, table
from evaluation.decode import Journal, file_hashes, journal_path
from evaluation.evaluate import named_files, run_facts
from evaluation.methods import Method
from evaluation.table import ALL, Summary, markdown, ratio, ratio_of, with_interval
from runtime.errors import UserError
from runtime.files import checked_folder, only_writer, refuse_foreign, replaced_folder
from runtime.intervals import METHOD, Estimate
from runtime.json_files import write_checksummed
from runtime.text import plural, printable
from runtime.tracking import tracked


@dataclass(frozen=True)
class Text:
    """A recorded response. tokens: [P + T] int64, prompt and response; prompt: P."""

    dataset: str
    prompt_id: str
    tokens: Tensor
    prompt: int


@dataclass(frozen=True)
class Expected:
    """Expected counts of one target call, means over draws. accepted: draft tokens; tokens: those
    and the residual or bonus token; nodes: of the draft; forwards: of the draft model.

    The first two are expectations over the verdicts of a draft, exact up to rounding."""

    accepted: float
    tokens: float
    nodes: float
    forwards: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


FIGURES = {
    "tokens": "emitted",
    "accepted": "accepted",
    "nodes": "drafted",
    "forwards": "draft_forwards",
}
"""What is read off a context, and the column of the table that sums it."""
Turns = Mapping[tuple[str, str], Mapping[str, Sequence[Expected]]]
"""By dataset and prompt, then by method: one for each context."""


# In one context -----------------------------------------------------------------------------------


def expected_counts(
    draft: Draft, end_prob: Tensor, eos_ids: frozenset[int] = frozenset()
) -> tuple[float, float]:
    """Return accepted tokens, and committed tokens, of a round whose path ends at row r with
    `end_prob` [n + 1]. Nothing follows an open leaf or an EOS."""
    depth = [0]
    for parent in draft.parent:
        depth.append(depth[parent] + 1)
    follows = [
        row <= draft.closed and (row == 0 or draft.token[row - 1] not in eos_ids)
        for row in range(len(depth))
    ]
    ends = end_prob.double()
    accepted = float(ends @ torch.tensor(depth, dtype=torch.float64))
    return accepted, accepted + float(ends @ torch.tensor(follows, dtype=torch.float64))


def in_context(engine: SerialEngine, context: RoundContext, seeds: Sequence[int]) -> Expected:
    """Return the mean over one draft for each seed. The caches must be as `SerialEngine.expected`
    needs them."""
    drafts = []
    for seed in seeds:
        expected = engine.expected(context, Sampler.seeded(seed))
        counts = expected_counts(expected.draft, expected.verdict.end_prob, engine.eos_ids)
        drafts.append((*counts, float(len(expected.draft)), float(expected.forwards)))
    return Expected(*np.mean(drafts, axis=0).tolist())


# Along a response ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The contexts to evaluate. positions: their number in a response; draws: drafts in each."""

    positions: int
    draws: int
    seed: int

    def lengths(self, text: Text) -> list[int]:
        """Return the lengths of the contexts in tokens, increasing: at the middle of equal parts of
        the response, or before every token if it is shorter than `positions`."""
        length = len(text.tokens) - text.prompt
        many = min(length, self.positions)
        return [text.prompt + (2 * part + 1) * length // (2 * many) for part in range(many)]

    def seeds(self, text: Text, length: int) -> list[int]:
        """Return the seeds of the drafts in a context of `length` tokens."""
        named = f"{text.dataset}/{text.prompt_id}/{length}"
        names = [f"{self.seed}/{draw}/{named}" for draw in range(self.draws)]
        digests = [hashlib.sha256(name.encode()).digest() for name in names]
        return [int.from_bytes(digest[:4], "big") for digest in digests]


def along(
    engines: Mapping[str, SerialEngine],
    pair: Pair,
    text: Text,
    plan: Plan,
    done: Collection[int] = (),
) -> Iterator[tuple[int, dict[str, Expected]]]:
    """Yield the results of every method in each context of a response, with its length, except
    contexts in `done`.

    A context begins a request: adaptive rules and structures have no earlier rounds, and the output
    may be as long as the models' context. A method's draws depend on the seed, the context and the
    number of the draw, not on the method."""
    layers = sorted({layer for engine in engines.values() for layer in engine.target_layers})
    for length, hidden in contexts(pair, text, plan.lengths(text), layers):
        if length in done:
            continue
        expected = {}
        for name, engine in engines.items():
            rows = [layers.index(layer) for layer in engine.target_layers]
            context = RoundContext(
                text.tokens[:length],
                pair.target.max_length - length,
                0,
                None if hidden is None or not rows else hidden[rows],
                pair.target.embed,
                engine.eos_ids,
                draft_context=pair.draft.max_length if engine.structure.uses_draft else None,
                prompt=text.prompt,
            )
            expected[name] = in_context(engine, context, plan.seeds(text, length))
        yield length, expected


@torch.inference_mode()
def contexts(
    pair: Pair, text: Text, lengths: Sequence[int], layers: Sequence[int]
) -> Iterator[tuple[int, Tensor | None]]:
    """Yield the lengths (increasing) from the last to the first, each with the target's states
    [len(layers), H] at its last cached token. Meanwhile the caches of both models hold all but the
    last token of the context, the draft's at most its context length. Takes one forward of each
    model; the caller must leave the caches as they are.

    Raises UserError for a text that does not fit the target."""
    most = pair.target.max_length
    if len(text.tokens) > most:
        raise UserError(
            f"data: {text.prompt_id} has {len(text.tokens)} tokens with its response, which do not"
            f" fit pair.max_length {most}. Raise it"
        )
    rows, cached, states = [length - 2 for length in lengths if length > 1], lengths[-1] - 1, None
    pair.target.reset()
    pair.draft.reset()
    if cached:  # the target first: the draft may read its states
        output = pair.target.forward(
            text.tokens[:cached], hidden=layers, hidden_rows=rows, logits="none"
        )
        states = output.hidden
        pair.draft.forward(text.tokens[: min(cached, pair.draft.max_length)], logits="none")
    for length in reversed(lengths):
        for model in (pair.target, pair.draft):
            model.crop(min(model.length, length - 1))
        yield length, None if states is None or length < 2 else states[:, rows.index(length - 2)]


# As measurements ----------------------------------------------------------------------------------


def measured(turns: Turns) -> pd.DataFrame:
    """Return a row per method and prompt, sums over its contexts, each of which is a round."""
    rows = []
    for (dataset, prompt), by_method in turns.items():
        for method, each in by_method.items():
            row = {"policy": method, "dataset": dataset, "prompt": prompt, "rounds": len(each)}
            for figure, column in FIGURES.items():
                row[column] = sum(getattr(expected, figure) for expected in each)
            rows.append(row)
    return table.table("expected", rows)


def difference(measurements: pd.DataFrame, method: str, against: str, column: str) -> Estimate:
    """Return the mean over contexts of a column of `method` minus that of `against` in the same
    contexts, with its interval over prompts."""
    first, second = (
        table.prompts(measurements[measurements["policy"] == name], column, "rounds")
        for name in (method, against)
    )
    less = first[column].to_numpy(float) - second[column].to_numpy(float)
    return ratio_of(less, first["rounds"].to_numpy(float))


# evaluate.py what=expected ------------------------------------------------------------------------


MARKER = "expected.json"  # marks a folder of results
DIFFERENCES = ("tokens", "accepted")


def expect(cfg: DictConfig) -> None:
    """Write a table of the expected acceptance of every method."""
    out = checked_folder("out", cfg.out)
    refuse_foreign(out, MARKER)
    methods.refuse_unused(cfg, cfg.methods, HydraConfig.get().overrides.task)
    harvest = Harvest.open(cfg.data)
    texts = recorded(cfg, harvest)
    pair = pair_of(cfg, harvest)
    identity = pair_identity(pair)
    compared = {name: Method(name, methods.configured(cfg, name)) for name in cfg.methods}
    engines = {name: serial(cfg, method, pair) for name, method in compared.items()}
    settings = {name: method.to_dict() for name, method in compared.items()}
    depends_on = [
        settings,
        [instantiate(cfg[key]).to_dict() for key in ("warp", "draft_warp")],
        [cfg.positions, cfg.draws, cfg.seed, harvest.identity],
        [[text.dataset, text.prompt_id] for text in texts],
        identity,
        [pair.target.max_length, pair.draft.max_length],
        setup_facts(pair),
        file_hashes([named_files(method.settings) for method in compared.values()]),
    ]
    path = journal_path(out, depends_on)
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    with (
        only_writer(out),
        Journal(path, Expected) as journal,
        tracked(cfg.logger, "expect", config, [config], list(compared)) as logger,
    ):
        logger.used(*harvest.artifact)
        if journal.resumed:
            print(f"going on after {plural(journal.resumed, 'context')} ({path})")
        turns = walked(cfg, engines, pair, texts, journal)
        measurements = measured(turns)
        summaries = figures(cfg, measurements)
        facts = {
            "methods": settings,
            "data": {"folder": str(cfg.data), **harvest.origin},
            "run": run_facts(cfg, pair),
            "contexts": [
                {
                    "dataset": dataset,
                    "prompt_id": prompt,
                    "methods": {
                        name: [expected.to_dict() for expected in each]
                        for name, each in by_method.items()
                    },
                }
                for (dataset, prompt), by_method in turns.items()
            ],
        }
        text = page(cfg, summaries, turns, harvest)
        with replaced_folder(out, MARKER) as folder:
            write_checksummed(folder / MARKER, {**facts, "expected": summaries})
            table.save(measurements, folder / table.FILE)
            (folder / "table.md").write_text(text + "\n", encoding="utf-8")
        journal.remove()
        for name, row in summaries[ALL].items():
            logger.log({f"{name}/{figure}": each.value for figure, each in row.items()})
        logger.artifact("expected", "results", out)
    print(f"\n{text}\n\nsaved in {cfg.out}")


def pair_of(cfg: DictConfig, harvest: Harvest) -> ModelPair:
    """Return the pair. Raises UserError if the harvest is of another tokenizer."""
    pair = load_pair(PairSettings.of(cfg.pair))
    if pair_identity(pair)["tokenizer"] != harvest.pair.tokenizer:
        raise UserError(
            f"data: {harvest.folder} was harvested with another tokenizer than that of"
            f" pair={pair.name}. Give a harvest of a pair that has it"
        )
    return pair


def recorded(cfg: DictConfig, harvest: Harvest) -> list[Text]:
    """Return `cfg.prompts` responses of the split, evenly spaced, without empty ones."""
    texts = [
        Text(
            prompt.dataset,
            prompt.prompt_id,
            torch.tensor([*prompt.prompt_tokens, *prompt.response_tokens]),
            len(prompt.prompt_tokens),
        )
        for prompt in harvest.prompts(cfg.split)
        if prompt.prompt_tokens and prompt.response_tokens
    ]
    if not texts:
        raise UserError(
            f"split: expected responses, got none in split {cfg.split} of {cfg.data}. Write"
            " split=all, or harvest more prompts"
        )
    count = min(cfg.prompts or len(texts), len(texts))
    return [texts[number * len(texts) // count] for number in range(count)]


def serial(cfg: DictConfig, method: Method, pair: ModelPair) -> SerialEngine:
    """Return the serial engine of a method. Raises UserError for another engine, and for files that
    do not fit this run."""
    trained = methods.checkpoint_configs(cfg, method.name)
    methods.check_checkpoints(cfg, pair, method.name, trained)
    for warning in methods.check_costs(cfg, pair, [method.name]):
        print(warning)
    engine = methods.engine(method, pair)
    if not isinstance(engine, SerialEngine):
        raise UserError(
            f"methods: expected methods of engine=serial, got {method.name} of"
            f" {type(engine).__name__}. Leave it out"
        )
    return engine


def walked(
    cfg: DictConfig,
    engines: Mapping[str, SerialEngine],
    pair: ModelPair,
    texts: Sequence[Text],
    journal: Journal[Expected],
) -> Turns:
    """Return the results of every method in every context, from the journal where it has them."""
    plan, turns = Plan(cfg.positions, cfg.draws, cfg.seed), dict[tuple[str, str], Any]()
    total = sum(len(plan.lengths(text)) for text in texts)
    with tqdm(total=total, initial=journal.resumed, desc="drafting", unit=" contexts") as bar:
        for number, text in enumerate(texts):
            keys = {length: f"{number}/{length}" for length in plan.lengths(text)}
            done = [length for length, key in keys.items() if key in journal.turns]
            if len(done) < len(keys):
                for length, expected in along(engines, pair, text, plan, done):
                    journal.add(keys[length], expected)
                    bar.update()
            rows = [journal.turns[key] for key in keys.values()]
            turns[text.dataset, text.prompt_id] = {
                name: [row[name] for row in rows] for name in engines
            }
    return turns


# The page -----------------------------------------------------------------------------------------


def figures(cfg: DictConfig, measurements: pd.DataFrame) -> dict[str, Summary]:
    """Return by dataset and method every figure per target call, and its difference from the
    reference method."""
    against, summaries = cfg.against or cfg.methods[0], dict[str, Summary]()
    for dataset, rows in table.by_dataset(measurements).items():
        summaries[dataset] = {}
        for name in cfg.methods:
            mine = rows[rows["policy"] == name]
            row = {figure: ratio(mine, column, "rounds") for figure, column in FIGURES.items()}
            for figure in DIFFERENCES:
                less = difference(rows, name, against, FIGURES[figure])
                row[f"{figure} less {against}"] = less
            summaries[dataset][name] = row
    return summaries


def page(cfg: DictConfig, summaries: Mapping[str, Summary], turns: Turns, harvest: Harvest) -> str:
    """Return the answer in two lines, and a table of every dataset."""
    rows = summaries[ALL]
    best = max(rows, key=lambda name: rows[name]["tokens"].value)
    count = sum(len(next(iter(each.values()))) for each in turns.values())
    origin = "given responses"
    if harvest.manifest.responses == "generated":  # the warps of drafts may differ
        temperature = harvest.context["warp"]["temperature"]
        origin = f"responses of {printable(harvest.pair.name)} at temperature {temperature}"
    parts = [
        f"Most tokens per target call, expected: {with_interval(rows[best]['tokens'])}, of {best}."
        f"\n{plural(len(turns), 'prompt')}, {plural(count, 'context')},"
        f" {plural(cfg.draws, 'draft')} in each; {METHOD}.",
        f"# {printable(cfg.pair.name)}, temperature {cfg.warp.temperature}: expected per target"
        " call",
        f"Contexts are of {origin}. Expectations over the verdicts of a draft; every method has the"
        " same contexts and random numbers, and knows nothing of earlier rounds.",
    ]
    for dataset, summary in summaries.items():
        columns = list(next(iter(summary.values())))
        lines = []
        for method, row in summary.items():
            forms = ["+.3f" if " less " in column else ".3f" for column in columns]
            cells = [with_interval(row[c], form) for c, form in zip(columns, forms, strict=True)]
            lines.append([method, *cells])
        parts += [f"## {printable(dataset)}", markdown(["method", *columns], lines)]
    return "\n\n".join(parts)
