"""The methods of a comparison: their names, parts and settings."""

import copy
import inspect
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf

from data_gen.requests import refuse_other_shares
from decoding.batch_cost import read_batch_cost
from decoding.cost import read_cost
from decoding.models.loading import ModelPair, pair_identity
from decoding.models.machine import other_machine, setup_facts
from decoding.stopping.base import TunableRule
from evaluation.decode import Engine
from evaluation.replay import thresholds
from evaluation.replay.read import REPLAYED
from evaluation.table import BASELINE, with_interval
from predictors.base import read_config, refuse_mismatch
from runtime.compatibility import leaves
from runtime.errors import UserError
from runtime.files import checked_folder
from runtime.intervals import Estimate
from runtime.job import as_called, shared_settings
from runtime.text import printable

CUSTOM = "custom"  # the method whose parts the command line chooses
CHOSEN_HERE = "Likely optimistic: chosen on the prompts it is judged on"
SHARED = "decoding.stopping.shared.Shared"  # its costs are those of many requests
COST_KEYS = ("stop.cost", "structure.cost.file")
MEASURE = "python scripts/tune.py cost=measure"


@dataclass(frozen=True)
class Method:
    """One row of a comparison, with its name in the config.

    settings: those it is decoded with, resolved: a copy, in which a tuned or tried setting has its
    value; note: the choice made for it, or ""; speculates: False if tuning found that no draft pays
    here, so that `settings` are those of plain decoding"""

    name: str
    settings: DictConfig
    note: str = ""
    speculates: bool = True

    def to_dict(self) -> dict[str, Any]:
        settings = OmegaConf.to_container(self.settings)
        return {"settings": settings, "note": self.note, "speculates": self.speculates}


def configured(cfg: DictConfig, name: str, changes: Mapping[str, Any] | None = None) -> DictConfig:
    """Return the resolved settings of `cfg.method[name]` with `changes`, by key; `cfg` is not
    modified. Parts of the custom method that its engine does not take are left out.

    Raises UserError for a draft length beyond what the structure allows."""
    cfg = copy.deepcopy(cfg)
    for key, value in (changes or {}).items():
        OmegaConf.update(cfg, f"method.{name}.{key}", value)
    resolved: Any = OmegaConf.to_container(cfg.method[name], resolve=True)
    if name == CUSTOM:
        taken = ("engine", *resolved["engine"])
        resolved = {part: each for part, each in resolved.items() if part in taken}
    settings: DictConfig = DictConfig({"method": {name: resolved}}).method[name]  # errors name it
    gamma = OmegaConf.select(settings, "stop.gamma")
    longest = OmegaConf.select(settings, "structure.gamma_max")
    if isinstance(gamma, int) and isinstance(longest, int) and gamma > longest:
        raise UserError(
            f"method.{name}.stop.gamma: expected at most structure.gamma_max={longest}, got"
            f" {gamma}. Raise structure.gamma_max, or draft less"
        )
    return settings


def engine(method: Method, pair: ModelPair) -> Engine:
    built = instantiate(method.settings.engine)(pair=pair, eos_ids=frozenset(pair.eos_ids))
    if not isinstance(built, Engine):
        raise UserError(
            f"method.{method.name}.engine: expected something that can `decode`, got"
            f" {type(built).__name__}. Choose another engine"
        )
    return built


