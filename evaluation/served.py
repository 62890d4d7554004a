"""Methods by the number of requests decoded at once, in our engine or inside a serving one, and
beside them what replay of a harvest says of the same drafts (evaluate.py what=served)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pandas as pd
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from data_gen.requests import Request
from data_gen.storage.dataset import Harvest
from decoding.engines.batched import Asked, BatchedEngine, Decoder
from decoding.models.loading import ModelPair, load_pair, pair_identity
from decoding.models.machine import setup_facts
from decoding.proposer import read_proposer
from decoding.sampling import Sampler
from decoding.settings import Pair
from decoding.stopping.base import TunableRule, setting_of
from decoding.stopping.fixed import Fixed
from decoding.structures.chain import Chain
from decoding.trace import Trace
from evaluation import methods, table
from evaluation.decode import Journal, alternating, file_hashes, journal_path, request_seed
from evaluation.evaluate import load_requests, named_files, run_facts
from evaluation.lossless import difference_lines, greedy_differences
from evaluation.methods import Method
from evaluation.page import TAU, hardware, heading
from evaluation.replay.read import read_table, refuse_other_pair, refuse_other_warps
from evaluation.replay.simulate import Replayer
from evaluation.table import markdown, ratio, ratio_of, with_interval
from runtime.errors import UserError
from runtime.files import checked_folder, only_writer, refuse_foreign, replaced_folder
from runtime.intervals import METHOD, Estimate
from runtime.job import as_called
from runtime.json_files import write_checksummed
from runtime.text import printable
from runtime.tracking import tracked

MARKER = "served.json"
WARM_UP = 8  # tokens


@runtime_checkable
class Serving(Protocol):
    """An engine that decodes many requests at once."""

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        max_new_tokens: int,
        at_once: int,
    ) -> Mapping[str, Any]:
        """Decode at most `at_once` prompts at a time, the next as one ends. Return `tokens` of each
        prompt, the `seconds` that all took, `rounds` if it counts them, `drafts` (rounds with one),
        `draft_tokens`, `accepted_tokens`, and `per_position`: drafts of which more than n tokens
        were accepted."""
        ...


@dataclass(frozen=True)
class Group:
    """What a method made of a group of requests (`Serving.serve`)."""

    tokens: list[list[int]]
    seconds: float
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    per_position: list[int]
    rounds: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


Turns = Mapping[str, Mapping[str, Group]]
"""By `<requests>/<repeat>/<number of the group>`, then by method."""


def serve(cfg: DictConfig) -> None:
    """Decode, compare, print and save, as scripts/evaluate.py says."""
    out = checked_folder("out", cfg.out)
    refuse_foreign(out, MARKER)
    names = list(dict.fromkeys([cfg.against, *cfg.methods]))
    methods.refuse_unused(cfg, names, HydraConfig.get().overrides.task)
    pair = load_pair(Pair.of(cfg.pair))
    for name in names:
        methods.check_checkpoints(cfg, pair, name, methods.checkpoint_configs(cfg, name))
    for warning in methods.check_costs(cfg, pair, names):
        print(as_called(warning))
    compared = {name: Method(name, methods.configured(cfg, name)) for name in names}
    for method in compared.values():
        if "requests" in method.settings.engine:
            method.settings.engine.requests = max(cfg.requests)
    predicted = predictions(cfg, pair, compared)
    requests = load_requests(cfg, pair, cfg.split, cfg.limit)
    identity = pair_identity(pair)
    depends_on = [
        {name: method.to_dict() for name, method in compared.items()},
        [cfg.max_new_tokens, cfg.seed, cfg.by_category, cfg.waves],
        [instantiate(cfg.warp).to_dict(), identity],
        [[each.dataset, each.category, each.prompt_id, each.tokens.tolist()] for each in requests],
        setup_facts(pair),
        file_hashes([named_files(method.settings) for method in compared.values()]),
    ]
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    with ExitStack() as during:
        during.enter_context(only_writer(out))
        journal = during.enter_context(Journal(journal_path(out, depends_on), Group))
        most = max(cfg.requests)
        engines = {name: serving(method, pair, most) for name, method in compared.items()}
        logger = during.enter_context(tracked(cfg.logger, "serve", config, [config], names))
        if cfg.data is not None:
            logger.used(*Harvest.open(cfg.data).artifact)
        turns = served(cfg, engines, requests, journal)
        measurements = measured(cfg, requests, turns)
        facts = {"run": run_facts(cfg, pair), "predicted": predicted}
        text = page(
            cfg, measurements, predicted, facts["run"], compared_outputs(cfg, pair, requests, turns)
        )
        with replaced_folder(out, MARKER) as folder:
            write_checksummed(folder / MARKER, facts)
            table.save(measurements, folder / table.FILE)
            (folder / "table.md").write_text(text + "\n", encoding="utf-8")
        journal.remove()
        for size, rows in by_size(measurements):
            logger.log({f"{name}, {size} at once": each for name, each in speeds(rows).items()})
        logger.artifact("served", "results", out)
    print(f"\n{text}\n\nsaved in {cfg.out}")


class Side:
    """Our engine as one that serves: a `BatchedEngine` with room for `size` requests at once."""

    def __init__(self, engine: Any, size: int) -> None:
        self._batch = BatchedEngine(engine, size)

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        max_new_tokens: int,
        at_once: int,
    ) -> Mapping[str, Any]:
        """See `Serving`."""
        asked = [
            Asked(prompt, max_new_tokens, Sampler.seeded(seed))
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        start = perf_counter()
        traces = dict(self._batch.decode(asked, at_once))
        seconds = perf_counter() - start
        rounds = [round_ for trace in traces.values() for round_ in trace.rounds]
        drafts = [round_ for round_ in rounds if round_.draft_tokens]
        most = max((round_.accepted for round_ in drafts), default=0)
        return {
            "tokens": [traces[number].tokens for number in range(len(prompts))],
            "seconds": seconds,
            "rounds": len(rounds),
            "drafts": len(drafts),
            "draft_tokens": sum(len(round_.draft_tokens) for round_ in drafts),
            "accepted_tokens": sum(round_.accepted for round_ in drafts),
            "per_position": [sum(each.accepted > n for each in drafts) for n in range(most)],
        }


def serving(method: Method, pair: ModelPair, size: int) -> Serving:
    """Return the engine of a method, for at most `size` requests at once."""
    engine = methods.engine(method, pair)
    if isinstance(engine, Decoder):
        return Side(engine, size)
    if not isinstance(engine, Serving):
        raise UserError(
            f"methods: expected engines that decode many requests at once, got {method.name} of"
            f" {type(engine).__name__}. Leave it out"
        )
    return engine


def groups(cfg: DictConfig, requests: Sequence[Request], at_once: int) -> list[list[int]]:
    """Return the numbers of the requests of each group: each once, and the first ones again where
    the last ones would be fewer than `at_once`. by_category: those of every dataset and category
    for themselves."""
    size, apart = at_once * cfg.waves, cfg.by_category
    kinds = dict[Any, list[int]]()
    for number, each in enumerate(requests):
        kinds.setdefault((each.dataset, each.category) if apart else None, []).append(number)
    return [
        [numbers[place % len(numbers)] for place in range(first, min(first + size, whole))]
        for numbers in kinds.values()
        for whole in [-(-len(numbers) // at_once) * at_once]
        for first in range(0, whole, size)
    ]


def served(
    cfg: DictConfig,
    engines: Mapping[str, Serving],
    requests: Sequence[Request],
    journal: Journal[Group],
) -> Turns:
    """Let every method decode a group of requests before the next group; the order of methods
    rotates."""
    plan = [
        (size, repeat, number, group)
        for size, repeat in product(cfg.requests, range(cfg.repeats))
        for number, group in enumerate(groups(cfg, requests, size))
    ]
    names = alternating(list(engines))
    if len(journal.turns) < len(plan):
        for engine in engines.values():
            most = max(cfg.requests)
            engine.serve([requests[0].tokens.tolist()] * most, list(range(most)), WARM_UP, most)
    with tqdm(total=len(plan), initial=len(journal.turns), unit=" groups", desc="served") as bar:
        for size, repeat, number, group in plan:
            key = f"{size}/{repeat}/{number}"
            if key in journal.turns:
                continue
            asked = [requests[each] for each in group]
            seeds = [request_seed(cfg.seed, each, repeat) for each in asked]
            prompts, first, turn = [each.tokens.tolist() for each in asked], number % len(names), {}
            for name in names[first:] + names[:first]:
                said = engines[name].serve(prompts, seeds, cfg.max_new_tokens, size)
                known = [field.name for field in fields(Group) if field.name in said]
                turn[name] = Group(**{field: said[field] for field in known})
            journal.add(key, turn)
            bar.update()
    return journal.turns


def measured(cfg: DictConfig, requests: Sequence[Request], turns: Turns) -> pd.DataFrame:
    """Return a row for each method and group of requests."""
    rows = []
    for key, turn in sorted(turns.items()):
        size, _, number = (int(part) for part in key.split("/"))
        first = requests[groups(cfg, requests, size)[number][0]]
        of = {"dataset": first.dataset, "category": first.category} if cfg.by_category else {}
        for name, group in turn.items():
            emitted = sum(map(len, group.tokens))
            rows.append(
                {
                    "policy": name,
                    **of,
                    "prompt": f"group {number}",
                    "requests": size,
                    "emitted": emitted,
                    "rounds": np.nan if group.rounds is None else group.rounds,
                    "drafted": group.draft_tokens,
                    "accepted": group.accepted_tokens,
                    "seconds": group.seconds,
                    "drafts": group.drafts,
                    "accepted_at": group.per_position,
                }
            )
    order = {name: place for place, name in enumerate([cfg.against, *cfg.methods])}
    return table.table("timed", sorted(rows, key=lambda row: order[row["policy"]]))


# Predicted ----------------------------------------------------------------------------------------


def predictions(
    cfg: DictConfig, pair: ModelPair, compared: Mapping[str, Method]
) -> dict[str, list[Estimate]]:
    """Return by method the share of its drafts of which at least 1, 2, ... tokens are accepted, by
    replay of `cfg.data`; nothing for methods with copies, and with bounds that adapt."""
    if cfg.data is None:
        return {}
    harvest = Harvest.open(cfg.data)
    refuse_other_warps(cfg, harvest)
    refuse_other_pair(pair_identity(pair), harvest.context["pair"], f"pair: {cfg.pair.name}")
    drafts_of = {name: replayed(method, cfg.pair) for name, method in compared.items()}
    known = {name: each for name, each in drafts_of.items() if each is not None}
    stops = {name: rule for name, (rule, _) in known.items()}
    whole = read_table(harvest, cfg.split, stops.values(), Pair.of(cfg.pair))
    rounds = whole.shortened(min(cfg.max_new_tokens, harvest.max_new_tokens))
    found = {}
    for name, (rule, longest) in known.items():
        gamma = min(longest, harvest.gamma)
        _, steps = Replayer(rounds, gamma).walk(rule.policy(rounds), setting_of(rule), first=1)
        if not steps:  # responses of one token
            continue
        drafts = sum(step.live & (step.drafted > 0) for step in steps)
        reached = (sum(step.live & (step.accepted > n) for step in steps) for n in range(gamma))
        every = [ratio_of(np.asarray(each, float), np.asarray(drafts, float)) for each in reached]
        found[name] = [share for share in every if share.value > 0]
    return found


def replayed(method: Method, pair: DictConfig) -> tuple[TunableRule, int] | None:
    """Return the stop rule and the longest draft of a method whose drafts are those of the pair's
    draft model alone, under one rule; else None."""
    engine = method.settings.engine
    if not engine.get("speculation"):
        return None
    longest = int(engine.speculation.num_speculative_tokens)
    if engine.speculation.method == "draft_model":
        return None if pair.get("assistant") else (Fixed(longest), longest)
    if engine.proposer is None:
        return None
    file = read_proposer(engine.proposer, "engine.proposer")
    structure, draft = file.made_structure(), Path(file.draft).expanduser()
    same = draft == Path(pair.draft).expanduser().absolute()
    if not same or type(structure) is not Chain or file.adaptive:
        return None
    stop = file.made_stop()
    return (stop, min(longest, structure.gamma_max)) if isinstance(stop, TunableRule) else None


# Outputs ------------------------------------------------------------------------------------------


def compared_outputs(
    cfg: DictConfig, pair: ModelPair, requests: Sequence[Request], turns: Turns
) -> list[str]:
    """Return for every method of a greedy comparison how many outputs equal those without a draft,
    and how near a tie each difference is; vLLM's arithmetic depends on what runs together."""
    if cfg.warp.temperature > 0:
        return []
    asked, decoded = list[Request](), dict[str, list[Trace]]()
    for key, turn in turns.items():
        size, _, number = (int(part) for part in key.split("/"))
        these = [requests[each] for each in groups(cfg, requests, size)[number]]
        asked += these
        for name, group in turn.items():
            decoded.setdefault(name, []).extend(
                Trace(len(request.tokens), tokens, [], 0.0, 0.0, prompt_id=request.prompt_id)
                for request, tokens in zip(these, group.tokens, strict=True)
            )
    plain, prompts = decoded.pop(cfg.against), [request.tokens for request in asked]
    differences = {
        name: greedy_differences(pair.target, prompts, each, plain, pair.target.model.dtype)
        for name, each in decoded.items()
    }
    against = "plain decoding" if cfg.against == "autoregressive" else f"those of {cfg.against}"
    return difference_lines(differences, len(plain), against)


