"""Expected acceptance of several methods along the responses of a harvest."""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor
from tqdm import tqdm

from data_gen.storage.dataset import Harvest
from decoding.draft import Draft, RoundContext
from decoding.engines.serial import SerialEngine
from decoding.interfaces import LM, Pair
from decoding.models.loading import ModelPair, load_pair, pair_identity
from decoding.models.machine import setup_facts
from decoding.sampling import Sampler
from decoding.settings import Pair as PairSettings
from evaluation.decode import Journal, file_hashes, journal_path
from evaluation.evaluate import named_files, run_facts
from evaluation.methods import (
    Method,
    check_checkpoints,
    check_costs,
    checkpoint_configs,
    configured,
    engine,
)
from evaluation.table import (
    FILE,
    Row,
    Summary,
    by_dataset,
    markdown,
    prompts,
    ratio,
    ratio_of,
    save,
    table,
)
from runtime.errors import UserError
from runtime.files import checked_folder, only_writer, refuse_foreign, replaced_folder
from runtime.intervals import METHOD, Estimate
from runtime.json_files import write_checksummed
from runtime.text import printable


@dataclass(frozen=True)
class Text:
    """A recorded response. tokens: [P + T] int64, prompt and response; prompt: P."""

    dataset: str
    prompt_id: str
    tokens: Tensor
    prompt: int


@dataclass(frozen=True)
class Expected:
    """Of one call of the target, means over draws. accepted: draft tokens; tokens: those and the
    one that follows, where one does; nodes: of the draft; forwards: of the draft model.

    The first two are expectations over the verdicts of a draft, exact but for rounding."""

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
Found = Mapping[str, Sequence[Expected]]
"""method -> one for each context of a prompt."""


# In one context -----------------------------------------------------------------------------------


def expected_counts(
    draft: Draft, end_prob: Tensor, eos_ids: frozenset[int] = frozenset()
) -> tuple[float, float]:
    """Accepted tokens, and committed tokens, of a round whose path ends at row r with `end_prob`
    [n + 1]. Nothing follows an open leaf or an EOS."""
    depth = [0]
    for parent in draft.parent:
        depth.append(depth[parent] + 1)
    follows = [
        row <= draft.closed and (row == 0 or draft.token[row - 1] not in eos_ids)
        for row in range(len(depth))
    ]
    chances = end_prob.double()
    accepted = float(chances @ torch.tensor(depth, dtype=torch.float64))
    return accepted, accepted + float(chances @ torch.tensor(follows, dtype=torch.float64))


def in_context(engine: SerialEngine, context: RoundContext, seeds: Sequence[int]) -> Expected:
    """The mean over a draft for each seed. The caches are as `SerialEngine.outlook` has them."""
    found = []
    for seed in seeds:
        outlook = engine.outlook(context, Sampler.seeded(seed))
        counts = expected_counts(outlook.draft, outlook.verdict.end_prob, engine.eos_ids)
        found.append((*counts, float(len(outlook.draft)), float(outlook.forwards)))
    return Expected(*np.mean(found, axis=0).tolist())


# Along a response ---------------------------------------------------------------------------------


