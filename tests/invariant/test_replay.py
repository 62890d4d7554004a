"""Replay = decode: the counts read off recorded rollouts are those of a real decode, prompt by
prompt."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from data_gen.harvest import Progress, harvest
from data_gen.requests import Request
from data_gen.run import finish
from data_gen.settings import HarvestSettings
from data_gen.storage.dataset import Harvest
from decoding.engines.serial import SerialEngine
from decoding.interfaces import StopRule
from decoding.models.loading import ModelPair
from decoding.sampling import Sampler, Warp
from decoding.stopping.base import setting_of
from decoding.stopping.rollout_table import RolloutTable
from decoding.structures.chain import Chain
from decoding.trace import Trace
from decoding.verifiers.token import TokenVerifier
from evaluation.replay.check import counted
from evaluation.replay.read import read_table
from evaluation.replay.simulate import Replayer, counts_of
from predictors.features.layers import RecordedLayers
from tests.helpers.data.datasets import SETTINGS
from tests.helpers.data.rollout_tables import slow_table
from tests.helpers.models.tiny_pair import EOS, VOCAB, tiny_pair
from tests.helpers.training.checkpoints import columns, write_checkpoint

CONF = Path(__file__).parents[2] / "conf" / "stop"
GREEDY = Warp(0.0)
GAMMA, MAX_NEW, WIDTH = 8, 26, 24
PROMPTS = [
    torch.randint(1, VOCAB, (size,), generator=torch.Generator().manual_seed(size))
    for size in (3, 4, 5, 6, 7)
]

RULES: list[tuple[str, dict[str, Any]]] = [
    *(("fixed", {"gamma": gamma}) for gamma in (1, 3, 8, 20)),
    *(("confidence", {"threshold": eps}) for eps in (0.1, 0.35, 0.6)),
    *(("product", {"threshold": eps}) for eps in (0.01, 0.1, 0.5)),
    *(("confidence_before", {"threshold": eps}) for eps in (0.2, 0.4, 0.7)),
    *(
        ("adaedl", {"threshold": level, "step": step})
        for level, step in ((0.2, 0.01), (0.35, 0.2), (0.5, 0.6))
    ),
    *(
        ("specdecpp", {"threshold": h, "bounds": [1, 20], "order": "paper"})
        for h in (0.3, 0.55, 0.8)
    ),
    *(("specdecpp", {"threshold": h, "bounds": [2, 6], "order": "code"}) for h in (0.3, 0.55, 0.8)),
    ("specdecpp", {"threshold": 0.4, "bounds": [3, 3]}),
    *(("hrad", {"confidence": {"threshold": eps}}) for eps in (0.1, 0.35, 0.6)),
    (
        "hrad",
        {
            "confidence": {
                "_target_": "decoding.stopping.confidence_before.ConfidenceBefore",
                "threshold": 0.4,
            }
        },
    ),
    *(("value", {"threshold": worth}) for worth in (0.0005, 0.02, 0.1)),
]
ONLY_HARVESTED = [("hrad", {"none": 0.4, "confidence": {"threshold": 0.35}})]
SPREAD = {"hrad": 0.01, "value": 0.3}
IDS = [f"{name}-{values}" for name, values in RULES]


@cache
def models() -> ModelPair:
    """The tiny pair with an end token that its greedy responses do run into."""
    pair = tiny_pair()
    pair.eos_ids = (EOS, 31)
    return pair


@cache
def checkpoints() -> Path:
    """Untrained predictors whose outputs are spread out."""
    folder = Path(mkdtemp())
    write_checkpoint(folder / "specdecpp", "specdecpp", WIDTH)
    write_checkpoint(folder / "hrad", "hrad", 2 * WIDTH, gamma=5)
    write_checkpoint(folder / "value", "value", columns("value", WIDTH))
    return folder


def rule(name: str, values: dict[str, Any]) -> StopRule:
    config = OmegaConf.merge(OmegaConf.load(CONF / f"{name}.yaml"), values)
    if "checkpoint" in config:
        config.checkpoint = str(checkpoints() / Path(config.checkpoint).name)
    stop = instantiate(config)
    if name in SPREAD:  # an untrained classifier always says the same: make the classes take turns
        stop.predictor.head.scale.fill_(SPREAD[name])
    return stop


@cache
def table() -> RolloutTable:
    return slow_table(
        models(),
        PROMPTS,
        MAX_NEW,
        GAMMA,
        GREEDY,
        GREEDY,
        models().eos_ids,
        rule("specdecpp", {}),
        rule("hrad", {}),
        rule("value", {}),
    )


def decode(stop: StopRule, max_new: int, gamma_max: int) -> list[Trace]:
    engine = SerialEngine(
        models(),
        Chain(gamma_max),
        stop,
        TokenVerifier(),
        GREEDY,
        GREEDY,
        frozenset(models().eos_ids),
    )
    return [engine.decode(prompt, max_new, Sampler.seeded(0)) for prompt in PROMPTS]


def replayed(found: RolloutTable, stop: StopRule, gamma_max: int) -> dict[str, Any]:
    return Replayer(found, gamma_max).replay(stop.policy(found), setting_of(stop))


def test_the_instances_have_every_edge() -> None:
    found = table()
    assert (found.length < MAX_NEW).any() and (found.length == MAX_NEW).any(), (
        "an end token, and the limit"
    )
    inside = np.arange(found.tokens.shape[1]) < found.length[:, None]
    outcome = found.predicted[rule("hrad", {}).outcomes]
    assert len(np.unique(outcome[inside])) == 3, "all classes"
    assert (found.drawn[inside] < GAMMA).any(), "an end token inside a draft"
    assert {0, 1, 2} <= set(found.accepted[inside])


@pytest.mark.parametrize(("name", "values"), RULES, ids=IDS)
def test_replay_is_decode(name: str, values: dict[str, Any]) -> None:
    stop = rule(name, values)
    counts, traces = replayed(table(), stop, GAMMA), decode(stop, MAX_NEW, GAMMA)
    for prompt, trace in enumerate(traces):
        assert counts_of(counts, prompt) == counted(trace)
        lengths = np.bincount(
            [len(round_.draft_tokens) for round_ in trace.rounds], minlength=GAMMA + 1
        )
        assert counts["calls_by_drafted"][prompt].tolist() == lengths.tolist()


@pytest.mark.parametrize(
    ("max_new", "gamma_max"), [(1, GAMMA), (2, GAMMA), (GAMMA, GAMMA), (GAMMA, 2)]
)
@pytest.mark.parametrize(("name", "values"), RULES[1::3], ids=IDS[1::3])
@pytest.mark.few(12)
def test_replay_is_decode_where_the_output_ends(
    name: str, values: dict[str, Any], max_new: int, gamma_max: int
) -> None:
    """A long harvest serves shorter outputs, with another gamma_max as well."""
    stop = rule(name, values)
    counts, traces = (
        replayed(table().shortened(max_new), stop, gamma_max),
        decode(stop, max_new, gamma_max),
    )
    assert [counts_of(counts, prompt) for prompt in range(len(PROMPTS))] == [
        counted(trace) for trace in traces
    ]


def test_a_walk_and_the_expectation_are_the_same_path() -> None:
    for name, values in RULES[::2]:
        stop = rule(name, values)
        policy, level = stop.policy(table()), setting_of(stop)
        replayer = Replayer(table(), GAMMA)
        counts, steps = replayer.walk(policy, level)
        expected = replayer.replay(policy, level)
        assert steps[0].start.tolist() == [0] * len(PROMPTS)
        for prompt in range(len(PROMPTS)):
            assert counts_of(counts, prompt) == counts_of(expected, prompt)
            assert sum(step.live[prompt] for step in steps) == counts["rounds"][prompt]


# From a harvest -----------------------------------------------------------------------------------


def recipe(warp: Warp, max_new: int, gamma: int) -> HarvestSettings:
    return HarvestSettings(
        gamma=gamma,
        seed=0,
        max_new_tokens=max_new,
        batch_size=64,
        mixing=0.15,
        stride=1,
        warp=warp,
        draft_warp=warp,
        layers=RecordedLayers([-1], [-1]),
    )


def harvested(prompts: list[torch.Tensor], how: HarvestSettings, folder: Path) -> RolloutTable:
    requests = [
        Request(f"{number:03}", "toy", prompt, "train") for number, prompt in enumerate(prompts)
    ]
    harvest(models(), requests, how, folder, Progress())
    finish(models(), requests, how, folder, *SETTINGS.values())
    stops = [rule(name, {}) for name in ("specdecpp", "hrad", "value")]
    more = [rule(*one) for one in ONLY_HARVESTED]
    return read_table(Harvest.open(folder), "train", [*stops, *more])


def test_a_harvest_holds_what_the_models_say_one_by_one(tmp_path: Path) -> None:
    found, slow = harvested(PROMPTS, recipe(GREEDY, MAX_NEW, GAMMA), tmp_path), table()
    order = [found.prompt_ids.index(f"{number:03}") for number in range(len(PROMPTS))]
    assert found.greedy and found.length[order].tolist() == slow.length.tolist()
    room = slow.max_new[:, None] - np.arange(slow.tokens.shape[1])
    inside = np.arange(slow.tokens.shape[1]) < slow.length[:, None]
    classes = rule("hrad", {}).outcomes
    said, wanted = found.predicted[classes][order], slow.predicted[classes]
    assert np.array_equal(said[inside], wanted[inside])
    seen = inside[..., None] & (np.arange(GAMMA) < np.minimum(slow.drawn, room)[..., None])
    for head in (rule("specdecpp", {}).survival, rule("value", {}).survival):
        ours, theirs = found.predicted[head][order], slow.predicted[head]
        assert np.allclose(ours[seen], theirs[seen], atol=1e-5), head
    for name in ("tokens", "accept", "siblings", "max_q", "entropy", "confidence"):
        ours, theirs = getattr(found, name)[order], getattr(slow, name)
        assert np.allclose(ours[seen], theirs[seen], atol=1e-5), name


@pytest.mark.parametrize(("name", "values"), [*RULES[1::3], *ONLY_HARVESTED])
def test_replay_of_a_harvest_is_decode(name: str, values: dict[str, Any]) -> None:
    stop, found = rule(name, values), greedy_harvest()
    counts, traces = replayed(found, stop, GAMMA), decode(stop, MAX_NEW, GAMMA)
    for place, prompt in enumerate(found.prompt_ids):
        assert counts_of(counts, place) == counted(traces[int(prompt)])


@cache
def greedy_harvest() -> RolloutTable:
    return harvested(PROMPTS, recipe(GREEDY, MAX_NEW, GAMMA), Path(mkdtemp()))