# The page -----------------------------------------------------------------------------------------


def by_size(measurements: pd.DataFrame) -> Iterator[tuple[int, pd.DataFrame]]:
    for size, rows in measurements.groupby("requests", sort=True):
        yield int(size), rows


def speeds(rows: pd.DataFrame) -> dict[str, float]:
    """Return tokens per second by method."""
    totals = rows.groupby("policy")[["emitted", "seconds"]].sum()
    found: dict[str, float] = (totals["emitted"] / totals["seconds"]).to_dict()
    return found


def page(
    cfg: DictConfig,
    measurements: pd.DataFrame,
    predicted: Mapping[str, Sequence[Estimate]],
    run: Mapping[str, Any],
    outputs: Sequence[str],
) -> str:
    """Return the answer, the speeds by requests at once, and acceptance by position."""
    ratios = {size: table.compare(rows, cfg.against) for size, rows in by_size(measurements)}
    best = {size: max(each, key=lambda name: each[name].value) for size, each in ratios.items()}
    answer = [
        f"{size} at once: {best[size]}, {with_interval(each[best[size]], unit='x')} {cfg.against}"
        for size, each in ratios.items()
    ]
    parts = [
        "Fastest, measured: " + "; ".join(answer) + ".",
        f"# {heading(cfg)}",
        f"{hardware(run)} {METHOD.replace('prompts', 'groups of requests')}.",
        "## Tokens per second, by requests at once",
        (
            "The requests of a group start together."
            if cfg.waves == 1
            else f"A group has {cfg.waves} requests for each of those at once, the last one maybe"
            " fewer; as one ends the next starts."
        )
        + " A group's time goes from the first prefill to the last"
        f" token. Speed-ups are over {cfg.against} with as many requests. Where the last group"
        " lacks prompts the first ones are asked again; a single group has no interval.",
        markdown(["method", *map(str, ratios)], speed_lines(cfg, measurements)),
        *by_category(cfg, measurements),
        "\n".join(outputs),
        "## Acceptance by position",
        "Of all drafts, those of which at least so many tokens were accepted (vLLM's per-position"
        " acceptance). acceptance length: 1 + accepted tokens per draft. tau (EAGLE; Spec-Bench's"
        " mean accepted tokens): tokens over the rounds of each request, those without a draft"
        " included; vLLM does not count them.",
        acceptance(measurements, predicted),
    ]
    return "\n\n".join(parts)


