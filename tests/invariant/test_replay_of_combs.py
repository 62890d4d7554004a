"""Replay of combs: exact where greedy, beside real decodes of toy models where sampled."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from decoding.cost import cost_table
from decoding.engines.serial import SerialEngine
from decoding.interfaces import Pair
from decoding.sampling import Sampler, Warp
from decoding.stopping.fixed import Fixed
from decoding.stopping.never import Never
from decoding.stopping.rollout_table import RolloutTable
from decoding.structures.comb import Comb, Worth, grow
from decoding.structures.static_tree import StaticTree
from decoding.verifiers.point_mass import PointMassVerifier
from decoding.verifiers.rrsw import RrswVerifier
from evaluation.replay.check import counted
from evaluation.replay.simulate import Replayer, counts_of
from predictors.calibration import Calibration
from predictors.outcomes import Chances
from predictors.survival import Survival
from tests.contract.engines import stop_rule
from tests.helpers.data.rollout_tables import slow_table
from tests.helpers.decoding.value_stub import Saying, grown
from tests.invariant import test_expected_replay as toy
from tests.invariant import test_replay as tiny

pair, folder = toy.pair, toy.folder

SHAPES = [[0, 0, 0], [1, 0, 0, 1], [2, 2], [2, 1, 0, 2, 1], [0, 2, 0, 0, 0, 0, 0, 1]]
IDS = ["".join(map(str, shape)) for shape in SHAPES]


def static(leaves: list[int]) -> StaticTree:
    """A path of len(leaves) tokens with so many leaves beside each."""
    parents, tip, rows = list[int](), 0, 0
    for beside in leaves:
        parents += [tip] * (1 + beside)
        tip, rows = rows + 1, rows + 1 + beside
    return StaticTree(parents)


def comb(table: RolloutTable, leaves: list[int]) -> Comb:
    """The same from every position, as far as the output goes."""
    path = table.limit(len(leaves))
    beside = np.zeros(table.tokens.shape, np.int64)
    beside[..., : len(leaves)] = leaves
    return Comb(path, np.where(np.arange(table.gamma) < path[..., None], beside, 0))


def replayed(table: RolloutTable, leaves: list[int]) -> dict[str, NDArray[np.float64]]:
    return Replayer(table, table.gamma).combs(comb(table, leaves))


@pytest.mark.parametrize("leaves", SHAPES, ids=IDS)
@pytest.mark.parametrize("max_new", [3, tiny.MAX_NEW])
def test_a_greedy_replay_is_decode(leaves: list[int], max_new: int) -> None:
    engine = SerialEngine(
        tiny.models(),
        static(leaves),
        Never(),
        PointMassVerifier(),
        tiny.GREEDY,
        Warp(),
        frozenset(tiny.models().eos_ids),
    )
    counts = replayed(tiny.table().shortened(max_new), leaves)
    rescued = 0
    for prompt, tokens in enumerate(tiny.PROMPTS):
        trace = engine.decode(tokens, max_new, Sampler.seeded(0))
        assert counts_of(counts, prompt) == {
            **counted(trace),
            "questions": counts["draft_forwards"][prompt],
        }
        sizes = [len(round_.draft_tokens) for round_ in trace.rounds]
        expected = np.bincount(sizes, minlength=counts["calls_by_drafted"].shape[1])
        assert counts["calls_by_drafted"][prompt].tolist() == expected.tolist()
        rescued += sum(round_.row != round_.accepted for round_ in trace.rounds)
    assert rescued > 0 or not any(leaves) or max_new < tiny.MAX_NEW, "some leaf was accepted"


def test_a_comb_without_leaves_is_a_chain() -> None:
    table = tiny.table()
    chain = Replayer(table, table.gamma).replay(Fixed(4).policy(table), 4)
    found = replayed(table, [0] * 4)
    for name in ("draft_forwards", "drafted", "accepted", "emitted", "rounds"):
        assert np.array_equal(found[name], chain[name]), name
    calls = found["calls_by_drafted"][:, : table.gamma + 1]
    assert np.array_equal(calls, chain["calls_by_drafted"])


def falling(depth: int) -> tuple[float, float, float, float]:
    return 0.95 - 0.1 * depth, 0.9 - 0.1 * depth, 0.7, 0.4


def rising(depth: int) -> tuple[float, float, float, float]:
    """The second token is worth more once it is drawn than before."""
    return 0.95, 0.35 if depth == 1 else 0.9, 0.5, 0.4


@pytest.mark.parametrize("budget", [5, 30])
@pytest.mark.parametrize("rate", [0.15, 0.3, 0.5])
@pytest.mark.parametrize("survival", [Survival(), Survival(0.8, -0.2, 0.3)])
def test_a_replay_of_grown_drafts_is_decode(budget: int, rate: float, survival: Survival) -> None:
    """Where no leaf is worth a draft forward of its own."""
    drafts = check_replay(falling, (budget, rate, 3), survival)
    assert drafts.leaves.any()


@pytest.mark.parametrize("budget", [4, 5, 6, 8])
@pytest.mark.parametrize("siblings", [1, 3])
@pytest.mark.parametrize("survival", [Survival(), Survival(0.8, 0.2, 0.3)])
def test_a_token_may_be_worth_more_than_the_one_before(
    budget: int, siblings: int, survival: Survival
) -> None:
    drafts = check_replay(rising, (budget, 0.3, siblings), survival)
    assert drafts.path.max() > 1 and (siblings > 1 or not drafts.leaves.any())


def check_replay(
    says: Callable[[int], tuple[float, float, float, float]],
    sizes: tuple[int, float, int],
    survival: Survival,
) -> Comb:
    """Replay and decode count the same. sizes: budget, rate, siblings. Returns what is drawn."""
    budget, rate, siblings = sizes
    cost = cost_table(1.0, {1: 5.0, 3: 5.0, 20: 9.0})
    predictor = Saying(says)
    predictor.calibration = Calibration(survival=survival)
    structure = grown(predictor, cost, rate, budget, siblings)
    engine = SerialEngine(
        tiny.models(),
        structure,
        Never(),
        PointMassVerifier(),
        tiny.GREEDY,
        Warp(),
        frozenset(tiny.models().eos_ids),
    )
    table = tiny.table()
    said = torch.tensor([says(depth) for depth in range(1, table.gamma + 1)]).unbind(-1)
    chances = Chances(*(part.expand(*table.tokens.shape) for part in said))
    replayer = Replayer(table, table.gamma)
    worth = Worth.of(chances, survival).up_to(siblings - 1)
    drafts = grow(worth, replayer.limit, cost, rate, budget)
    counts = replayer.combs(drafts)
    for prompt, tokens in enumerate(tiny.PROMPTS):
        trace = engine.decode(tokens, tiny.MAX_NEW, Sampler.seeded(0))
        assert counts_of(counts, prompt) == {
            **counted(trace),
            "questions": counts["draft_forwards"][prompt],
        }
    return drafts


@pytest.fixture(scope="module")
def table(pair: Pair, folder: Path) -> RolloutTable:
    asked = (stop_rule(name, folder, {}) for name in ("specdecpp", "hrad", "value"))
    prompts, ends = [toy.PROMPT] * toy.RESPONSES, toy.EOS
    return slow_table(pair, prompts, toy.MAX_NEW, toy.GAMMA, toy.WARP, toy.WARP, ends, *asked)


@pytest.mark.parametrize("leaves", SHAPES[:4], ids=IDS[:4])
@pytest.mark.slow
def test_a_sampled_replay_is_close_to_real_decodes(
    leaves: list[int], pair: Pair, table: RolloutTable
) -> None:
    """As for chains: within 5 % and four standard errors."""
    counts = replayed(table, leaves)
    engine = SerialEngine(
        pair, static(leaves), Never(), RrswVerifier(), toy.WARP, toy.WARP, toy.EOS
    )
    decoded = [
        counted(engine.decode(toy.PROMPT, toy.MAX_NEW, Sampler.seeded(seed)))
        for seed in range(toy.DECODES)
    ]
    for count in ("rounds", "draft_forwards", "drafted", "accepted"):
        (ours, our_error), (theirs, their_error) = (
            toy.per_token([counts_of(counts, prompt) for prompt in range(toy.RESPONSES)], count),
            toy.per_token(decoded, count),
        )
        assert abs(ours - theirs) < 0.05 * theirs + 4 * math.hypot(our_error, their_error), count
        assert our_error + their_error < 0.15 * theirs, "the comparison says something"


def test_it_is_the_mean_of_random_walks(table: RolloutTable) -> None:
    """From one position to the next, with coins for the path and for its leaves."""
    leaves, rng = SHAPES[3], np.random.default_rng(0)
    drafts, expected = comb(table, leaves), replayed(table, leaves)
    assert table.siblings is not None
    totals = []
    for _ in range(200):
        rounds = accepted = 0
        for prompt, length in enumerate(table.length):
            place = 0
            while place < length:
                path = drafts.path[prompt, place]
                right = rng.random(table.gamma) < table.accept[prompt, place]
                depth = [*right[:path], False].index(False)
                if depth < path:
                    chances = table.siblings[prompt, place, depth]
                    depth += any(rng.random(2)[: leaves[depth]] < chances[: leaves[depth]])
                rounds, accepted, place = rounds + 1, accepted + depth, place + depth + 1
        totals.append((rounds, accepted))
    means, errors = np.mean(totals, 0), np.std(totals, 0) / len(totals) ** 0.5
    assert np.all(abs(means - [expected["rounds"].sum(), expected["accepted"].sum()]) < 4 * errors)