def positions(length: int, count: int) -> list[int]:
    """`count` numbers of response tokens before a context, in the middle of equal parts of a
    response of `length` tokens; all of them where it is shorter."""
    many = min(length, count)
    return [(2 * part + 1) * length // (2 * many) for part in range(many)]


@dataclass(frozen=True)
class Plan:
    """positions: contexts of a response; draws: drafts in each."""

    positions: int
    draws: int
    seed: int

    def lengths(self, text: Text) -> list[int]:
        """Tokens of each context, increasing."""
        length = len(text.tokens) - text.prompt
        return [text.prompt + place for place in positions(length, self.positions)]


def along(
    engines: Mapping[str, SerialEngine],
    pair: Pair,
    text: Text,
    plan: Plan,
    done: Collection[int] = (),
) -> Iterator[tuple[int, dict[str, Expected]]]:
    """Every method in contexts of a response, by their lengths, but for those `done`.

    A context begins a request: rules and structures that adapt know nothing of earlier rounds, and
    the output may be as long as the models' context. A method's draws depend on the seed, the
    context and the number of the draw, not on the method."""
    layers = sorted({layer for one in engines.values() for layer in one.target_layers})
    for length, hidden in contexts(pair, text, plan.lengths(text), layers):
        if length in done:
            continue
        seeds = [context_seed(plan.seed, text, length, draw) for draw in range(plan.draws)]
        room = pair.target.max_length - length
        found = {}
        for name, method in engines.items():
            rows = [layers.index(layer) for layer in method.target_layers]
            states = None if hidden is None or not rows else hidden[rows]
            context = RoundContext(
                text.tokens[:length],
                room,
                0,
                states,
                pair.target.embed,
                method.eos_ids,
                draft_context=pair.draft.max_length if method.structure.uses_draft else None,
            )
            found[name] = in_context(method, context, seeds)
        yield length, found


@torch.inference_mode()
def contexts(
    pair: Pair, text: Text, lengths: Sequence[int], layers: Sequence[int]
) -> Iterator[tuple[int, Tensor | None]]:
    """The lengths (increasing) from the last to the first, the caches of both models holding all
    but the last token of each, the draft's no more than its context; with the target's states
    [len(layers), H] at the last of these. One forward of each model; what is run between two of
    them must leave the caches as they are.

    Raises UserError for a text that does not fit the target."""
    most = pair.target.max_length
    if len(text.tokens) > most:
        raise UserError(
            f"data: {text.prompt_id} has {len(text.tokens)} tokens with its response, which do not"
            f" fit pair.max_length {most}. Raise it"
        )
    rows = [length - 2 for length in lengths if length > 1]
    states = cached(pair.target, text.tokens[: lengths[-1] - 1], layers, rows)
    # after the target, whose states it may read
    cached(pair.draft, text.tokens[: min(lengths[-1] - 1, pair.draft.max_length)])
    for length in reversed(lengths):
        for model in (pair.target, pair.draft):
            model.crop(min(model.length, length - 1))
        known = states is not None and length > 1
        yield length, states[:, rows.index(length - 2)] if states is not None and known else None


def cached(
    model: LM, tokens: Tensor, layers: Sequence[int] = (), rows: Sequence[int] = ()
) -> Tensor | None:
    """Cache `tokens` alone; [len(layers), len(rows), H] of them, None where nothing is asked."""
    model.reset()
    if not len(tokens):
        return None
    return model.forward(tokens, hidden=layers, hidden_rows=rows, logits="none").hidden


def context_seed(seed: int, text: Text, length: int, draw: int) -> int:
    """Of a context that has `length` tokens."""
    named = f"{seed}/{draw}/{text.dataset}/{text.prompt_id}/{length}"
    return int.from_bytes(hashlib.sha256(named.encode()).digest()[:4], "big")


# As measurements ----------------------------------------------------------------------------------

Turns = Mapping[tuple[str, str], Found]
"""By dataset and prompt."""


def measured(turns: Turns) -> pd.DataFrame:
    """Return a row per method and prompt, sums over its contexts, each of which is a round."""
    rows = [
        {
            "policy": method,
            "dataset": dataset,
            "prompt": prompt,
            "emitted": sum(each.tokens for each in contexts),
            "rounds": len(contexts),
            "drafted": sum(each.nodes for each in contexts),
            "accepted": sum(each.accepted for each in contexts),
            "draft_forwards": sum(each.forwards for each in contexts),
        }
        for (dataset, prompt), found in turns.items()
        for method, contexts in found.items()
    ]
    return table("expected", rows)


def difference(measurements: pd.DataFrame, method: str, against: str, column: str) -> Estimate:
    """Return the mean over contexts of a column of `method` less that of `against` in the same
    contexts, with its interval over prompts."""
    first, second = (
        prompts(measurements[measurements["policy"] == name], column, "rounds")
        for name in (method, against)
    )
    less = first[column].to_numpy(float) - second[column].to_numpy(float)
    return ratio_of(less, first["rounds"].to_numpy(float))


# evaluate.py what=expected ------------------------------------------------------------------------


MARKER = "expected.json"  # what a folder of results is known by
DIFFERENCES = ("tokens", "accepted")


def expect(cfg: DictConfig) -> None:
    """Harvest and pair in, a table out."""
    out = checked_folder("out", cfg.out)
    refuse_foreign(out, MARKER)
    harvest = Harvest.open(cfg.data)
    texts = recorded(cfg, harvest)
    pair = load_pair(PairSettings.of(cfg.pair))
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
            "run": run_facts(cfg, pair),
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
