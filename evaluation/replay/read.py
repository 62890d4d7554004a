"""Reading a harvest for replay: checks that it fits the settings, and the table of its rounds with
predictions for each."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from data_gen.samples import prompt_texts, read_columns, refuse_other_distributions
from data_gen.storage.dataset import Harvest
from data_gen.storage.shards import SPLITS
from decoding.cost import CostTable
from decoding.engines.serial import SerialEngine
from decoding.interfaces import StopRule
from decoding.models.loading import ModelPair
from decoding.sampling import Warp
from decoding.settings import Pair
from decoding.stopping.base import TunableRule
from decoding.stopping.never import Never
from decoding.stopping.rollout_table import RolloutTable, build
from decoding.structures.chain import Chain
from decoding.verifiers.token import TokenVerifier
from evaluation.replay.simulate import Replayer
from predictors.base import Records, damaged, read_config, refuse_mismatch
from predictors.features.layers import RecordedLayers
from predictors.inputs import Inputs
from runtime.compatibility import incompatible
from runtime.errors import UserError
from runtime.job import command_of
from runtime.tracking import tracked

RECORDED = {
    "tokens": "token",
    "drawn": "drafted",
    "accepted": "accepted",
    "accept": "accept_prob",
    "max_q": "q_max",
    "entropy": "q_entropy",
    "confidence": "q_drawn",
}
"""Columns of a harvest, by the fields of `RolloutTable` that hold them."""
SIBLINGS = {True: "top_accept", False: "rrsw_accept"}
"""Of a greedy draft, and of a sampled one."""


class Asks(Protocol):
    """A stop rule or a structure with predictions for every round, if it has a predictor. columns:
    those of a harvest's round records that `predictions` reads."""

    columns: Sequence[str]

    def predictions(self, records: Records, layers: RecordedLayers) -> dict[str, Tensor]: ...


# The engine that is replayed ----------------------------------------------------------------------


def engine(
    pair: ModelPair, stop: StopRule | None, gamma_max: int, warp: Warp, draft_warp: Warp
) -> SerialEngine:
    """Return the engine that replay counts for. stop: None for drafts of `gamma_max` tokens."""
    chain: Any = Chain(gamma_max)
    verifier: Any = TokenVerifier()
    eos_ids = frozenset(pair.eos_ids)
    return SerialEngine(pair, chain, stop or Never(), verifier, warp, draft_warp, eos_ids)


REPLAYED = {
    part: f"{kind.__module__}.{kind.__qualname__}"
    for part, kind in (("engine", SerialEngine), ("structure", Chain), ("verifier", TokenVerifier))
}
"""What a method is made of, as configs name it, where replay says what it counts."""


# Checks -------------------------------------------------------------------------------------------


def open_harvests(cfg: DictConfig) -> tuple[Harvest, list[Harvest]]:
    """Return the harvest of `data`, and those of `judge_data`. Raises UserError if they lack data
    for the replay."""
    harvest = Harvest.open(cfg.data)
    elsewhere = [Harvest.open(folder, "judge_data") for folder in cfg.judge_data]
    check_sizes(cfg, harvest)
    refuse_other_warps(cfg, harvest)
    gamma_max = cfg.gamma_max or harvest.gamma
    for other in elsewhere:
        refuse_other_distributions(other, harvest, "judge_data", str(cfg.data))
        if other.gamma < gamma_max:
            raise UserError(
                f"judge_data: expected rounds of {gamma_max} tokens or more, got {other.gamma} in"
                f" {other.folder}. Lower gamma_max, or harvest longer rounds"
            )
    if not cfg.check:
        judged = [(harvest, cfg.choose), (harvest, cfg.judge)]
        warn_of_repeats(*judged, *((other, "all") for other in elsewhere))
    return harvest, elsewhere


@contextmanager
def tracking(cfg: DictConfig, job: str, elsewhere: Sequence[Harvest] = ()) -> Iterator[Any]:
    """Track a run that uses the harvest of `cfg` and others."""
    harvest = Harvest.open(cfg.data)
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    with tracked(cfg.logger, job, config, [harvest.context], cfg.methods) as logger:
        for each in (harvest, *elsewhere):
            logger.used(*each.artifact)
        yield logger


def tunable_rules(cfg: DictConfig, harvest: Harvest) -> dict[str, TunableRule]:
    """Return the rules of `methods`, by name. Raises UserError for one that has no replay policy,
    and for a checkpoint, of a rule or of a structure, that does not fit the harvest."""
    for name in cfg.methods:
        group = "rules" if name in cfg.rules else "structures"
        if "checkpoint" in cfg[group][name]:
            key, gamma_max = f"{group}.{name}.checkpoint", cfg.gamma_max or harvest.gamma
            refuse_foreign_checkpoint(Path(cfg[group][name].checkpoint), harvest, key, gamma_max)
        draft = harvest.warps.draft
        if group == "structures" and draft.processors and draft.temperature == 0:
            raise UserError(
                f"methods: {name} takes the most probable tokens as processors leave them, and"
                f" {cfg.data} records those of the draft without. Leave {name} out, or harvest with"
                " draft_warp=default"
            )
    stops = {name: instantiate(cfg.rules[name]) for name in cfg.methods if name in cfg.rules}
    return {name: tunable(stop, name) for name, stop in stops.items()}