def speed_lines(cfg: DictConfig, measurements: pd.DataFrame) -> list[list[str]]:
    """Return for every method its tokens per second and speed-up by requests at once."""
    lines = {name: [name] for name in dict.fromkeys([cfg.against, *cfg.methods])}
    for _, rows in by_size(measurements):
        speed, over = speeds(rows), table.compare(rows, cfg.against)
        for name, line in lines.items():
            line.append(f"{speed[name]:.1f} {with_interval(over[name], unit='x')}")
    return list(lines.values())


def by_category(cfg: DictConfig, measurements: pd.DataFrame) -> list[str]:
    """Return the same by set and category, where groups were asked by them."""
    if not cfg.by_category:
        return []
    lines = [
        [f"{dataset} - {category}" if category else str(dataset), *line]
        for (dataset, category), rows in measurements.groupby(["dataset", "category"])
        for line in speed_lines(cfg, rows)
    ]
    sizes = map(str, sorted(measurements["requests"].unique()))
    header = ["task", "method", *sizes]
    return ["## Tokens per second, by set and category", markdown(header, lines)]


def acceptance(measurements: pd.DataFrame, predicted: Mapping[str, Sequence[Estimate]]) -> str:
    """Return a table by method and requests at once; predicted: by replay of a harvest."""
    rows, most = list[list[str]](), 0
    for name, mine in measurements.groupby("policy", sort=False):
        if not mine["drafts"].sum():
            continue
        lines = {
            f"{size}, measured": (
                "-" if of["rounds"].isna().any() else f"{ratio(of, 'emitted', 'rounds').value:.2f}",
                [one for one in table.by_position(of) if one.value > 0],
            )
            for size, of in by_size(mine)
            if of["drafts"].sum()
        }
        if name in predicted:
            lines = {"1, predicted": ("-", list(predicted[str(name)])), **lines}
        for label, (tau, each) in lines.items():
            most = max(most, len(each))
            length = f"{1 + sum(one.value for one in each):.2f}"
            shown = (with_interval(one, ".3f") for one in each)
            rows.append([printable(str(name)), label, tau, length, *shown])
    padded = [row + [""] * (most + 4 - len(row)) for row in rows]
    places = (str(n + 1) for n in range(most))
    return markdown(["method", "requests", TAU, "acceptance length", *places], padded)
