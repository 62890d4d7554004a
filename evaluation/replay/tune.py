"""Choose the threshold of every stop rule for your hardware: replay a harvest, price the counts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from data_gen.prompts import load_prompts
from data_gen.requests import requests_of_split
from data_gen.storage.dataset import Harvest
from decoding.cost import CostTable, observed_cost, regress_traces, write_cost
from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.models.loading import load_pair, pair_identity
from decoding.models.machine import setup_facts
from decoding.sampling import Sampler
from decoding.settings import Pair
from decoding.stopping.base import TunableRule
from decoding.trace import Trace
from evaluation.decode import Engine, request_seed
from evaluation.page import beside, simulated, times
from evaluation.replay import read, thresholds, tuning
from evaluation.replay.tuning import GrowsByWorth, Sample
from evaluation.table import BASELINE, markdown, save, with_interval
from predictors.base import read_config
from runtime.errors import UserError
from runtime.files import checked_folder, file_name, refuse_foreign_file, table_beside
from runtime.intervals import METHOD, Estimate
from runtime.job import command_line

MEASURED = ("measure", "measured")  # costs of this machine

NOT_REPLAYED = {
    "rate": "replay finds the rate itself",
    "copies": "no harvest says what could be copied",
}
"""Settings of a structure that replay cannot follow, and why."""


def tune(cfg: DictConfig) -> None:
    """Write the thresholds chosen from a harvest and costs, and the measurements behind them."""
    suffix = "" if chosen("cost") in MEASURED else f"-{chosen('cost')}"
    out = out_file(cfg, f"thresholds-T{cfg.warp.temperature}{suffix}")
    parquet = table_beside(out)
    if "_target_" not in cfg.cost:
        refuse_foreign_file(Path(cfg.cost.file), "tune", "cost.file")
    harvest, elsewhere = read.open_harvests(cfg)
    stops = read.tunable_rules(cfg, harvest)
    with read.tracking(cfg, "tune", elsewhere) as logger:
        for name in stops:
            if folder := cfg.rules[name].get("checkpoint"):
                trained = read_config(Path(folder), f"rules.{name}.checkpoint")
                logger.used(trained["predictor"], "predictor", Path(folder))  # as train.py names it
        facts, measurements = tuned(cfg, harvest, elsewhere, stops)
        thresholds.write(out, facts)
        save(measurements, parquet)
        for name, rule in facts["results"]["chosen"]["rules"].items():
            logger.log({f"{name}/threshold": rule["threshold"], f"{name}/speedup": rule["speedup"]})
        logger.artifact("thresholds", "thresholds", out)
    text = report(facts) if cfg.verbose else f"{answer(facts)}\n\n{table(facts, 'chosen')}"
    rest = (
        f"saved {out} ({len(facts['results'])} tables of costs; verbose=true prints them), and the"
        f" measurements of every threshold in {parquet}"
    )
    print("", text, *simulated(cfg.pair), rest, sep="\n\n")


def chosen(group: str) -> str:
    """Return the choice of a config group."""
    return str(HydraConfig.get().runtime.choices[group])


def out_file(cfg: DictConfig, default: str) -> Path:
    """Return the file to write, `runs/<pair>-<default>.json` where `out` is null."""
    path = f"runs/{file_name(cfg.pair.name)}-{default}.json" if cfg.out is None else cfg.out
    out = checked_folder("out", path, "file")
    refuse_foreign_file(out, "tune")
    return out


def tuned(
    cfg: DictConfig,
    harvest: Harvest,
    elsewhere: Sequence[Harvest],
    stops: Mapping[str, TunableRule],
) -> tuple[dict[str, Any], pd.DataFrame]:
    """Return the content of the file of thresholds, and the measurements behind it."""
    given = {"chosen": cfg.cost, **cfg.what_if}
    tables = {
        name: read.given_cost(node, harvest, "cost" if node is cfg.cost else f"what_if.{name}")
        for name, node in given.items()
        if "_target_" in node
    }
    structures = {name: growing(cfg, name) for name in cfg.methods if name in cfg.structures}
    gamma_max = cfg.gamma_max or harvest.gamma

    def replayed(on: Harvest, split: str) -> Sample:
        asked = [*stops.values(), *structures.values()]
        prompts = read.replayer(cfg, gamma_max, on, split, asked)
        return tuning.sample(
            prompts, tuning.candidates_of(cfg, stops, prompts), structures, cfg.points
        )

    splits = {split: replayed(harvest, split) for split in (cfg.choose, cfg.judge)}
    chosen_on, judged_on = splits.values()
    if "chosen" not in tables:
        tables = {"chosen": measured_cost(cfg, harvest, stops), **tables}
    tables = {name: with_questions(cfg, cost) for name, cost in tables.items()}
    rates = {name: tuning.settled_rates(chosen_on, cost) for name, cost in tables.items()}

    def results(on: Sample) -> dict[str, Any]:
        return {
            name: tuning.result(chosen_on, on, cost, rates[name]) for name, cost in tables.items()
        }

    greedy = harvest.greedy
    rows = [tuning.candidate_rows(each.candidates, split, greedy) for split, each in splits.items()]
    rules = {}
    for name, stop in stops.items():
        folder = cfg.rules[name].get("checkpoint")
        key = f"rules.{name}.checkpoint"
        rules[name] = {
            "setting": stop.setting,
            "stop": thresholds.rule_settings(cfg.rules[name], stop.setting),
            "checkpoint": thresholds.checkpoint_hash(folder, key) if folder else None,
        }
    facts = {
        **harvest.context,
        "gamma": gamma_max,
        "max_new_tokens": cfg.max_new_tokens or harvest.max_new_tokens,
        "data": {"folder": str(cfg.data), **harvest.origin},
        "cost": chosen("cost"),
        "chosen_on": cfg.choose,
        "judged_on": cfg.judge,
        "rules": rules,
        "command": command_line(),
        "measured_on": tables["chosen"].measured_on,
        "results": results(judged_on),
        "elsewhere": {str(each.folder): results(replayed(each, "all")) for each in elsewhere},
        "frontier": tuning.frontiers(judged_on.candidates),
        "oracle_calls": tuning.oracle_totals(judged_on.replayer.table) if greedy else None,
    }
    return facts, pd.concat(rows, ignore_index=True)


def growing(cfg: DictConfig, name: str) -> GrowsByWorth:
    """Return the structure of that name; its own table of costs, which may not be measured yet, is
    not read. Raises UserError for one without `worth`, or with a setting that replay does not
    support."""
    settings: Any = OmegaConf.to_container(cfg.structures[name], resolve=True)
    for key, why in NOT_REPLAYED.items():
        if (given := settings.get(key)) is not None:
            raise UserError(
                f"structures.{name}.{key}: expected null, for {why}, got {given}. Write"
                f" structures.{name}.{key}=null"
            )
    if settings.pop("cost", None):
        settings["cost"] = {"_target_": "decoding.cost.cost_table", "draft": 1, "target": 1}
    structure = instantiate(
        DictConfig({"structures": {name: settings}}).structures[name]  # errors name the key
    )
    if not isinstance(structure, GrowsByWorth):
        raise UserError(
            f"structures.{name}: expected a structure that can be replayed, got"
            f" {type(structure).__name__}. Give one that says what a draw is `worth`"
        )
    return structure


# Costs --------------------------------------------------------------------------------------------


def measured_cost(cfg: DictConfig, harvest: Harvest, stops: Mapping[str, TunableRule]) -> CostTable:
    """Measure the costs of decoding on this machine, and save them for cost=measured.

    Decodes prompts plainly, with fixed draft lengths and with every rule whose own time counts,
    request by request in turn."""
    pair = load_pair(Pair.of(cfg.pair))
    identity, setup = pair_identity(pair), setup_facts(pair)
    read.refuse_other_pair(identity, harvest.context["pair"], f"pair: {cfg.pair.name}")
    warp, draft_warp, cost = instantiate(cfg.warp), instantiate(cfg.draft_warp), cfg.cost
    longest = max(cfg.gamma_max or harvest.gamma, *cost.gammas)
    asked = {rule: instantiate(cfg.rules[rule]) for rule in same_questions(cfg).values()}
    engines: dict[str, Engine] = {
        BASELINE: AutoregressiveEngine(pair, warp, frozenset(pair.eos_ids)),
        **{
            f"fixed {gamma}": read.engine(pair, None, gamma, warp, draft_warp)
            for gamma in cost.gammas
        },
        **{
            name: read.engine(pair, stop, longest, warp, draft_warp)
            for name, stop in {**asked, **stops}.items()
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
    fit = regress_traces([trace for decoded in traces.values() for trace in decoded])
    plain = traces.pop(BASELINE)
    measured = replace(observed_cost(traces, plain), pair=identity, measured_on=setup)
    facts = {
        "seconds": measured.to_dict(),
        "regression": asdict(fit),
        "pair": identity,
        "measured_on": setup,
        "command": command_line(),
    }
    write_cost(cost.file, facts)
    rows = zip(measured.target.rows, measured.target.seconds, strict=True)
    target = ", ".join(f"{count}: {seconds * 1e3:.1f}" for count, seconds in rows)
    calls = ", ".join(f"{rule} {seconds * 1e3:.2f}" for rule, seconds in measured.calls.items())
    print(
        f"ms: draft {measured.draft * 1e3:.2f}; target by rows {target}; without a draft"
        f" {measured.autoregressive * 1e3:.1f}; per number a rule computes: {calls}\n{fit}; saved"
        f" {cost.file}"
    )
    return measured


def same_questions(cfg: DictConfig) -> dict[str, str]:
    """Return by structure the rule that asks the same predictor, if there is one: its questions
    take the same time."""
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


def with_questions(cfg: DictConfig, cost: CostTable) -> CostTable:
    """Return the table with prices of structures' questions, unless it has them: those of a rule
    that asks the same predictor."""
    same = same_questions(cfg)
    calls = {name: cost.calls[rule] for name, rule in same.items() if rule in cost.calls}
    return replace(cost, calls={**calls, **cost.calls})


# In words -----------------------------------------------------------------------------------------


HEAD = ["rule", "threshold", "speculate", "speed-up, modelled", "regret to the oracle"]
HEAD += ["over the best other", "discard", "verification"]


def answer(facts: Mapping[str, Any]) -> str:
    """Return two lines: which rule to use with which threshold, then how sure that is."""
    result = facts["results"]["chosen"]
    rules, best = result["rules"], result["rules"].get(result["advice"])
    top = best or next(iter(rules.values()))
    speed = Estimate(top["speedup"], *top["interval"])
    others = {
        name: Estimate(choice["gain"], *choice["gain_interval"])
        for name, choice in rules.items()
        if best and choice["other"] == best["rule"]
    }
    label = f"{top['rule']} at {top['threshold']:.3g}"
    first = " ".join([use(label, speed, best is not None), *beside(others)])
    return (
        f"{first}\nThreshold chosen on {facts['chosen_on']} prompts of {facts['data']['folder']},"
        f" speed of {facts['judged_on']} prompts ({METHOD}), costs {facts['cost']}; a rule that"
        f" knew every verdict would reach {result['oracle_speedup']:.2f} times."
    )


def use(label: str, speed: Estimate, pays: bool) -> str:
    """Return the advice: use what a label names, or no draft if it does not pay."""
    if pays:
        return f"Use {label}: {times(speed)} plain decoding, modelled."
    return (
        "Use plain decoding: no rule pays beyond the noise at these costs. The best,"
        f" {label}, is at {times(speed)}."
    )


def report(facts: Mapping[str, Any]) -> str:
    """Return the full report: a table per cost table and set of prompts, the frontiers, the regret
    of structures whose rate is not tuned, and the limits of their replay."""
    judged = {None: facts["results"], **facts["elsewhere"]}
    parts = [answer(facts)]
    parts += [table(facts, cost, folder) for folder, results in judged.items() for cost in results]
    untuned = [
        [
            *(structure, cost, folder or facts["judged_on"], f"{loss['rate']:.3g}"),
            *(f"{loss['regret']:.2%}", f"{loss['chain_regret']:.2%}"),
        ]
        for folder, results in judged.items()
        for cost, result in results.items()
        for structure, loss in result["untuned"].items()
    ]
    if untuned:
        head = ["structure", "cost", "prompts", "rate", "regret", "of a chain"]
        law = "the most probable tokens, point masses"
        if facts["draft_warp"]["temperature"] > 0:
            law = "drawn without replacement (RRSw)"
        parts += [
            "## without tuning: seconds over those at the best rate for the same prompts\n\n"
            + markdown(head, untuned),
            f"structures are replayed as a harvest has them: a path of {facts['gamma']} tokens at"
            f" most, at most two leaves beside each of them, {law}, and nothing drawn after a leaf",
        ]
    parts += [
        f"{rule}: its frontier dominates {edge['fixed_dominated']:.0%} of that of fixed lengths"
        for rule, edge in facts["frontier"].items()
        if edge["fixed_dominated"] is not None
    ]
    if facts["oracle_calls"]:
        draft, target = facts["oracle_calls"]
        parts.append(
            f"oracle of SpecDec++, drafts of any length: {draft} draft and {target} target calls"
        )
    parts.append(
        f"thresholds and advice chosen on {facts['chosen_on']}, figures of {facts['judged_on']};"
        " prefill is left out"
    )
    return "\n\n".join(parts)


def table(facts: Mapping[str, Any], cost: str, folder: str | None = None) -> str:
    """Return the results of one cost table. folder: of the prompts judged on; None: those of the
    harvest chosen on."""
    result = (facts["elsewhere"][folder] if folder else facts["results"])[cost]
    name = f"{cost} ({facts['cost']})" if cost == "chosen" else cost
    advised = result["rules"].get(result["advice"])
    calls = result["cost"]["calls"]
    unpriced = ", ".join(each for each in result["structures"] if each not in calls)
    speed = f" {advised['speedup']:.2f}x" if advised else ""
    where = f"{name}, {folder}" if folder else name
    title = f"## cost {where}: {result['advice']}{speed}; oracle {result['oracle_speedup']:.2f}x"
    if unpriced or not calls:
        title += f"; predictions{f' of {unpriced}' if calls else ''} cost nothing here"
    choices = {**result["rules"], **result["structures"], **result["bounds"]}
    return f"{title}\n\n{markdown(HEAD, [row(choice) for choice in choices.values()])}"


def row(choice: Mapping[str, Any]) -> list[str]:
    speed = Estimate(choice["speedup"], *choice["interval"])
    gain = Estimate(choice["gain"], *choice["gain_interval"])
    return [
        *(choice["rule"], f"{choice['threshold']:.3g}", "yes" if choice["speculate"] else "no"),
        *(with_interval(speed, ".3f"), f"{choice['regret']:.1%}"),
        f"{choice['other']}: {with_interval(gain, '.3f')}" if choice["other"] else "-",
        *(f"{choice['discard_rate']:.3f}", f"{choice['verification_rate']:.3f}"),
    ]