def tunable(stop: StopRule, name: str) -> TunableRule:
    """Return the rule `name`. Raises UserError for one that has no replay policy."""
    if not isinstance(stop, TunableRule):
        raise UserError(
            f"rules.{name}: expected a rule that can be replayed, got {type(stop).__name__}. Give"
            " one that has a `policy`"
        )
    return stop


def warn_of_repeats(*judged: tuple[Harvest, str]) -> None:
    """Print a warning for each harvest and split in which prompts have the same text."""
    for harvest, split in judged:
        texts = list(prompt_texts(harvest, split))
        if again := len(texts) - len(set(texts)):
            print(
                f"warning: {again} of {len(texts)} prompts of {harvest.folder} ({split}) repeat the"
                " text of another, so intervals over prompts are too narrow. Harvest each text once"
            )


def check_sizes(cfg: DictConfig, harvest: Harvest) -> None:
    """Raise UserError where rounds or responses of the harvest are too short."""
    held = {"gamma_max": harvest.gamma, "max_new_tokens": harvest.max_new_tokens}
    for key, harvested in held.items():
        if cfg[key] is not None and cfg[key] > harvested:
            raise UserError(
                f"{key}: {cfg[key]} is more than the {harvested} harvested in {cfg.data}. Lower it"
            )


def refuse_other_warps(cfg: DictConfig, harvest: Harvest) -> None:
    """Raise UserError where the distributions of the settings are not those of the harvest."""
    for key in ("warp", "draft_warp"):
        if key in cfg and instantiate(cfg[key]).to_dict() != harvest.context[key]:
            raise UserError(
                f"{key}: {cfg.data} was harvested with {harvest.context[key]}. Give the same, or"
                " another data="
            )


def refuse_foreign_checkpoint(folder: Path, harvest: Harvest, key: str, gamma_max: int) -> None:
    """Raise UserError if a checkpoint was trained for another pair, other distributions, layers
    that the harvest lacks, or longer drafts than are replayed."""
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
    """Raise UserError if a pair is not the `harvested` one (names are ignored). where: config key
    and what belongs to it."""
    if unlike := incompatible({"pair": identity}, {"pair": harvested}):
        part = unlike[0].name.removeprefix("pair.")
        raise UserError(
            f"{where} belongs to another {part} than the harvest of {harvested['name']}."
            " Give the pair that was harvested, or harvest this one:"
            f" {command_of('gen_data', 'anchors.stride=1', 'out=data/another')}"
        )


def given_cost(cost: DictConfig, harvest: Harvest, key: str) -> CostTable:
    """Return the table of the config at `key`, which holds one. Raises UserError for one that was
    measured with another pair."""
    table: CostTable = instantiate(cost)
    if table.pair is not None:
        refuse_other_pair(table.pair, harvest.context["pair"], f"{key}.file: {cost.file}")
    return table


# Reading ------------------------------------------------------------------------------------------


def replayer(
    cfg: DictConfig, gamma_max: int, harvest: Harvest, split: str, asked: Iterable[Asks] = ()
) -> Replayer:
    """Return the replayer of one split of a harvest, or "all" of it, with predictions of
    `asked`."""
    table = read_table(harvest, split, asked, Pair.of(cfg.pair))
    if cfg.max_new_tokens is not None:
        table = table.shortened(cfg.max_new_tokens)
    return Replayer(table, gamma_max)


def read_table(
    harvest: Harvest, split: str, asked: Iterable[Asks] = (), pair: Pair | None = None
) -> RolloutTable:
    """Return the rounds of one split, or of "all", with predictions of `asked`.

    pair: settings of the harvested pair, only needed if the harvest stored no features. Raises
    UserError unless the harvest has a round at every position."""
    all_asked, stride = list(asked), harvest.manifest.anchors.stride
    if split not in ("all", *SPLITS):
        raise UserError(f"split: expected all, {', '.join(SPLITS)}, got {split!r}. Use one of them")
    if stride != 1:
        raise UserError(
            f"data: expected a round at every position, got one every {stride} in"
            f" {harvest.folder}. Harvest them:"
            f" {command_of('gen_data', 'anchors.stride=1', f'out={harvest.folder}-rounds')}"
        )
    siblings = SIBLINGS[harvest.warps.draft.temperature == 0]
    read = (name for each in all_asked for name in each.columns)
    columns = dict.fromkeys(["anchor", *RECORDED.values(), siblings, *read])
    records = read_columns(harvest, "rounds", split, list(columns), pair)
    prompts = list(harvest.prompts(split))
    sizes = records["group"].bincount(minlength=len(prompts)).tolist()
    if sizes != [len(prompt.response_tokens) for prompt in prompts]:
        raise UserError(
            f"data: {harvest.folder} is damaged (rounds and responses differ in length). Harvest"
            " again: out=..."
        )
    recorded = {name: records[column] for name, column in RECORDED.items()}
    recorded["siblings"] = records[siblings][..., -2:]
    predicted: dict[str, Tensor] = {}
    for each in all_asked:
        predicted |= each.predictions(records, harvest.inputs)
    values, predictions = (
        {name: column.split(sizes) for name, column in columns.items()}
        for columns in (recorded, predicted)
    )
    rows = [
        {
            "prompt_id": prompt.prompt_id,
            "length": sizes[number],
            "max_new": harvest.max_new_tokens,
            **{name: parts[number] for name, parts in values.items()},
            "predicted": {name: parts[number] for name, parts in predictions.items()},
        }
        for number, prompt in enumerate(prompts)
    ]
    return build(rows, harvest.greedy)
