"""The rate at which a draw is worth its time."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from decoding.cost import CostTable, cost_table
from decoding.stopping.rollout_table import RolloutTable
from decoding.structures.comb import Worth
from evaluation.replay.growing import (
    FACTORS,
    Grower,
    sample,
    seconds,
    settled,
    settled_rates,
    untuned,
)
from evaluation.replay.measuring import same_questions, with_questions
from evaluation.replay.simulate import Replayer
from evaluation.replay.tune import heading, report
from evaluation.replay.tuning import Candidate, Choice, choose, hindsight
from predictors.outcomes import Chances

PROMPTS, POSITIONS, GAMMA = 12, 40, 6
COSTS = [cost_table(1.0, 5.0, row=row) for row in (0.0, 0.02, 0.3)]


def table(seed: int = 0) -> RolloutTable:
    """A sampled target. Acceptance varies from token to token."""
    rng, shape = np.random.default_rng(seed), (PROMPTS, POSITIONS, GAMMA)
    accept, siblings = rng.beta(2, 1, shape), rng.beta(1, 2, (*shape, 2))
    length = np.full(PROMPTS, POSITIONS)
    drawn, none = np.full(shape[:2], GAMMA), np.zeros(shape)
    facts = ([str(n) for n in range(PROMPTS)], length, length, False, np.ones(shape, np.int64))
    columns = (drawn, np.zeros(shape[:2], np.int64), accept, none, none, none)
    return RolloutTable(*facts, *columns, siblings=siblings)


def told(found: RolloutTable) -> Worth:
    """By a predictor that knows the present token and its siblings, and guesses the next one."""
    accept = torch.from_numpy(found.accept)
    second, third = torch.from_numpy(found.siblings).unbind(-1)
    return Worth.of(Chances(accept, torch.full_like(accept, 0.67), second, third))


def judged(cost: CostTable) -> list[Choice]:
    found = grower()
    candidates = [found.settled(cost)]
    return choose(candidates, candidates, cost, hindsight(found.replayer, cost))


def grower(seed: int = 0) -> Grower:
    found = table(seed)
    return Grower("comb", Replayer(found, GAMMA), told(found), 12)


@pytest.mark.parametrize("cost", COSTS)
def test_the_rate_is_what_it_reaches(cost: object) -> None:
    found = grower().settled(cost)
    reached = found.counts["emitted"].sum() / seconds(found, cost)
    assert abs(reached - found.threshold) <= 1e-4 * reached
    assert grower().regret(cost, found.threshold) < 0.01
    assert reached > 1 / cost.autoregressive


def test_leaves_pay_where_rows_are_cheap() -> None:
    free, cheap, dear = (
        seconds(grower().chain().settled(cost), cost) / seconds(grower().settled(cost), cost)
        for cost in COSTS
    )
    assert free > cheap > dear >= 1 and free > 1.05


def test_a_rate_that_never_rests_is_the_fastest_of_those_tried() -> None:
    cost, tried = COSTS[0], list[Candidate]()

    def at(rate: float) -> Candidate:
        counts = {
            "emitted": np.ones(1),
            "draft_forwards": np.array([10.0 + len(tried) % 2]),
            "questions": np.zeros(1),
            "calls_by_drafted": np.zeros((1, 1)),
        }
        tried.append(Candidate("comb", rate, counts))
        return tried[-1]

    assert seconds(settled(at, cost), cost) == 10 and len(tried) < 100


def test_what_is_not_tuned_is_compared_with_what_is() -> None:
    structure = SimpleNamespace(budget=12, worth=told)
    samples = [
        sample(Replayer(table(seed), GAMMA), [], {"comb": structure}, points=4) for seed in (0, 1)
    ]
    cost = COSTS[1]
    rates = settled_rates(samples[0], cost)
    said = untuned(*samples, cost, rates)["comb"]
    assert said["rate"] == rates["comb"] and 1.0 in FACTORS
    assert 0 <= said["regret"] < 0.02 and 0 <= said["chain_regret"] < 0.02
    assert [bound.rule for bound in samples[0].bounds] == ["knows p"] * 5


def test_a_structure_pays_for_what_it_asks() -> None:
    cfg = OmegaConf.create(
        {
            "methods": ["fixed", "comb", "other"],
            "rules": {"fixed": {}, "worth": {"checkpoint": "a"}},
            "structures": {"comb": {"checkpoint": "a/"}, "other": {"checkpoint": "b"}},
        }
    )
    same = same_questions(cfg)
    assert same == {"comb": "worth"}
    measured = replace(COSTS[1], calls={"worth": 0.1})
    cost = with_questions(measured, same)
    assert cost.calls == {"worth": 0.1, "comb": 0.1}
    assert with_questions(replace(cost, calls={"worth": 1, "comb": 2}), same).calls["comb"] == 2
    assert with_questions(COSTS[1], same) == COSTS[1]

    drafts, free = grower().settled(cost), grower().settled(COSTS[1])
    assert drafts.threshold == free.threshold, "a request does not count them either"
    assert seconds(drafts, cost) == pytest.approx(
        seconds(free, COSTS[1]) + 0.1 * free.counts["draft_forwards"].sum()
    )

    def said(cost: CostTable) -> str:
        found = {"rules": {}, "structures": ["comb", "other"], "cost": cost.to_dict()}
        return heading({**found, "advice": "fixed", "oracle_speedup": 2.0})

    assert said(COSTS[1]).endswith("; predictions cost nothing here")
    assert said(cost).endswith("; predictions of other cost nothing here")
    assert said(replace(cost, calls={"comb": 1, "other": 1})).endswith("oracle 2.00x")


@pytest.mark.parametrize(("temperature", "law"), [(0.0, "point masses"), (0.7, "RRSw")])
def test_what_replay_leaves_out_is_said_where_there_is_a_structure(
    temperature: float, law: str
) -> None:
    choice = asdict(judged(COSTS[0])[0])
    costs = {"cost": COSTS[0].to_dict(), "oracle_speedup": 2.0, "advice": "comb", "bounds": {}}
    without = {**costs, "rules": {"comb": choice}, "structures": {}, "untuned": {}}
    facts = {
        **{"cost": "c5", "chosen_on": "train", "judged_on": "test", "frontier": {}},
        **{"oracle_calls": None, "elsewhere": {}, "gamma": GAMMA},
        "draft_warp": {"temperature": temperature},
        "data": {"folder": "data/rounds"},
        "results": {"chosen": without},
    }
    assert "leaf" not in report(facts)
    facts["results"] = {"chosen": {**without, "rules": {}, "structures": {"comb": choice}}}
    (line,) = [line for line in report(facts).splitlines() if "after a leaf" in line]
    assert f"a path of {GAMMA} tokens at most" in line and "two leaves" in line and law in line
