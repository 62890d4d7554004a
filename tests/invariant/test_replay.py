"""Replay = decode: the counts read off recorded rollouts are those of a real decode, prompt by
prompt, of chains and of combs; of a sampled target in expectation, beside real decodes of toy
models."""

import math
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from numpy.typing import NDArray
from omegaconf import OmegaConf

from decoding.cost import cost_table
from decoding.engines.serial import SerialEngine
from decoding.interfaces import Pair, StopRule
from decoding.models.loading import ModelPair
from decoding.models.table_lm import TableLM, mixed_table, random_table
from decoding.processors import processed
from decoding.sampling import Sampler, Warp
from decoding.stopping.base import setting_of
from decoding.stopping.fixed import Fixed
from decoding.stopping.never import Never
from decoding.stopping.rollout_table import RolloutTable
from decoding.structures.chain import Chain
from decoding.structures.comb import Comb, Worth, grow
from decoding.structures.static_tree import StaticTree
from decoding.trace import Trace
from decoding.verifiers.point_mass import PointMassVerifier
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.token import TokenVerifier
from evaluation.replay.check import counted
from evaluation.replay.simulate import Replayer, counts_of
from predictors.calibration import Calibration
from predictors.outcomes import Chances
from predictors.survival import Survival
from tests.contract.engines import stop_rule
from tests.helpers.data.rollout_tables import harvested_table, slow_table
from tests.helpers.decoding.value_stub import Saying, grown
from tests.helpers.models.tiny_pair import EOS, random_words, tiny_pair
from tests.helpers.training.checkpoints import columns, write_checkpoint

CONF = Path(__file__).parents[2] / "conf" / "stop"
GREEDY = Warp(0.0)
GAMMA, MAX_NEW, WIDTH = 8, 26, 24
Counts = dict[str, NDArray[np.float64]]


PROMPTS = [random_words(size, seed=size) for size in (3, 4, 5, 6, 7)]


def level(value: float, **more: Any) -> dict[str, Any]:
    return {"threshold": value, **more}


BEFORE = {"_target_": "decoding.stopping.confidence_before.ConfidenceBefore", "threshold": 0.4}
RULES: list[tuple[str, dict[str, Any]]] = [
    *(("fixed", {"gamma": gamma}) for gamma in (1, 3, 8, 20)),
    *(("confidence", level(eps)) for eps in (0.1, 0.35, 0.6)),
    *(("product", level(eps)) for eps in (0.01, 0.1, 0.5)),
    *(("confidence_before", level(eps)) for eps in (0.2, 0.4, 0.7)),
    *(("adaedl", level(t, step=step)) for t, step in ((0.2, 0.01), (0.35, 0.2), (0.5, 0.6))),
    *(("specdecpp", level(h, bounds=[1, 20], order="paper")) for h in (0.3, 0.55, 0.8)),
    *(("specdecpp", level(h, bounds=[2, 6], order="code")) for h in (0.3, 0.55, 0.8)),
    ("specdecpp", level(0.4, bounds=[3, 3])),
    *(("hrad", {"confidence": level(eps)}) for eps in (0.1, 0.35, 0.6)),
    ("hrad", {"confidence": BEFORE}),
    *(("value", level(worth)) for worth in (0.0005, 0.02, 0.1)),
]
ONLY_HARVESTED = [
    ("hrad", {"none": 0.4, "confidence": level(0.35)}),
    *(("predicted_length", level(least)) for least in (0.2, 0.5, 0.7)),
]
SPREAD = {"hrad": 0.01, "predicted_length": 0.01, "value": 0.3}
IDS = [f"{name}-{values}" for name, values in RULES]
LEARNED = ("specdecpp", "hrad", "value")


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
    for name in ("hrad", "hrad-lengths"):
        write_checkpoint(folder / name, name, 2 * WIDTH, gamma=5)
    write_checkpoint(folder / "value", "value", columns("value", WIDTH))
    return folder


