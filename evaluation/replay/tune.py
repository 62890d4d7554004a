"""Choose the threshold of every stop rule for your hardware: replay a harvest, price the counts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from data_gen.storage.dataset import Harvest
from decoding.cost import CostTable
from decoding.stopping.base import TunableRule
from evaluation.page import beside, times
from evaluation.replay import thresholds
from evaluation.replay.candidates import (
    candidates_of,
    check_sizes,
    given_cost,
    refuse_foreign_checkpoint,
    refuse_other_harvests,
    refuse_other_warps,
    replayer,
)
from evaluation.replay.growing import GrowsByWorth, Sample, sample, settled_rates, untuned
from evaluation.replay.measuring import measured_cost, same_questions, with_questions
from evaluation.replay.read import Asks
from evaluation.replay.tuning import (
    Candidate,
    Choice,
    Pick,
    candidate_rows,
    dominated_share,
    frontier,
    hindsight,
    judge,
    oracle_totals,
    picks,
    span,
)
from evaluation.table import markdown
from runtime.errors import UserError
from runtime.files import checked_folder, file_name, refuse_foreign_file
from runtime.intervals import METHOD, Estimate
from runtime.job import command_line

MEASURED = ("measure", "measured")  # costs of this machine

NOT_REPLAYED = {
    "rate": "replay finds the rate itself",
    "copies": "no harvest says what could be copied",
}
"""Settings of a structure that replay cannot follow, and why."""


def tuned(
    cfg: DictConfig,
    harvest: Harvest,
    elsewhere: Sequence[Harvest],
    stops: Mapping[str, TunableRule],
) -> tuple[dict[str, Any], pd.DataFrame]:
    """Return what the file of thresholds holds, and the measurements that it rests on."""
    given = {"chosen": cfg.cost, **cfg.what_if}
    tables = {
        name: given_cost(node, harvest, "cost" if node is cfg.cost else f"what_if.{name}")
        for name, node in given.items()
        if "_target_" in node
    }
    structures = {name: growing(cfg, name) for name in cfg.methods if name in cfg.structures}
    gamma_max = cfg.gamma_max or harvest.gamma

    def replayed(on: Harvest, split: str) -> Sample:
        asked: list[Asks] = [*stops.values(), *structures.values()]
        found = replayer(cfg, gamma_max, on, split, asked)
        return sample(found, candidates_of(cfg, stops, found), structures, cfg.points)

    chosen_on, judged_on = (replayed(harvest, split) for split in (cfg.choose, cfg.judge))
    if "chosen" not in tables:
        tables = {"chosen": measured_cost(cfg, harvest, stops), **tables}
    same = same_questions(cfg)
    tables = {name: with_questions(table, same) for name, table in tables.items()}
    rates = {name: settled_rates(chosen_on, table) for name, table in tables.items()}

    def judged(found: Sample) -> dict[str, Any]:
        return {name: tune(chosen_on, found, table, rates[name]) for name, table in tables.items()}

    splits = {cfg.choose: chosen_on, cfg.judge: judged_on}
    measurements = pd.concat(
        [
            candidate_rows(found.candidates, split, found.table.greedy)
            for split, found in splits.items()
        ],
        ignore_index=True,
    )
    facts = {
        **about(cfg, harvest, stops),
        "measured_on": tables["chosen"].measured_on,
        "results": judged(judged_on),
        "elsewhere": {str(each.folder): judged(replayed(each, "all")) for each in elsewhere},
        "frontier": frontiers(judged_on.candidates),
        "oracle_calls": oracle_totals(judged_on.table) if judged_on.table.greedy else None,
    }
    return facts, measurements


def tunable(cfg: DictConfig, name: str) -> TunableRule:
    """The rule of that name. Raises UserError for one that has no replay policy."""
    stop = instantiate(cfg.rules[name])
    if not isinstance(stop, TunableRule):
        raise UserError(
            f"rules.{name}: expected a rule that can be replayed, got {type(stop).__name__}. Give"
            " one that has a `policy`"
        )
    return stop


def growing(cfg: DictConfig, name: str) -> GrowsByWorth:
    """The structure of that name; its own table of costs, which may not be measured yet, is not
    read. Raises UserError for one that says nothing of worth, or that has a setting which replay
    cannot follow."""
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


def cost_name() -> str:
    """The choice of `cost`."""
    return str(HydraConfig.get().runtime.choices["cost"])


def out_file(cfg: DictConfig) -> Path:
    """What a run with the costs of another machine finds is kept apart."""
    if cfg.check:
        default = f"runs/{file_name(cfg.pair.name)}-replay-check.json"
        return checked_folder("out", cfg.out or default, "file")
    suffix = "" if cost_name() in MEASURED else f"-{cost_name()}"
    default = f"runs/{file_name(cfg.pair.name)}-thresholds-T{cfg.warp.temperature}{suffix}.json"
    return checked_folder("out", default if cfg.out is None else cfg.out, "file")


def check(cfg: DictConfig, harvest: Harvest, elsewhere: Sequence[Harvest]) -> None:
    """Refuse settings that cannot work, before anything is computed."""
    check_sizes(cfg, harvest)
    if "_target_" not in cfg.cost:
        refuse_foreign_file(Path(cfg.cost.file), "tune", "cost.file")
    refuse_other_warps(cfg, harvest)
    gamma_max = cfg.gamma_max or harvest.gamma
    for name in cfg.methods:
        group = "rules" if name in cfg.rules else "structures"
        if "checkpoint" in cfg[group][name]:
            folder = Path(cfg[group][name].checkpoint)
            refuse_foreign_checkpoint(folder, harvest, f"{group}.{name}.checkpoint", gamma_max)
    refuse_other_harvests(cfg, harvest, elsewhere)


def about(cfg: DictConfig, harvest: Harvest, stops: Mapping[str, TunableRule]) -> dict[str, Any]:
    """What the thresholds belong to."""
    rules = {}
    for name, stop in stops.items():
        folder, setting = cfg.rules[name].get("checkpoint"), stop.setting
        rules[name] = {
            "setting": setting,
            "stop": thresholds.rule_settings(cfg.rules[name], setting),
            "checkpoint": (
                thresholds.checkpoint_hash(folder, f"rules.{name}.checkpoint") if folder else None
            ),
        }
    return {
        **harvest.context,
        "gamma": cfg.gamma_max or harvest.gamma,
        "max_new_tokens": cfg.max_new_tokens or harvest.max_new_tokens,
        "data": {"folder": str(cfg.data), "sha256": harvest.sha256},
        "cost": cost_name(),
        "chosen_on": cfg.choose,
        "judged_on": cfg.judge,
        "rules": rules,
        "command": command_line(),
    }


# Judging ------------------------------------------------------------------------------------------


def tune(
    chosen_on: Sample, judged_on: Sample, table: CostTable, rates: Mapping[str, float]
) -> dict[str, Any]:
    """What is known about one cost table. rates: of every structure."""
    least = hindsight(judged_on.replayer, table)
    rules = picks(chosen_on.candidates, judged_on.candidates, table)
    bounds = picks(chosen_on.bounds, judged_on.bounds, table)
    grown = [
        Pick(*(found.growers[name].at(table, rate) for found in (chosen_on, judged_on)))
        for name, rate in rates.items()
    ]
    choices, structures, most = (
        judge(found, rules, table, least) for found in (rules, grown, bounds)
    )
    plain = float(table.plain(judged_on.candidates[0].counts).sum())
    return {
        "cost": table.to_dict(),
        "oracle_speedup": plain / float(least.sum()),
        "advice": next(
            (choice.rule for choice in choices if choice.speculate), thresholds.NO_ADVICE
        ),
        "rules": by_rule(choices),
        "structures": by_rule(structures),
        "bounds": by_rule(most),
        "untuned": untuned(chosen_on, judged_on, table, rates),
    }


def by_rule(choices: Sequence[Choice]) -> dict[str, Any]:
    return {choice.rule: asdict(choice) for choice in choices}


def frontiers(candidates: Sequence[Candidate]) -> dict[str, Any]:
    """Of every rule: its discard and verification rates, and the share of fixed draft lengths that
    it dominates."""
    by_rule = {
        rule: [c for c in candidates if c.rule == rule]
        for rule in dict.fromkeys(c.rule for c in candidates)
    }
    edges = {rule: frontier(found) for rule, found in by_rule.items()}
    fixed = edges.get("fixed", [])
    return {
        rule: {
            "points": [[candidate.threshold, *candidate.rates] for candidate in found],
            "fixed_dominated": dominated_share(found, fixed) if fixed and rule != "fixed" else None,
        }
        for rule, found in edges.items()
    }


# In words -----------------------------------------------------------------------------------------


HEAD = ["rule", "threshold", "speculate", "speed-up, modelled", "95 % interval"]
HEAD += ["regret to the oracle", "over the best other", "discard", "verification"]


def answer(facts: Mapping[str, Any]) -> str:
    """Return two lines: which rule to use with which threshold, then how sure that is."""
    found = facts["results"]["chosen"]
    choices = {name: Choice(**choice) for name, choice in found["rules"].items()}
    best = choices.get(found["advice"])
    if best is None:
        first = "Use plain decoding: no rule pays beyond the noise at these costs."
        if choices:
            top = next(iter(choices.values()))
            first += f" The best, {at(top)}, is at {times(estimate(top.speedup, top.interval))}."
    else:
        speed = times(estimate(best.speedup, best.interval))
        others = {
            choice.rule: estimate(choice.gain, choice.gain_interval)
            for choice in choices.values()
            if choice.other == best.rule
        }
        words = [f"Use {at(best)}: {speed} plain decoding, modelled.", *beside(others)]
        first = " ".join(words)
    return (
        f"{first}\nThreshold chosen on {facts['chosen_on']} prompts of {facts['data']['folder']},"
        f" speed of {facts['judged_on']} prompts ({METHOD}), costs {facts['cost']}; a rule that"
        f" knew every verdict would reach {found['oracle_speedup']:.2f} times."
    )


def at(choice: Choice) -> str:
    return f"{choice.rule} at {choice.threshold:.3g}"


def estimate(value: float, interval: tuple[float, float]) -> Estimate:
    """Return a value with its interval, none where that is NaN."""
    return Estimate(value) if any(map(math.isnan, interval)) else Estimate(value, *interval)


def short(facts: Mapping[str, Any]) -> str:
    """Return the answer and the table of the chosen costs."""
    return f"{answer(facts)}\n\n{table(facts, 'chosen', facts['results']['chosen'])}"


def report(facts: Mapping[str, Any]) -> str:
    """Return everything: a table per cost table and set of prompts, and what the frontiers say."""
    parts = [answer(facts)]
    parts += [table(facts, name, found) for name, found in facts["results"].items()]
    for folder, results in facts["elsewhere"].items():
        parts += [table(facts, name, found, folder) for name, found in results.items()]
    parts += [*transfers(facts), *left_out(facts)]
    for rule, edge in facts["frontier"].items():
        if edge["fixed_dominated"] is not None:
            parts.append(
                f"{rule}: its frontier dominates {edge['fixed_dominated']:.0%} of that of fixed"
                " lengths"
            )
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


def table(
    facts: Mapping[str, Any], cost: str, found: Mapping[str, Any], folder: str | None = None
) -> str:
    """Of one cost table. folder: of the prompts it is judged on; None: those of the harvest that it
    is chosen on."""
    called = f"{cost} ({facts['cost']})" if cost == "chosen" else cost
    where = f", {folder}" if folder else ""
    choices = {**found["rules"], **found["structures"], **found["bounds"]}
    rows = [row(Choice(**choice)) for choice in choices.values()]
    return f"## cost {called}{where}{heading(found)}\n\n{markdown(HEAD, rows)}"


def heading(found: Mapping[str, Any]) -> str:
    """The advice and how it does on the prompts it is judged on."""
    advised = found["rules"].get(found["advice"])
    speed = f" {advised['speedup']:.2f}x" if advised else ""
    return f": {found['advice']}{speed}; oracle {found['oracle_speedup']:.2f}x{unpriced(found)}"


def unpriced(found: Mapping[str, Any]) -> str:
    """Whose predictions have no price."""
    calls = found["cost"]["calls"]
    names = ", ".join(name for name in found["structures"] if name not in calls)
    if not (names or not calls):
        return ""
    return f"; predictions{f' of {names}' if calls else ''} cost nothing here"


def row(choice: Choice) -> list[str]:
    gain = "-"
    if choice.other is not None:
        gain = f"{choice.other}: {choice.gain:.3f}, {span(choice.gain_interval)}"
    return [
        *(choice.rule, f"{choice.threshold:.3g}", "yes" if choice.speculate else "no"),
        *(f"{choice.speedup:.3f}", span(choice.interval), f"{choice.regret:.1%}", gain),
        *(f"{choice.discard_rate:.3f}", f"{choice.verification_rate:.3f}"),
    ]


def transfers(facts: Mapping[str, Any]) -> list[str]:
    """What it costs a structure that its rate is not tuned; nothing where there is none."""
    sets = {facts["judged_on"]: facts["results"], **facts["elsewhere"]}
    rows = [
        [
            *(structure, cost, prompts, f"{loss['rate']:.3g}"),
            *(f"{loss['regret']:.2%}", f"{loss['chain_regret']:.2%}"),
        ]
        for prompts, results in sets.items()
        for cost, found in results.items()
        for structure, loss in found["untuned"].items()
    ]
    if not rows:
        return []
    title = "## without tuning: seconds over those at the best rate for the same prompts"
    head = ["structure", "cost", "prompts", "rate", "regret", "of a chain"]
    return [f"{title}\n\n{markdown(head, rows)}"]


def left_out(facts: Mapping[str, Any]) -> list[str]:
    """What replay does not know of a structure; nothing where there is none."""
    if not any(found["structures"] for found in facts["results"].values()):
        return []
    sampled = facts["draft_warp"]["temperature"] > 0
    law = (
        "drawn without replacement (RRSw)" if sampled else "the most probable tokens, point masses"
    )
    return [
        f"structures are replayed as a harvest has them: a path of {facts['gamma']} tokens at most,"
        f" at most two leaves beside each of them, {law}, and nothing drawn after a leaf"
    ]
