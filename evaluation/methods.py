"""The methods of a comparison: which are asked for, and what each of them is made of."""

import copy
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf

from data_gen.requests import refuse_other_shares
from decoding.cost import CostTable, read_cost
from decoding.models.loading import ModelPair, pair_identity
from decoding.models.machine import other_machine, setup_facts
from evaluation.decode import Engine
from evaluation.replay.candidates import REPLAYED
from evaluation.replay.thresholds import NO_ADVICE, checkpoint_hash, command_anew, rule_settings
from evaluation.replay.tuning import span
from evaluation.table import BASELINE
from predictors.base import read_config, refuse_mismatch
from runtime.compatibility import of_earlier
from runtime.errors import UserError
from runtime.files import checked_folder

CUSTOM = "custom"  # what the command line chooses


@dataclass(frozen=True)
class Method:
    """One row of a comparison, called what the config calls it.

    settings: as it is decoded, resolved: a copy, in which a tuned or tried setting has its value;
    note: what was decided for it, or ""; speculates: False where tuning found no draft worth it
    here, so that `settings` are those of plain decoding"""

    name: str
    settings: DictConfig
    note: str = ""
    speculates: bool = True

    def to_dict(self) -> dict[str, Any]:
        settings = OmegaConf.to_container(self.settings)
        return {"settings": settings, "note": self.note, "speculates": self.speculates}


def configured(cfg: DictConfig, name: str, changes: Mapping[str, Any] | None = None) -> DictConfig:
    """The resolved settings of `cfg.method[name]` with some changed, by key; `cfg` stays as it is.

    Raises UserError for a draft length beyond what the structure allows."""
    cfg = copy.deepcopy(cfg)
    for key, value in (changes or {}).items():
        OmegaConf.update(cfg, f"method.{name}.{key}", value)
    found: Any = OmegaConf.to_container(cfg.method[name], resolve=True)
    settings: DictConfig = DictConfig({"method": {name: found}}).method[name]  # errors name the key
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


def is_lossless(method: Method) -> bool:
    """Whether the method's verifier claims to be; an engine without one to choose is."""
    settings = method.settings
    return "verifier" not in settings or bool(instantiate(settings.verifier).lossless)


# What is asked for --------------------------------------------------------------------------------


def method_names(cfg: DictConfig, overrides: Sequence[str]) -> list[str]:
    """`cfg.methods`, the baseline first. overrides: of the command line. Raises UserError for what
    cannot work."""
    if CUSTOM in cfg.methods:
        refuse_other_parts(cfg)
        refuse_idle(cfg, overrides)
    return list(dict.fromkeys([BASELINE, *cfg.methods]))


def refuse_other_parts(cfg: DictConfig) -> None:
    """The custom method takes the top-level parts, so nothing else may be written there."""
    for part in cfg.method.custom:
        if cfg.method.custom[part] != cfg[part]:
            raise UserError(
                f"method.custom.{part}: the custom method takes the top-level {part}. Write"
                f" {part}=... instead"
            )


