"""What decoding costs on this machine, measured on real decodes: cost=measure."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig
from tqdm import tqdm

from data_gen.prompts import load_prompts
from data_gen.requests import requests_of_split
from data_gen.storage.dataset import Harvest
from decoding.cost import CostTable, observed_cost, regress_traces, write_cost
from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.models.loading import ModelPair, load_pair, pair_identity
from decoding.models.machine import setup_facts
from decoding.sampling import Sampler
from decoding.settings import Pair
from decoding.stopping.base import TunableRule
from decoding.trace import Trace
from evaluation.decode import Engine, request_seed
from evaluation.replay.candidates import engine, refuse_other_pair
from runtime.job import command_line

PLAIN = "autoregressive"


def measured_cost(cfg: DictConfig, harvest: Harvest, stops: Mapping[str, TunableRule]) -> CostTable:
    """From real decodes, saved for cost=measured."""
    asked = {rule: instantiate(cfg.rules[rule]) for rule in same_questions(cfg).values()}
    pair = load_pair(Pair.of(cfg.pair))
    identity, setup = pair_identity(pair), setup_facts(pair)
    refuse_other_pair(identity, harvest.context["pair"], f"pair: {cfg.pair.name}")
    traces = decode_some(cfg, pair, cfg.gamma_max or harvest.gamma, {**asked, **stops})
    plain = traces.pop(PLAIN)
    table = replace(observed_cost(traces, plain), pair=identity, measured_on=setup)
    fit = regress_traces([trace for found in (plain, *traces.values()) for trace in found])
    facts = {
        "seconds": table.to_dict(),
        "regression": asdict(fit),
        "pair": identity,
        "measured_on": setup,
        "command": command_line(),
    }
    write_cost(cfg.cost.file, facts)
    print(f"{cost_lines(table)}\n{fit}; saved {cfg.cost.file}")
    return table


def decode_some(
    cfg: DictConfig, pair: ModelPair, gamma_max: int, stops: Mapping[str, TunableRule]
) -> dict[str, list[Trace]]:
    """Traces of plain decoding, of fixed draft lengths and of every rule whose own time counts,
    request by request in turn."""
    warp, draft_warp, cost = instantiate(cfg.warp), instantiate(cfg.draft_warp), cfg.cost
    most = max(gamma_max, *cost.gammas)
    engines: dict[str, Engine] = {
        PLAIN: AutoregressiveEngine(pair, warp, frozenset(pair.eos_ids)),
        **{f"fixed {gamma}": engine(pair, None, gamma, warp, draft_warp) for gamma in cost.gammas},
        **{
            name: engine(pair, stop, most, warp, draft_warp)
            for name, stop in stops.items()
            if stop.calls_cost
        },
    }
    requests = requests_of_split(
        load_prompts(cfg.dataset), pair, cost.max_new_tokens, "calibration", cfg.splits, cost.limit
    )
    traces: dict[str, list[Trace]] = {name: [] for name in engines}
    for request in tqdm(requests, desc="cost", unit="prompt"):
        for name, each in engines.items():
            sampler = Sampler.seeded(request_seed(cfg.seed, request, 0))
            traces[name].append(each.decode(request.tokens, cost.max_new_tokens, sampler))
    return traces


def same_questions(cfg: DictConfig) -> dict[str, str]:
    """Of the structures to compare, by name, the rule that asks the same predictor, where there is
    one: a question takes it as long."""
    rules = {
        Path(rule.checkpoint).resolve(): name
        for name, rule in cfg.rules.items()
        if "checkpoint" in rule
    }
    folders = {
        name: cfg.structures[name].get("checkpoint")
        for name in cfg.methods
        if name in cfg.structures
    }
    asked = {name: rules.get(Path(folder).resolve()) for name, folder in folders.items() if folder}
    return {name: rule for name, rule in asked.items() if rule is not None}


def with_questions(table: CostTable, same: Mapping[str, str]) -> CostTable:
    """What a structure asks has the price of what the rule asks that is the `same`, unless the
    table says another one."""
    known = {name: table.calls[rule] for name, rule in same.items() if rule in table.calls}
    return replace(table, calls={**known, **table.calls})


def cost_lines(table: CostTable) -> str:
    rows = ", ".join(
        f"{count}: {seconds * 1e3:.1f}"
        for count, seconds in zip(table.target.rows, table.target.seconds, strict=True)
    )
    calls = ", ".join(f"{rule} {seconds * 1e3:.2f}" for rule, seconds in table.calls.items())
    return (
        f"ms: draft {table.draft * 1e3:.2f}; target by rows {rows}; without a draft"
        f" {table.autoregressive * 1e3:.1f}; per number a rule computes: {calls}"
    )
