"""Do the files that a comparison reads fit this run: checkpoints, costs, splits?"""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf

from data_gen.requests import refuse_other_shares
from decoding.cost import CostTable, read_cost
from decoding.models.loading import ModelPair, pair_identity
from decoding.models.machine import other_machine, setup_facts
from evaluation.methods import CUSTOM
from predictors.base import read_config, refuse_mismatch
from runtime.compatibility import of_earlier
from runtime.errors import UserError
from runtime.files import checked_folder

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
