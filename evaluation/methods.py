"""The methods of a comparison: what a config says of them, checked, and their engines."""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from decoding.cost import read_cost
from decoding.models.loading import ModelPair, pair_identity
from decoding.models.machine import other_machine, setup_facts
from evaluation.interleaving import Engine
from evaluation.tables import BASELINE
from predictors.base import read_config, refuse_mismatch
from runtime.errors import UserError, checked_count, is_count
from runtime.files import checked_folder

FIXED = "fixed"


def method_names(cfg: DictConfig, overrides: Sequence[str]) -> list[str]:
    """`cfg.methods`, the baseline first. overrides: of the command line. Raises UserError for what
    cannot work."""
    known = ", ".join(cfg.method)
    for name in cfg.methods:
        if name not in cfg.method:
            raise UserError(
                f"methods: {name!r} is not defined. Choose from {known}, or define method.{name}"
            )
    for part in cfg.method.custom:
        if "custom" in cfg.methods and cfg.method.custom[part] != cfg[part]:
            raise UserError(
                f"method.custom.{part}: the custom method takes the top-level {part}. Write"
                f" {part}=... instead"
            )
    if "custom" in cfg.methods:
        refuse_idle(cfg, overrides)
    for key in ("repeats", "max_new_tokens", "limit"):
        if not (key == "limit" and cfg.limit is None):
            checked_count(key, cfg[key])
    gammas = cfg.gammas if OmegaConf.is_list(cfg.gammas) else []
    if FIXED in cfg.methods and not (gammas and all(map(is_count, gammas))):
        raise UserError(
            f"gammas: {cfg.gammas} must be one or more draft lengths of at least 1, e.g."
            " gammas=[2,4]"
        )
    if FIXED in cfg.methods and max(gammas) > cfg.method.fixed.structure.get("gamma_max", 0):
        raise UserError(
            f"gammas: {cfg.gammas} need structure=chain with a structure.gamma_max of {max(gammas)}"
            " or more"
        )
    return list(dict.fromkeys([BASELINE, *cfg.methods]))


def refuse_idle(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """A part that is asked for on the command line and that no method takes: the custom engine has
    none."""
    keys = [override.split("=")[0].lstrip("+") for override in overrides]
    others = [cfg.method[name] for name in cfg.methods if name != "custom"]
    for part in ("structure", "verifier", "stop"):
        asked = any(key == part or key.startswith(f"{part}.") for key in keys)
        taken = part in cfg.method.custom.engine or any(
            method.get(part) == cfg[part] for method in others
        )
        if asked and not taken:
            kind = cfg.method.custom.engine._target_.rpartition(".")[2]
            raise UserError(
                f"{part}, engine: {kind} takes no {part}. Leave {part}=... away, or choose another"
                " engine"
            )


def checkpoint_configs(cfg: DictConfig, name: str) -> dict[str, dict[str, Any]]:
    """What the method's checkpoints were trained for, by the keys that name them. Cheap: no weights
    are read."""
    found = {}
    for key in checkpoint_keys(cfg, name):
        folder = OmegaConf.select(cfg, key)
        if not folder:
            raise UserError(
                f"{key}: no folder given. Train one: python train.py predictor=specdecpp (or hrad)"
            )
        found[key] = read_config(checked_folder(key, folder), key)
    return found


def checkpoint_keys(cfg: DictConfig, name: str) -> list[str]:
    """Where the method names checkpoints: of its stop rule, or of the rule that this one holds."""
    rules = [f"method.{name}.stop", f"method.{name}.stop.rule"]
    return [
        f"{rule}.checkpoint"
        for rule in rules
        if "checkpoint" in (OmegaConf.select(cfg, rule) or {})
    ][:1]


def check_checkpoints(
    cfg: DictConfig, pair: ModelPair, name: str, checkpoints: Mapping[str, dict[str, Any]]
) -> None:
    """Refuse a checkpoint of another pair, of other sampling settings, or of longer drafts than the
    method can have."""
    warps = {key: instantiate(cfg[key]).to_dict() for key in ("warp", "draft_warp")}
    expect = {"pair": pair_identity(pair), **warps}
    for where, trained in checkpoints.items():
        key = f"{where}: {OmegaConf.select(cfg, where)}"
        refuse_mismatch(trained, expect, key)
        gamma, longest = (
            trained.get("gamma") or 0,
            cfg.method[name].structure.get("gamma_max", math.inf),
        )
        if gamma > longest:
            raise UserError(
                f"{key} drafts gamma={gamma} tokens, structure.gamma_max is {longest}. Raise that,"
                f" in an experiment method.{name}.structure.gamma_max"
            )


def check_costs(cfg: DictConfig, pair: ModelPair, names: Sequence[str]) -> list[str]:
    """Refuse a stop rule's file of costs that was measured with another pair; say, a line each,
    which was measured on another machine, as of thresholds."""
    files = {OmegaConf.select(cfg, f"method.{name}.stop.cost") for name in names} - {None}
    warnings = []
    for file in sorted(map(str, files)):
        table, here, anew = (
            read_cost(file, "stop.cost"),
            pair_identity(pair),
            "python scripts/tune.py cost=measure",
        )
        if other := [
            key for key in here if key != "name" and table.pair and table.pair.get(key) != here[key]
        ]:
            raise UserError(
                f"stop.cost: {file} was measured with another {' and '.join(other)}. Measure this"
                f" pair's: {anew}"
            )
        try:
            there = (
                other_machine(table.measured_on, setup_facts(pair)) if table.measured_on else None
            )
        except KeyError as error:
            raise UserError(
                f"stop.cost: {file} does not say with which {error.args[0]}. Measure anew: {anew}"
            ) from error
        if there:
            warnings.append(
                f"warning: {file} was measured on another machine: {there}. Measure anew: {anew}"
            )
    return warnings


def engine(cfg: DictConfig, name: str, pair: ModelPair, gamma: int | None = None) -> Engine:
    """The method's engine; `gamma` is the draft length of the fixed method."""
    cfg = copy.deepcopy(cfg)
    if name == FIXED and gamma is not None:
        cfg.method[name].stop.gamma = gamma
    built: Engine = instantiate(cfg.method[name].engine)(pair=pair, eos_ids=frozenset(pair.eos_ids))
    return built


def is_lossless(method: DictConfig) -> bool:
    """Whether the method's verifier claims to be; an engine without one to choose is."""
    return "verifier" not in method or bool(instantiate(method.verifier).lossless)