def rule(name: str, values: dict[str, Any] | None = None) -> StopRule:
    config = OmegaConf.merge(OmegaConf.load(CONF / f"{name}.yaml"), values or {})
    if "checkpoint" in config:
        config.checkpoint = str(checkpoints() / Path(config.checkpoint).name)
    stop = instantiate(config)
    if name in SPREAD:  # an untrained classifier always says the same: make the classes take turns
        stop.predictor.head.scale.fill_(SPREAD[name])
    return stop


@cache
def table() -> RolloutTable:
    ends, asked = models().eos_ids, map(rule, LEARNED)
    return slow_table(models(), PROMPTS, MAX_NEW, GAMMA, GREEDY, GREEDY, ends, *asked)


@cache
def harvested() -> RolloutTable:
    asked = [*map(rule, LEARNED), *(rule(*one) for one in ONLY_HARVESTED)]
    return harvested_table(models(), PROMPTS, asked, gamma=GAMMA, max_new_tokens=MAX_NEW)


def decode(stop: StopRule, max_new: int = MAX_NEW, gamma_max: int = GAMMA) -> list[Trace]:
    return decoded(Chain(gamma_max), stop, TokenVerifier(), GREEDY, max_new)


def decoded(
    structure: Any,
    stop: Any,
    verifier: Any,
    draft_warp: Warp,
    max_new: int = MAX_NEW,
    warp: Warp = GREEDY,
) -> list[Trace]:
    ends = frozenset(models().eos_ids)
    engine = SerialEngine(models(), structure, stop, verifier, warp, draft_warp, ends)
    return [engine.decode(prompt, max_new, Sampler.seeded(0)) for prompt in PROMPTS]


def replayed(found: RolloutTable, stop: StopRule, gamma_max: int = GAMMA) -> Counts:
    return Replayer(found, gamma_max).replay(stop.policy(found), setting_of(stop))


def check_equal(counts: Counts, traces: list[Trace], comb: bool = False) -> None:
    for prompt, trace in enumerate(traces):
        expected = counted(trace)
        if comb:  # one number is computed for every token of the path
            expected["questions"] = counts["draft_forwards"][prompt]
        assert counts_of(counts, prompt) == expected
        by_length = counts["calls_by_drafted"][prompt]
        sizes = [len(round_.draft_tokens) for round_ in trace.rounds]
        assert by_length.tolist() == np.bincount(sizes, minlength=len(by_length)).tolist()


# Chains -------------------------------------------------------------------------------------------


def test_the_instances_have_every_edge() -> None:
    found = table()
    assert (found.length < MAX_NEW).any(), "an end token"
    assert (found.length == MAX_NEW).any(), "and the limit"
    inside = np.arange(found.tokens.shape[1]) < found.length[:, None]
    outcome = found.predicted[rule("hrad").outcomes]
    assert len(np.unique(outcome[inside])) == 3, "all classes"
    assert (found.drawn[inside] < GAMMA).any(), "an end token inside a draft"
    assert {0, 1, 2} <= set(found.accepted[inside])


@pytest.mark.parametrize(("name", "values"), RULES, ids=IDS)
def test_replay_is_decode(name: str, values: dict[str, Any]) -> None:
    """Exactly, and where the threshold does not follow the verdicts a walk is the expectation."""
    stop = rule(name, values)
    counts, policy = replayed(table(), stop), stop.policy(table())
    check_equal(counts, decode(stop))
    walked, steps = Replayer(table(), GAMMA).walk(policy, setting_of(stop))
    assert steps[0].start.tolist() == [0] * len(PROMPTS)
    for prompt in range(len(PROMPTS)):
        assert counts_of(walked, prompt) == counts_of(counts, prompt)
        assert sum(step.live[prompt] for step in steps) == counts["rounds"][prompt]


@pytest.mark.parametrize(("max_new", "gamma_max"), [(1, 8), (2, 8), (8, 8), (8, 2)])
@pytest.mark.parametrize(("name", "values"), RULES[1::3], ids=IDS[1::3])
@pytest.mark.few(12)
def test_replay_is_decode_where_the_output_ends(
    name: str, values: dict[str, Any], max_new: int, gamma_max: int
) -> None:
    """A long harvest serves shorter outputs, with another gamma_max as well."""
    stop = rule(name, values)
    counts = replayed(table().shortened(max_new), stop, gamma_max)
    found = [counts_of(counts, prompt) for prompt in range(len(PROMPTS))]
    assert found == [counted(trace) for trace in decode(stop, max_new, gamma_max)]


