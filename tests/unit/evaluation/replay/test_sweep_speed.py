"""How long a sweep takes."""

from pathlib import Path
from time import perf_counter

import numpy as np
import pytest

from decoding.cost import cost_table
from decoding.stopping.adaedl import AdaEDL
from decoding.stopping.base import TunableRule
from decoding.stopping.confidence import Confidence
from decoding.stopping.confidence_before import ConfidenceBefore
from decoding.stopping.fixed import Fixed
from decoding.stopping.hrad import HRADStop
from decoding.stopping.rollout_table import RolloutTable, build
from decoding.stopping.specdecpp import SpecDecPPStop
from evaluation.replay.simulate import Replayer
from evaluation.replay.tuning import choose, hindsight, sweep
from tests.helpers.training.checkpoints import write_checkpoint

PROMPTS, POSITIONS, GAMMA = 500, 100, 20


def table(head: SpecDecPPStop, classes: HRADStop) -> RolloutTable:
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
        predicted = {
            head.survival: np.cumprod(rng.random(shape), -1),
            classes.outcomes: rng.integers(0, 3, POSITIONS),
        }
        values["accepted"] = np.logical_and.accumulate(
            rng.random(shape) < values["accept"], axis=-1
        ).sum(-1)
        rows.append(facts | values | {"predicted": predicted})
    return build(rows, greedy=False)


@pytest.mark.slow
def test_a_thousand_combinations_on_five_hundred_prompts_in_a_minute(tmp_path: Path) -> None:
    head = SpecDecPPStop(write_checkpoint(tmp_path / "head", "specdecpp", 4), 0.5, [1, 20], "paper")
    classes = HRADStop(write_checkpoint(tmp_path / "classes", "hrad", 4, gamma=3), Confidence(0.4))
    recorded = table(head, classes)
    started = perf_counter()
    stops: dict[str, TunableRule] = {
        "fixed": Fixed(1),
        "confidence": Confidence(0.4),
        "confidence_before": ConfidenceBefore(0.4),
        "adaedl": AdaEDL(0.4, 0.2, 0.9, 0.01, 0.5, 0.9),
        "specdecpp": head,
        "hrad": classes,
    }
    policies = {name: stop.policy(recorded) for name, stop in stops.items()}
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
