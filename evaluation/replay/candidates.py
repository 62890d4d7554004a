"""What scripts that replay a harvest share: checks of their settings, the harvest as replays, rules
at thresholds."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from data_gen.samples import refuse_other_distributions
from data_gen.storage.dataset import Harvest
from decoding.cost import CostTable
from decoding.engines.serial import SerialEngine
from decoding.interfaces import StopRule
from decoding.models.loading import ModelPair
from decoding.sampling import Warp
from decoding.settings import Pair
from decoding.stopping.base import TunableRule
from decoding.stopping.never import Never
from decoding.structures.chain import Chain
from decoding.verifiers.token import TokenVerifier
from evaluation.replay.read import Asks, read_table
from evaluation.replay.simulate import Replayer
from evaluation.replay.tuning import Candidate, sweep
from predictors.base import damaged, read_config, refuse_mismatch
from predictors.inputs import Inputs
from runtime.compatibility import incompatible, of_earlier
from runtime.errors import UserError


def engine(
    pair: ModelPair, stop: StopRule | None, gamma_max: int, warp: Warp, draft_warp: Warp
) -> SerialEngine:
    """stop: None for drafts of `gamma_max` tokens."""
    chain: Any = Chain(gamma_max)
    verifier: Any = TokenVerifier()
    eos_ids = frozenset(pair.eos_ids)
    return SerialEngine(pair, chain, stop or Never(), verifier, warp, draft_warp, eos_ids)


def target(part: type) -> str:
    """Return a class as a config names it."""
    return f"{part.__module__}.{part.__qualname__}"


REPLAYED = {
    "engine": target(SerialEngine),
    "structure": target(Chain),
    "verifier": target(TokenVerifier),
}
"""What a method is made of, as configs name it, where replay says what it counts."""


# Checks -------------------------------------------------------------------------------------------


def check_sizes(cfg: DictConfig, harvest: Harvest) -> None:
    """Raise UserError where the harvest does not hold what is to be replayed."""
    held = {"gamma_max": harvest.gamma, "max_new_tokens": harvest.max_new_tokens}
    for key, harvested in held.items():
        if cfg[key] is not None and cfg[key] > harvested:
            raise UserError(
                f"{key}: {cfg[key]} is more than the {harvested} harvested in {cfg.data}. Lower it"
            )


def refuse_other_warps(cfg: DictConfig, harvest: Harvest) -> None:
    """Raise UserError where the distributions of the settings are not those of the harvest."""
    for key, warp in zip(("warp", "draft_warp"), harvest.warps, strict=True):
        if instantiate(cfg[key]) != warp:
            raise UserError(
                f"{key}: {cfg.data} was harvested with {harvest.context[key]}. Give the same, or"
                " another data="
            )


def refuse_other_harvests(cfg: DictConfig, harvest: Harvest, others: Iterable[Harvest]) -> None:
    """Raise UserError where one of the `others`, of `judge_data`, is of another pair or other
    distributions, or not as long."""
    gamma_max = cfg.gamma_max or harvest.gamma
    for other in others:
        refuse_other_distributions(other, harvest, "judge_data", str(cfg.data))
        if other.gamma < gamma_max:
            raise UserError(
                f"judge_data: expected rounds of {gamma_max} tokens or more, got {other.gamma} in"
                f" {other.folder}. Lower gamma_max, or harvest longer rounds"
            )


def refuse_foreign_checkpoint(folder: Path, harvest: Harvest, key: str, gamma_max: int) -> None:
    """Raise UserError where it was trained for another pair, other distributions or other layers
    than the harvest's (some of them will do), or for longer drafts than are replayed."""
    config = read_config(folder, key)
    refuse_mismatch(config, harvest.context, f"{key}: {folder}")
    try:
        inputs = Inputs.from_dict(config["inputs"])
    except (TypeError, KeyError) as error:
        raise damaged(folder, key, config["predictor"], error) from error
    inputs.among(harvest.inputs, f"{key}: {folder} reads layers that replay lacks")
    if (config.get("gamma") or 0) > gamma_max:
        raise UserError(
            f"{key}: {folder} drafts gamma={config['gamma']} tokens, rounds of {gamma_max} are"
            " replayed. Train it with a smaller predictor.gamma, raise gamma_max, or harvest"
            " longer rounds"
        )


def refuse_other_pair(
    identity: Mapping[str, Any], harvested: Mapping[str, Any], where: str
) -> None:
    """Raise UserError where a pair is another than the `harvested` one, but for its name. where:
    config key and what belongs to it."""
    if unlike := incompatible({"pair": identity}, {"pair": harvested}):
        part = unlike[0].name.removeprefix("pair.")
        raise UserError(
            f"{where} belongs to another {part} than the harvest of {harvested['name']}"
            f"{of_earlier(harvested)}. Give the pair that was harvested, or harvest this one:"
            " python scripts/gen_data.py"
        )


def given_cost(cost: DictConfig, harvest: Harvest, key: str) -> CostTable:
    """The table of the config at `key`, which holds one. Raises UserError for one that was measured
    with another pair."""
    table: CostTable = instantiate(cost)
    if table.pair is not None:
        refuse_other_pair(table.pair, harvest.context["pair"], f"{key}.file: {cost.file}")
    return table


# Replaying ----------------------------------------------------------------------------------------


def replayer(
    cfg: DictConfig, gamma_max: int, harvest: Harvest, split: str, asked: Iterable[Asks]
) -> Replayer:
    """One split of a harvest, or "all" of it, with what the predictors of `asked` say of it."""
    table = read_table(harvest, split, asked, Pair.of(cfg.pair))
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