@pytest.mark.parametrize(("name", "values"), [*RULES[1::3], *ONLY_HARVESTED])
def test_replay_of_a_harvest_is_decode(name: str, values: dict[str, Any]) -> None:
    stop = rule(name, values)
    traces = decode(stop)
    in_order = [traces[int(prompt)] for prompt in harvested().prompt_ids]
    check_equal(replayed(harvested(), stop), in_order)


PENALISED = processed(0.0, repetition_penalty=1.3, presence_penalty=0.4, min_new_tokens=6)


@cache
def penalised(draft_penalised: bool) -> RolloutTable:
    asked = [rule(name) for name in LEARNED]
    draft_warp = PENALISED if draft_penalised else GREEDY
    settings: Any = {"gamma": GAMMA, "max_new_tokens": MAX_NEW, "warp": PENALISED}
    return harvested_table(models(), PROMPTS, asked, draft_warp, **settings)


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize(("name", "values"), RULES[1::3])
def test_replay_of_a_penalised_harvest_is_decode(
    name: str, values: dict[str, Any], both: bool
) -> None:
    stop, warp = rule(name, values), PENALISED if both else GREEDY
    traces = decoded(Chain(GAMMA), stop, TokenVerifier(), warp, warp=PENALISED)
    assert [t.tokens for t in traces] != [t.tokens for t in decode(stop)], "the penalty is felt"
    in_order = [traces[int(prompt)] for prompt in penalised(both).prompt_ids]
    check_equal(replayed(penalised(both), stop), in_order)


def test_a_harvest_holds_what_the_models_say_one_by_one() -> None:
    found, slow = harvested(), table()
    order = [found.prompt_ids.index(f"{number:03}") for number in range(len(PROMPTS))]
    assert found.greedy and found.length[order].tolist() == slow.length.tolist()
    left = slow.max_new[:, None] - np.arange(slow.tokens.shape[1])
    inside = np.arange(slow.tokens.shape[1]) < slow.length[:, None]
    classes = rule("hrad").outcomes
    assert np.array_equal(found.predicted[classes][order][inside], slow.predicted[classes][inside])
    seen = inside[..., None] & (np.arange(GAMMA) < np.minimum(slow.drawn, left)[..., None])
    names = ("tokens", "accept", "siblings", "max_q", "entropy", "confidence")
    pairs = {name: (getattr(found, name), getattr(slow, name)) for name in names}
    for head in (rule("specdecpp").survival, rule("value").survival):
        pairs[head] = found.predicted[head], slow.predicted[head]
    for name, (harvest, one_by_one) in pairs.items():
        assert np.allclose(harvest[order][seen], one_by_one[seen], atol=1e-5), name


# Combs --------------------------------------------------------------------------------------------


SHAPES = [[0, 0, 0], [1, 0, 0, 1], [2, 2], [2, 1, 0, 2, 1], [0, 2, 0, 0, 0, 0, 0, 1]]
SHAPE_IDS = ["".join(map(str, shape)) for shape in SHAPES]


def static(leaves: list[int]) -> StaticTree:
    """A path of len(leaves) tokens with so many leaves beside each."""
    parents, tip, rows = list[int](), 0, 0
    for beside in leaves:
        parents += [tip] * (1 + beside)
        tip, rows = rows + 1, rows + 1 + beside
    return StaticTree(parents)


def comb(found: RolloutTable, leaves: list[int]) -> Comb:
    """The same from every position, as far as the output goes."""
    path, beside = found.limit(len(leaves)), np.zeros(found.tokens.shape, np.int64)
    beside[..., : len(leaves)] = leaves
    return Comb(path, np.where(np.arange(found.gamma) < path[..., None], beside, 0))


def combed(found: RolloutTable, leaves: list[int]) -> Counts:
    return Replayer(found, found.gamma).combs(comb(found, leaves))


