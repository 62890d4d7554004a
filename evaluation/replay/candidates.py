"""What scripts that replay a harvest share: checks of their settings, the harvest as replays, rules
at thresholds."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from data_gen.samples import refuse_other_distributions
from data_gen.storage.dataset import read_manifest
from decoding.cost import CostTable
from decoding.stopping.base import TunableRule
from evaluation.replay.read import Asks, read_table
from evaluation.replay.simulate import Replayer
from evaluation.replay.tuning import Candidate, sweep
from predictors.base import damaged, read_config, refuse_mismatch
from predictors.features.layers import RecordedLayers
from predictors.inputs import Inputs
from runtime.compatibility import incompatible, of_earlier
from runtime.errors import UserError

# Checks -------------------------------------------------------------------------------------------


def check_sizes(cfg: DictConfig, manifest: Mapping[str, Any]) -> None:
    """The harvest must hold what is to be replayed."""
    for key in ("gamma_max", "max_new_tokens"):
        harvested = manifest["gamma" if key == "gamma_max" else key]
        if cfg[key] is not None and cfg[key] > harvested:
            raise UserError(
                f"{key}: {cfg[key]} is more than the {harvested} harvested in {cfg.data}. Lower it"
            )


def refuse_other_warps(cfg: DictConfig, manifest: Mapping[str, Any]) -> None:
    """The distributions of the settings must be those of the harvest."""
    for key in ("warp", "draft_warp"):
        if instantiate(cfg[key]).to_dict() != manifest[key]:
            raise UserError(
                f"{key}: {cfg.data} was harvested with {manifest[key]}. Give the same, or another"
                " data="
            )


def refuse_other_harvests(cfg: DictConfig, manifest: Mapping[str, Any]) -> None:
    """Those of `judge_data` must be of the same pair and distributions, and as long."""
    gamma_max = cfg.gamma_max or manifest["gamma"]
    for folder in cfg.judge_data:
        refuse_other_distributions(folder, manifest, "judge_data", str(cfg.data))
        if (gamma := read_manifest(folder)["gamma"]) < gamma_max:
            raise UserError(
                f"judge_data: expected rounds of {gamma_max} tokens or more, got {gamma} in"
                f" {folder}. Lower gamma_max, or harvest longer rounds"
            )


def refuse_foreign_checkpoint(
    folder: Path, manifest: Mapping[str, Any], key: str, gamma_max: int
) -> None:
    """Raise UserError where it was trained for another pair, other distributions or other layers
    than the harvest's (some of them will do), or for longer drafts than are replayed."""
    config = read_config(folder, key)
    trained = {name: manifest[name] for name in ("pair", "warp", "draft_warp")}
    refuse_mismatch(config, trained, f"{key}: {folder}")
    try:
        inputs = Inputs.from_dict(config["inputs"])
    except (TypeError, KeyError) as error:
        raise damaged(folder, key, config["predictor"], error) from error
    layers = RecordedLayers.from_dict(manifest["inputs"])
    inputs.among(layers, f"{key}: {folder} reads layers that replay lacks")
    if (config.get("gamma") or 0) > gamma_max:
        raise UserError(
            f"{key}: {folder} drafts gamma={config['gamma']} tokens, rounds of {gamma_max} are"
            " replayed. Train it with a smaller predictor.gamma, raise gamma_max, or harvest"
            " longer rounds"
        )


def refuse_other_pair(identity: Mapping[str, Any], manifest: Mapping[str, Any], where: str) -> None:
    """Raise UserError where it is not the harvest's but for its name. where: config key and what
    belongs to it."""
    harvested = manifest["pair"]
    if found := incompatible({"pair": identity}, {"pair": harvested}):
        part = found[0].name.removeprefix("pair.")
        raise UserError(
            f"{where} belongs to another {part} than the harvest of {harvested['name']}"
            f"{of_earlier(harvested)}. Give the pair that was harvested, or harvest this one:"
            " python scripts/gen_data.py"
        )


def given_cost(cost: DictConfig, manifest: Mapping[str, Any], key: str) -> CostTable:
    """The table of the config at `key`, which holds one. Raises UserError for one that was measured
    with another pair."""
    table: CostTable = instantiate(cost)
    if table.pair is not None:
        refuse_other_pair(table.pair, manifest, f"{key}.file: {cost.file}")
    return table


# Replaying ----------------------------------------------------------------------------------------


def replayer(
    cfg: DictConfig, gamma_max: int, folder: str | Path, split: str, asked: Iterable[Asks]
) -> Replayer:
    """One split of a harvest, or "all" of it, with what the predictors of `asked` say of it."""
    table = read_table(folder, split, asked, cfg.pair)
    if cfg.max_new_tokens is not None:
        table = table.shortened(cfg.max_new_tokens)
    return Replayer(table, gamma_max)


def candidates_of(
    cfg: DictConfig,
    stops: Mapping[str, TunableRule],
    replayer: Replayer,
    thresholds: Sequence[float] | None = None,
) -> list[Candidate]:
    """Every rule at every threshold, or at those given: the same ones for every split."""
    policies = {name: stop.policy(replayer.table) for name, stop in stops.items()}
    grid = {
        name: list(thresholds or stop.grid(cfg.points, replayer.gamma_max))
        for name, stop in stops.items()
    }
    return sweep(replayer, policies, grid)
