"""How long a sweep takes."""

from time import perf_counter

import numpy as np
import pytest
from evaluation.replay.policies import (
    Policy,
    acceptance,
    classes,
    drawn_confidence,
    fixed,
    lowest,
    policy_of,
)

from decoding.cost import cost_table
from decoding.stopping.adaedl import AdaEDL
from decoding.stopping.rollout_table import RolloutTable, build
from evaluation.replay.simulate import Replayer
from evaluation.replay.tuning import choose, hindsight, sweep

PROMPTS, POSITIONS, GAMMA = 500, 100, 20


def table() -> RolloutTable:
    """A sampled target that accepts about half of the tokens."""
    rng, shape = np.random.default_rng(0), (POSITIONS, GAMMA)
    rows = []
    for number in range(PROMPTS):
        facts = {
            "prompt_id": str(number),
            "length": POSITIONS,
            "max_new": POSITIONS,
            "drawn": [GAMMA] * POSITIONS,
        }
        values = {name: rng.random(shape) for name in ("accept", "confidence", "max_q")}
        values |= {"tokens": np.ones(shape), "entropy": 5 * rng.random(shape)}
        values |= {
            "survival": np.cumprod(rng.random(shape), -1),
            "outcome": rng.integers(0, 3, POSITIONS),
        }
        values["accepted"] = np.logical_and.accumulate(
            rng.random(shape) < values["accept"], axis=-1
        ).sum(-1)
        rows.append(facts | values)
    return build(rows, greedy=False)


@pytest.mark.slow
def test_a_thousand_combinations_on_five_hundred_prompts_in_a_minute() -> None:
    recorded = table()
    started = perf_counter()
    confidence = drawn_confidence(recorded)
    policies = {
        "fixed": fixed(GAMMA),
        "confidence": confidence,
        "confidence_before": Policy(lowest(recorded.max_q), ahead=True),
        "adaedl": policy_of(AdaEDL(0.4, 0.2, 0.9, 0.01, 0.5, 0.9), recorded),
        "specdecpp": acceptance(recorded, 1, GAMMA, "paper"),
        "hrad": classes(recorded, 3, confidence),
    }
    replayer = Replayer(recorded, GAMMA)
    grid = {name: np.linspace(0, 1, 37).tolist() for name in policies} | {
        "fixed": list(range(1, GAMMA + 1))
    }
    candidates = sweep(replayer, policies, grid)
    costs = [cost_table(1.0, float(ratio)) for ratio in (2, 4, 5, 10, 15)]
    for cost in costs:
        assert len(choose(candidates, candidates, cost, hindsight(replayer, cost))) == len(policies)
    seconds = perf_counter() - started
    print(f"{len(candidates) * len(costs)} combinations in {seconds:.1f} s")
    assert len(candidates) * len(costs) >= 1000 and seconds < 60