@pytest.mark.parametrize("leaves", SHAPES, ids=SHAPE_IDS)
@pytest.mark.parametrize("max_new", [3, MAX_NEW])
def test_a_greedy_replay_of_combs_is_decode(leaves: list[int], max_new: int) -> None:
    traces = decoded(static(leaves), Never(), PointMassVerifier(), Warp(), max_new)
    check_equal(combed(table().shortened(max_new), leaves), traces, comb=True)
    rescued = any(round_.row != round_.accepted for trace in traces for round_ in trace.rounds)
    assert rescued or not any(leaves) or max_new < MAX_NEW, "some leaf was accepted"


def test_a_comb_without_leaves_is_a_chain() -> None:
    chain, found = replayed(table(), Fixed(4)), combed(table(), [0] * 4)
    for name in ("draft_forwards", "drafted", "accepted", "emitted", "rounds"):
        assert np.array_equal(found[name], chain[name]), name
    assert np.array_equal(found["calls_by_drafted"][:, : GAMMA + 1], chain["calls_by_drafted"])


Says = Callable[[int], tuple[float, float, float, float]]


def falling(depth: int) -> tuple[float, float, float, float]:
    return 0.95 - 0.1 * depth, 0.9 - 0.1 * depth, 0.7, 0.4


def rising(depth: int) -> tuple[float, float, float, float]:
    """The second token is worth more once it is drawn than before."""
    return 0.95, 0.35 if depth == 1 else 0.9, 0.5, 0.4


@pytest.mark.parametrize(
    ("says", "budget", "rate", "siblings", "survival"),
    [
        *product([falling], (5, 30), (0.15, 0.3, 0.5), [3], (Survival(), Survival(0.8, -0.2, 0.3))),
        *product([rising], (4, 5, 6, 8), [0.3], (1, 3), (Survival(), Survival(0.8, 0.2, 0.3))),
    ],
)
def test_a_replay_of_grown_drafts_is_decode(
    says: Says, budget: int, rate: float, siblings: int, survival: Survival
) -> None:
    """Where no leaf is worth a draft forward of its own (`falling`), and where a token may be worth
    more than the one before (`rising`)."""
    cost = cost_table(1.0, {1: 5.0, 3: 5.0, 20: 9.0})
    predictor = Saying(says)
    predictor.calibration = Calibration(survival=survival)
    structure = grown(predictor, cost, rate, budget, siblings)
    values = torch.tensor([says(depth) for depth in range(1, GAMMA + 1)]).unbind(-1)
    chances = Chances(*(part.expand(*table().tokens.shape) for part in values))
    replayer = Replayer(table(), GAMMA)
    worth = Worth.of(chances, survival).up_to(siblings - 1)
    drafts = grow(worth, replayer.limit, cost, rate, budget)
    traces = decoded(structure, Never(), PointMassVerifier(), Warp())
    check_equal(replayer.combs(drafts), traces, comb=True)
    assert drafts.leaves.any() or siblings == 1
    assert says is falling or drafts.path.max() > 1


# A sampled target ---------------------------------------------------------------------------------


PROMPT, TOY_NEW, TOY_GAMMA, ENDS = torch.tensor([1, 2]), 14, 5, frozenset({0})
RESPONSES, DECODES = 120, 300