def refuse_idle(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """A part that is asked for on the command line and that no method takes: the custom engine has
    none."""
    asked = set_keys(overrides)
    others = [cfg.method[name] for name in cfg.methods if name != CUSTOM]
    for part in ("structure", "verifier", "stop"):
        taken = part in cfg.method.custom.engine or any(
            method.get(part) == cfg[part] for method in others
        )
        if any(key == part or key.startswith(f"{part}.") for key in asked) and not taken:
            kind = cfg.method.custom.engine._target_.rpartition(".")[2]
            raise UserError(
                f"{part}, engine: {kind} takes no {part}. Leave {part}=... away, or choose another"
                " engine"
            )


def set_keys(overrides: Iterable[str]) -> list[str]:
    """The keys that overrides of the command line set."""
    return [override.split("=")[0].lstrip("+~").split("@")[-1] for override in overrides]


def is_given(key: str, overrides: Iterable[str]) -> bool:
    """Whether the command line sets `key`, or something that holds it."""
    return any(key == other or key.startswith(f"{other}.") for other in set_keys(overrides))


# Tuned thresholds ---------------------------------------------------------------------------------


def tuned_names(names: Sequence[str], found: Mapping[str, Any]) -> list[str]:
    """The methods that the file of thresholds `found` has tuned."""
    return [name for name in found["results"]["chosen"]["rules"] if name in names]


def tuned_methods(
    cfg: DictConfig, names: Sequence[str], found: Mapping[str, Any], overrides: Sequence[str]
) -> tuple[dict[str, Method], list[str]]:
    """The methods of `names` that `found` (`thresholds.read`) settles, and a line about each it
    names.

    A method that no threshold makes worth its draft gets the settings of plain decoding, and says
    so. overrides: of the command line; what they set wins. A method built otherwise than it was
    tuned is left out."""
    chosen, methods = found["results"]["chosen"], dict[str, Method]()
    advice = f"whose advice is: {chosen['advice']}"
    lines = [f"thresholds: {cfg.thresholds}, for cost {found['cost']}, {advice}"]
    for name in tuned_names(names, found):
        rule = {**found["rules"][name], **chosen["rules"][name], "gamma": found["gamma"]}
        key = f"method.{name}.stop.{rule['setting']}"
        if why := _unfit(configured(cfg, name), rule, name):
            lines.append(f"{name}: {why}, thresholds left out")
        elif is_given(key, overrides):
            lines.append(f"{name}: {key}={OmegaConf.select(cfg, key)}, as given")
        else:
            methods[name] = _tuned(cfg, name, rule)
            lines.append(f"{name}: {methods[name].note}")
    return methods, lines


def _tuned(cfg: DictConfig, name: str, rule: Mapping[str, Any]) -> Method:
    """rule: what was tuned, and what was found."""
    key, value = f"stop.{rule['setting']}", rule["threshold"]
    chosen = f"{key}={value:.3g}"
    speed = f"{rule['speedup']:.3f}x ({span(rule['interval'])}) modelled"
    if not rule["speculate"]:
        note = f"{NO_ADVICE}, so plain decoding; tuned: the best, {chosen}, is {speed}"
        return Method(name, configured(cfg, BASELINE), note, speculates=False)
    whole = isinstance(OmegaConf.select(cfg, f"method.{name}.{key}"), int)
    settings = configured(cfg, name, {key: int(value) if whole else value})
    return Method(name, settings, f"{chosen}, tuned: {speed}")


def _unfit(settings: DictConfig, rule: Mapping[str, Any], name: str) -> str | None:
    """Why a method is not what was replayed: chains, verified token by token, and a rule of the
    same settings and checkpoint. None where it is."""
    parts = {part: settings.get(part, {}).get("_target_") for part in REPLAYED}
    if parts != REPLAYED or settings.structure.gamma_max < rule["gamma"]:
        return "built otherwise than it was tuned"
    if rule_settings(settings.stop, rule["setting"]) != rule["stop"]:
        return "built otherwise than it was tuned"
    folder = settings.stop.get("checkpoint")
    if folder and checkpoint_hash(folder, f"method.{name}.stop.checkpoint") != rule["checkpoint"]:
        return f"{folder} is not the checkpoint it was tuned with"
    return None


def cautions(methods: Mapping[str, Method], engines: Mapping[str, Any]) -> list[str]:
    """What the stop rules of methods that nothing was chosen for have to say about that."""
    said = {
        name: getattr(getattr(engine, "stop", None), "caution", "")
        for name, engine in engines.items()
        if not methods[name].note
    }
    return [f"warning: {name}: {caution}" for name, caution in said.items() if caution]


def tuned_elsewhere(
    cfg: DictConfig, found: Mapping[str, Any], overrides: Sequence[str], here: Mapping[str, Any]
) -> list[str]:
    """A warning where the thresholds were tuned for another machine than `here` (`setup_facts`)."""
    other = other_machine(found["measured_on"], here) if found["measured_on"] else None
    if other is None:
        return []
    anew = command_anew(found["command"], overrides)
    return [f"warning: {cfg.thresholds} was tuned on another machine: {other}. Tune anew: {anew}"]


# Settings that are tried --------------------------------------------------------------------------


def alternatives(cfg: DictConfig, name: str, overrides: Sequence[str]) -> dict[str, Method]:
    """The method with every combination of the settings that `cfg.tried` lists for it, by what is
    set; none where it lists nothing, or the command line has chosen."""
    lists = dict(_lists(cfg.tried.get(name, {})))
    if not lists or any(is_given(f"method.{name}.{key}", overrides) for key in lists):
        return {}
    found = {}
    for values in product(*lists.values()):
        changes = dict(zip(lists, values, strict=True))
        label = " ".join(f"{key}={value}" for key, value in changes.items())
        found[label] = Method(name, configured(cfg, name, changes))
    return found


def _lists(node: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of `node` by their dotted keys."""
    for part, inner in node.items():
        if OmegaConf.is_dict(inner):
            yield from _lists(inner, f"{before}{part}.")
        else:
            yield f"{before}{part}", inner


def chosen(tried: Mapping[str, Method], speeds: Mapping[str, float], where: str) -> Method:
    """The fastest. speeds: tokens/s of each, by the same names; where: on what they were tried."""
    best = max(tried, key=lambda label: speeds[label]) if len(tried) > 1 else next(iter(tried))
    note = f"{best}, the fastest of {len(tried)} {where}" if len(tried) > 1 else best
    return replace(tried[best], note=note)


# What methods read: checkpoints, costs, splits ----------------------------------------------------


COST_KEYS = ("stop.cost", "structure.cost.file")
MEASURE = "python scripts/tune.py cost=measure"


def checkpoint_configs(cfg: DictConfig, name: str) -> dict[str, dict[str, Any]]:
    """What the method's checkpoints were trained for, by the keys that name them. Cheap: no weights
    are read."""
    found = {}
    for key in checkpoint_keys(cfg, name):
        folder = OmegaConf.select(cfg, key)
        if not folder:
            raise UserError(
                f"{key}: expected a folder, got none. Train one: python train.py predictor=..."
            )
        rule = OmegaConf.select(cfg, key.rpartition(".")[0])
        found[key] = read_config(checked_folder(key, folder), key, commands(rule))
    return found


def commands(rule: DictConfig) -> str:
    """What makes the checkpoint of a stop rule or a structure, from a harvest of this pair with
    these distributions."""
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


def prefix(name: str) -> str:
    """Of the keys that the user sets a method's parts with."""
    return "" if name == CUSTOM else f"method.{name}."


def checkpoint_keys(cfg: DictConfig, name: str) -> list[str]:
    """Where the method names checkpoints: of its stop rule, of the rule that this one holds, or of
    its structure."""
    rules = [f"{prefix(name)}{part}" for part in ("stop", "stop.rule", "structure")]
    return [
        f"{rule}.checkpoint"
        for rule in rules
        if "checkpoint" in (OmegaConf.select(cfg, rule) or {})
    ][:1]


def check_checkpoints(
    cfg: DictConfig, pair: ModelPair, name: str, checkpoints: Mapping[str, dict[str, Any]]
) -> None:
    """Refuse a checkpoint of another pair, of other sampling settings, of longer drafts than the
    method can have, or of a harvest that was split otherwise."""
    warps = {key: instantiate(cfg[key]).to_dict() for key in ("warp", "draft_warp")}
    expect = {"pair": pair_identity(pair), **warps}
    for where, trained in checkpoints.items():
        key = f"{where}: {OmegaConf.select(cfg, where)}"
        refuse_mismatch(trained, expect, key)
        gamma = trained.get("gamma") or 0
        longest = cfg.method[name].get("structure", {}).get("gamma_max", math.inf)
        if gamma > longest:
            raise UserError(
                f"{key} drafts gamma={gamma} tokens, structure.gamma_max is {longest}. Raise that,"
                f" in an experiment method.{name}.structure.gamma_max"
            )
        data = trained.get("provenance", {}).get("data")
        check_splits(cfg, data, f"{OmegaConf.select(cfg, where)} was trained")


def check_splits(cfg: DictConfig, data: Mapping[str, str] | None, where: str) -> None:
    """Refuse test prompts that the harvest `data` has not kept for tests. where: what was made of
    it."""
    if data and cfg.split != "all":
        refuse_other_shares(data, cfg.splits, where)


def check_costs(cfg: DictConfig, pair: ModelPair, names: Sequence[str]) -> list[str]:
    """Refuse a file of costs, of a stop rule or a structure, that was measured with another pair;
    say, a line each, which was measured on another machine, as of thresholds."""
    keys = {
        OmegaConf.select(cfg, key): key
        for key in (f"{prefix(name)}{key}" for name in names for key in COST_KEYS)
    }
    warnings = []
    for file, key in sorted((str(file), key) for file, key in keys.items() if file is not None):
        table = read_cost(file, key)
        _refuse_cost_of_another_pair(f"{key}: {file}", table, pair)
        warnings.append(_cost_of_another_machine(file, key, table, pair))
    return [warning for warning in warnings if warning]


def _refuse_cost_of_another_pair(where: str, table: CostTable, pair: ModelPair) -> None:
    known, here = table.pair or {}, pair_identity(pair)
    other = [key for key in here if known and key != "name" and known.get(key) != here[key]]
    if other:
        raise UserError(
            f"{where}{of_earlier(known)} was measured with another {' and '.join(other)}. Measure"
            f" this pair's: {MEASURE}"
        )


def _cost_of_another_machine(file: str, key: str, table: CostTable, pair: ModelPair) -> str | None:
    if not table.measured_on:
        return None
    try:
        there = other_machine(table.measured_on, setup_facts(pair))
    except KeyError as error:
        raise UserError(
            f"{key}: {file} does not say with which {error.args[0]}. Measure anew: {MEASURE}"
        ) from error
    if there is None:
        return None
    return f"warning: {file} was measured on another machine: {there}. Measure anew: {MEASURE}"