def method_names(cfg: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Return `cfg.methods`, the baseline first. overrides: of the command line. Raises UserError as
    `refuse_unused`."""
    refuse_unused(cfg, cfg.methods, overrides)
    return list(dict.fromkeys([BASELINE, *cfg.methods]))


def refuse_unused(cfg: DictConfig, names: Sequence[str], overrides: Sequence[str]) -> None:
    """Raise UserError for a part of the custom method that is not set at the top, and for a part on
    the command line that no method of `names` takes."""
    custom: Any = cfg.method.custom if CUSTOM in names else {}
    for part in custom:
        if custom[part] != cfg[part]:
            raise UserError(
                f"method.custom.{part}: the custom method takes the top-level {part}. Write"
                f" {part}=... instead"
            )
    others = [cfg.method[name] for name in names if name != CUSTOM]
    for part in ("engine", "structure", "verifier", "stop"):
        given = any(key == part or key.startswith(f"{part}.") for key in set_keys(overrides))
        taken = custom and part in {"engine", *custom.engine}
        if not given or taken or any(one.get(part) == cfg[part] for one in others):
            continue
        if custom:
            kind = custom.engine._target_.rpartition(".")[2]
            raise UserError(
                f"{part}, engine: {kind} takes no {part}. Leave {part}=... away, or choose"
                " another engine"
            )
        raise UserError(
            f"{part}: no method of methods=[{','.join(names)}] takes it. Add custom to them,"
            f" or write {part}@method.<name>.{part}=... and method.<name>.{part}.<setting>=..."
        )


def set_keys(overrides: Iterable[str]) -> list[str]:
    """Return the keys that overrides of the command line set."""
    return [override.split("=")[0].lstrip("+~").split("@")[-1] for override in overrides]


def is_given(key: str, overrides: Iterable[str]) -> bool:
    """Return whether the command line sets `key`, or something that holds it."""
    return any(key == other or key.startswith(f"{other}.") for other in set_keys(overrides))


def cautions(methods: Mapping[str, Method], engines: Mapping[str, Engine]) -> list[str]:
    """Return warnings with the cautions of methods for which no setting was chosen."""
    untuned = {name: each.caution for name, each in engines.items() if not methods[name].note}
    return [f"warning: {name}: {caution}" for name, caution in untuned.items() if caution]


# Tuned thresholds ---------------------------------------------------------------------------------


def use_thresholds(
    cfg: DictConfig, pair: ModelPair, names: Sequence[str], overrides: Sequence[str]
) -> tuple[dict[str, Method], dict[str, str] | None]:
    """Return the methods that the file `cfg.thresholds` settles, if it exists and is of this pair
    and these distributions, and the `rule` that tuning with costs of this machine advises, with the
    `file` that says so. Prints which."""
    asked = "thresholds" in set_keys(overrides)
    if cfg.thresholds is None or not (asked or Path(cfg.thresholds).is_file()):
        return {}, None
    file = thresholds.read(Path(cfg.thresholds))
    warps = {key: instantiate(cfg[key]).to_dict() for key in ("warp", "draft_warp")}
    if other := thresholds.misfit(file, {"pair": pair_identity(pair), **warps}):
        if asked:
            raise UserError(
                f"thresholds: {cfg.thresholds} was tuned for another {other}. Tune this one:"
                " python scripts/tune.py, or use none: thresholds=null"
            )
        print(f"thresholds: those of {cfg.thresholds} are for another {other}, left out")
        return {}, None
    if set(names) & set(file["results"]["chosen"]["rules"]):
        check_splits(cfg, file["data"], f"thresholds={cfg.thresholds} was tuned")
        if cfg.split == "all":
            print(
                "warning: split=all judges every prompt, those too that thresholds were chosen on"
                f" where the prompts of {file['data']['folder']} are among them. Take other"
                " prompts or split=test"
            )
    tuned, lines = tuned_methods(cfg, names, file, overrides)
    here = setup_facts(pair)
    elsewhere = tuned_elsewhere(cfg, file, overrides, here)
    print(as_called("\n".join(map(printable, [*lines, *elsewhere]))))
    rule = file["results"]["chosen"]["advice"]
    holds = file["measured_on"] and not elsewhere and rule in (*tuned, thresholds.NO_ADVICE)
    return tuned, {"rule": rule, "file": str(cfg.thresholds)} if holds else None


def tuned_methods(
    cfg: DictConfig, names: Sequence[str], file: Mapping[str, Any], overrides: Sequence[str]
) -> tuple[dict[str, Method], list[str]]:
    """Return the methods of `names` that `file` (`thresholds.read`) settles, and a line about each
    it names.

    A method that pays at no threshold gets the settings of plain decoding, with a note. overrides:
    those of the command line, which take precedence. A method that differs from the one that was
    tuned is left out."""
    chosen, methods = file["results"]["chosen"], dict[str, Method]()
    advice = f"whose advice is: {chosen['advice']}"
    lines = [f"thresholds: {cfg.thresholds}, for cost {file['cost']}, {advice}"]
    for name in (name for name in chosen["rules"] if name in names):
        rule = {**file["rules"][name], **chosen["rules"][name], "gamma": file["gamma"]}
        key, value = f"stop.{rule['setting']}", rule["threshold"]
        full_key = f"method.{name}.{key}"
        if why := _unfit(configured(cfg, name), rule, name):
            lines.append(f"{name}: {why}, thresholds left out")
            continue
        if is_given(full_key, overrides):
            lines.append(f"{name}: {full_key}={OmegaConf.select(cfg, full_key)}, as given")
            continue
        speed = with_interval(Estimate(rule["speedup"], *rule["interval"]), ".3f", "x")
        speed += " modelled"
        if rule["speculate"]:
            whole = isinstance(OmegaConf.select(cfg, full_key), int)
            settings = configured(cfg, name, {key: int(value) if whole else value})
            methods[name] = Method(name, settings, f"{key}={value:.3g}, tuned: {speed}")
        else:
            note = f"tuned: the best, {key}={value:.3g}, is {speed}"
            note = f"{thresholds.NO_ADVICE}, so plain decoding; {note}"
            methods[name] = Method(name, configured(cfg, BASELINE), note, speculates=False)
        lines.append(f"{name}: {methods[name].note}")
    return methods, lines


def _unfit(settings: DictConfig, rule: Mapping[str, Any], name: str) -> str | None:
    """Return why a method is not the one that was replayed (chains, verified token by token, with a
    rule of the same settings and checkpoint); None if it is."""
    if (
        parts_of(settings) != REPLAYED
        or settings.structure.gamma_max < rule["gamma"]
        or thresholds.rule_settings(settings.stop, rule["setting"]) != rule["stop"]
    ):
        return "built otherwise than it was tuned"
    folder, key = settings.stop.get("checkpoint"), f"method.{name}.stop.checkpoint"
    if folder and thresholds.checkpoint_hash(folder, key) != rule["checkpoint"]:
        return f"{folder} is not the checkpoint it was tuned with"
    return None


def parts_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what makes those parts of a method that replay has only one of."""
    return {part: settings.get(part, {}).get("_target_") for part in REPLAYED}


def tuned_elsewhere(
    cfg: DictConfig, file: Mapping[str, Any], overrides: Sequence[str], here: Mapping[str, Any]
) -> list[str]:
    """Return a warning if thresholds were tuned for another machine than `here` (`setup_facts`)."""
    other = other_machine(file["measured_on"], here) if file["measured_on"] else None
    if other is None:
        return []
    anew = thresholds.command_anew(file["command"], overrides)
    return [f"warning: {cfg.thresholds} was tuned on another machine: {other}. Tune anew: {anew}"]


# Settings that are tried --------------------------------------------------------------------------


def alternatives(cfg: DictConfig, name: str, overrides: Sequence[str]) -> dict[str, Method]:
    """Return the method with every combination of the settings that `cfg.tried` lists for it, by
    these settings; none if it lists nothing, or if the command line sets them."""
    lists = leaves(cfg.tried.get(name, {}))
    if not lists or any(is_given(f"method.{name}.{key}", overrides) for key in lists):
        return {}
    combinations = [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]
    return {
        " ".join(f"{key}={value}" for key, value in changes.items()): Method(
            name, configured(cfg, name, changes)
        )
        for changes in combinations
    }


def chosen(tried: Mapping[str, Method], speeds: Mapping[str, float], where: str) -> Method:
    """Return the fastest method. speeds: tokens/s by the same names, if there are several; where:
    the prompts they were tried on, in words."""
    best = max(tried, key=lambda label: speeds.get(label, 0.0))
    values = [label.partition("=")[2] for label in tried]
    of = ", ".join(values) if not any(" " in label for label in tried) else len(tried)
    note = f"{best}, the fastest of {of} {where}" if len(tried) > 1 else best
    return replace(tried[best], note=note)


# How methods were settled, in words ---------------------------------------------------------------


def rule_of(settings: Mapping[str, Any]) -> type[TunableRule] | None:
    """Return the class of a method's stop rule if it has a setting to tune."""
    rule = get_object(settings["stop"]["_target_"]) if "stop" in settings else None
    return rule if inspect.isclass(rule) and issubclass(rule, TunableRule) else None


def origin(name: str, method: Mapping[str, Any], given: Sequence[str]) -> str:
    """Return the setting of a method's stop rule and where it comes from; "" if there is none to
    choose. method: of results.json; given: the words of the command line"""
    rule = rule_of(method["settings"])
    if method["note"] or rule is None:
        return str(method["note"])
    key = f"stop.{rule.setting}"
    value = OmegaConf.select(OmegaConf.create(dict(method["settings"])), key)
    how = "as given" if f"{prefix(name)}{key}" in set_keys(given) else "the default, not tuned"
    return f"{key}={value}, {how}"


def chosen_here(methods: Mapping[str, Mapping[str, Any]], command: str) -> str:
    """Return that a method was chosen on the prompts it is judged on, and how to choose on others:
    the commands to paste, and which methods cannot be tuned.

    methods: the settings of each; command: of the comparison"""
    tuned = [
        name
        for name, settings in methods.items()
        if name != CUSTOM and rule_of(settings) and parts_of(settings) == REPLAYED
    ]
    others = [name for name in methods if name not in (BASELINE, *tuned)]
    shared = shared_settings(words=shlex.split(command))
    choices = [word.partition("=")[2] for word in shared if "." not in word.partition("=")[0]]
    data, told = f"data/{'-'.join(choices) or 'rounds'}", [CHOSEN_HERE]
    if tuned:
        harvest = ["python", "scripts/gen_data.py", *shared, "anchors.stride=1", f"out={data}"]
        rules = f"methods=[{','.join(tuned)}]"
        tune = ["python", "scripts/tune.py", *shared, f"data={data}", rules]
        told += [f"To choose on others: {shlex.join(harvest)}; {shlex.join(tune)}"]
    if others:
        told += [
            f"scripts/tune.py cannot tune {', '.join(others)}: choose with split=calibration, then"
            " judge with split=test"
        ]
    return as_called(". ".join(told))


# Files of methods: checkpoints, costs, splits -----------------------------------------------------


def prefix(name: str) -> str:
    """Return the prefix of the keys that set a method's parts."""
    return "" if name == CUSTOM else f"method.{name}."


def checkpoint_configs(cfg: DictConfig, name: str) -> dict[str, dict[str, Any]]:
    """Return the configs of the method's checkpoints (of its stop rule, of the rule inside that, or
    of its structure), by the key that names each. Reads no weights."""
    for part in ("stop", "stop.rule", "structure"):
        rule = OmegaConf.select(cfg, f"{prefix(name)}{part}")
        if "checkpoint" in (rule or {}):
            key = f"{prefix(name)}{part}.checkpoint"
            if not rule.checkpoint:
                raise UserError(
                    f"{key}: expected a folder, got none. Train one: python train.py predictor=..."
                )
            folder = checked_folder(key, rule.checkpoint)
            return {key: read_config(folder, key, commands(rule))}
    return {}


def commands(rule: DictConfig) -> str:
    """Return the commands that make the checkpoint of a stop rule or a structure, from a harvest of
    this pair with these distributions."""
    try:
        training = getattr(get_object(rule._target_), "training", "")
    except (ImportError, ValueError) as error:
        raise UserError(
            f"stop._target_: expected a stop rule, got {rule._target_} ({error}). Name another"
        ) from error
    hydra = HydraConfig.get()
    if not training:
        return ""
    pair = hydra.runtime.choices["pair"]
    shared = [
        one for one in hydra.overrides.task if re.match(r"\+?(pair\.|(draft_)?warp[.=])", one)
    ]
    harvest = ["python", "scripts/gen_data.py", f"pair={pair}", *shared, f"out=data/{pair}"]
    return f"{shlex.join(harvest)}; {training} data=data/{pair} out={rule.checkpoint}"


def check_checkpoints(
    cfg: DictConfig, pair: ModelPair, name: str, checkpoints: Mapping[str, dict[str, Any]]
) -> None:
    """Raise UserError for a checkpoint of another pair, of other sampling settings, of longer
    drafts than the method can have, or of a harvest with other splits."""
    warps = {key: instantiate(cfg[key]).to_dict() for key in ("warp", "draft_warp")}
    for where, trained in checkpoints.items():
        key = f"{where}: {OmegaConf.select(cfg, where)}"
        refuse_mismatch(trained, {"pair": pair_identity(pair), **warps}, key)
        gamma = trained.get("gamma") or 0
        longest = cfg.method[name].get("structure", {}).get("gamma_max", math.inf)
        if gamma > longest:
            raise UserError(
                f"{key} drafts gamma={gamma} tokens, structure.gamma_max is {longest}. Raise that,"
                f" in an experiment method.{name}.structure.gamma_max"
            )
        data = trained.get("provenance", {}).get("data")
        check_splits(cfg, data, f"{OmegaConf.select(cfg, where)} was trained")


def check_splits(cfg: DictConfig, data: Mapping[str, Any] | None, where: str) -> None:
    """Raise UserError for test prompts that are not in the test split of the harvest `data`. where:
    what was made of it."""
    if data and cfg.split != "all":
        refuse_other_shares(data, cfg.splits, where)


def check_costs(cfg: DictConfig, pair: ModelPair, names: Sequence[str]) -> list[str]:
    """Raise UserError for a file of costs, of a stop rule or a structure, that was measured with
    another pair. Return a warning for each that was measured on another machine."""
    keys = [f"{prefix(name)}{key}" for name in names for key in COST_KEYS]
    files = {OmegaConf.select(cfg, key): key for key in keys}
    files.pop(None, None)
    warnings = []
    for file, key in sorted(files.items()):
        batched = OmegaConf.select(cfg, f"{key.rpartition('.')[0]}._target_") == SHARED
        table = read_batch_cost(file, key) if batched else read_cost(file, key)
        remedy = MEASURE.replace(" cost=", " batch_cost=") if batched else MEASURE
        measured, here = table.pair or {}, pair_identity(pair)
        other = [
            each
            for each in here
            if measured and each != "name" and measured.get(each) != here[each]
        ]
        if other:
            raise UserError(
                f"{key}: {file} was measured with another"
                f" {' and '.join(other)}. Measure this pair's: {remedy}"
            )
        try:
            facts = table.measured_on
            there = other_machine(facts, setup_facts(pair)) if facts else None
        except KeyError as error:
            raise UserError(
                f"{key}: {file} does not say with which {error.args[0]}. Measure anew: {remedy}"
            ) from error
        if there:
            warnings.append(
                f"warning: {file} was measured on another machine: {there}. Measure anew: {remedy}"
            )
    return warnings