@pytest.fixture(scope="module")
def pair() -> Pair:
    target, noise = random_table(6, 3, concentration=0.4), random_table(6, 4)
    return SimpleNamespace(target=TableLM(target), draft=TableLM(mixed_table(target, noise, 0.7)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def sampled(pair: Pair, folder: Path) -> RolloutTable:
    asked = (stop_rule(name, folder, {}) for name in LEARNED)
    warps, prompts = (Warp(), Warp()), [PROMPT] * RESPONSES
    return slow_table(pair, prompts, TOY_NEW, TOY_GAMMA, *warps, ENDS, *asked)


def check_close(pair: Pair, counts: Counts, structure: Any, stop: Any, verifier: Any) -> None:
    """Per token: within 5 % (what treating text and jump as independent may cost; up to 4 % was
    seen on this pair with many more decodes) and four standard errors of both samples."""
    engine = SerialEngine(pair, structure, stop, verifier, Warp(), Warp(), ENDS)
    seeds = map(Sampler.seeded, range(DECODES))
    decodes = [counted(engine.decode(PROMPT, TOY_NEW, sampler)) for sampler in seeds]
    replays = [counts_of(counts, prompt) for prompt in range(RESPONSES)]
    for count in ("rounds", "draft_forwards", "drafted", "accepted"):
        replay, error = per_token(replays, count)
        real, real_error = per_token(decodes, count)
        assert abs(replay - real) < 0.05 * real + 4 * math.hypot(error, real_error), count
        assert error + real_error < 0.15 * real, "the comparison says something"


def per_token(rows: list[dict[str, float]], count: str) -> tuple[float, float]:
    """Ratio of sums and its standard error."""
    counts, tokens = (np.array([row[name] for row in rows]) for name in (count, "emitted"))
    ratio = counts.sum() / tokens.sum()
    return ratio, float((counts - ratio * tokens).std() / tokens.mean() / len(rows) ** 0.5)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("fixed", {"gamma": 3}),
        ("confidence", level(0.45)),
        ("product", level(0.2)),
        ("confidence_before", level(0.55)),
        ("adaedl", level(0.5, step=0.05)),
        ("specdecpp", level(0.6, bounds=[1, 20], order="paper")),
        ("hrad", {"confidence": level(0.45)}),
        ("value", level(0.2)),
    ],
)
@pytest.mark.few(2)
def test_expected_counts_are_close_to_real_decodes(
    name: str, values: dict[str, Any], pair: Pair, sampled: RolloutTable, folder: Path
) -> None:
    stop = stop_rule(name, folder, values)
    counts = replayed(sampled, stop, TOY_GAMMA)
    check_close(pair, counts, Chain(TOY_GAMMA), stop, TokenVerifier())


@pytest.mark.parametrize("leaves", SHAPES[:4], ids=SHAPE_IDS[:4])
@pytest.mark.slow
def test_expected_counts_of_combs_are_close_to_real_decodes(
    leaves: list[int], pair: Pair, sampled: RolloutTable
) -> None:
    check_close(pair, combed(sampled, leaves), static(leaves), Never(), RrswVerifier())


def test_expected_counts_are_the_mean_of_random_walks(sampled: RolloutTable) -> None:
    """Of chains, as `walk` draws them; of combs from one position to the next, with coins for the
    path and for its leaves. Rounds and accepted tokens add up to the response, but for what the
    last round goes beyond it."""
    policy, replayer = rule("confidence").policy(sampled), Replayer(sampled, TOY_GAMMA)
    expected = replayer.replay(policy, 0.45)
    walks = [replayer.walk(policy, 0.45, seed)[0] for seed in range(300)]
    for name in ("rounds", "draft_forwards", "accepted", "questions"):
        check_mean([walk[name].sum() for walk in walks], expected[name].sum())

    leaves, rng = SHAPES[3], np.random.default_rng(0)
    drafts, expected, totals = comb(sampled, leaves), combed(sampled, leaves), []
    for _ in range(200):
        rounds = accepted = 0
        for prompt, length in enumerate(sampled.length):
            start = 0
            while start < length:
                path = drafts.path[prompt, start]
                right = rng.random(TOY_GAMMA) < sampled.accept[prompt, start]
                depth = [*right[:path], False].index(False)
                if depth < path:
                    chances = sampled.siblings[prompt, start, depth][: leaves[depth]]
                    depth += any(rng.random(2)[: leaves[depth]] < chances)
                rounds, accepted, start = rounds + 1, accepted + depth, start + depth + 1
        totals.append((rounds, accepted))
    for walked, name in zip(zip(*totals, strict=True), ("rounds", "accepted"), strict=True):
        check_mean(walked, expected[name].sum())

    for gamma in (1, TOY_GAMMA):
        counts = replayed(sampled, Fixed(gamma), TOY_GAMMA)
        beyond = counts["accepted"] + counts["rounds"] - counts["emitted"]
        assert (beyond > -1e-9).all() and (beyond < gamma + 1e-9).all()


def check_mean(values: Any, expected: float) -> None:
    error = np.std(values) / len(values) ** 0.5
    assert abs(np.mean(values) - expected) < 4 * error
