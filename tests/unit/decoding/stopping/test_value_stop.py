"""stop=value: what it goes on for, what it costs, and which checkpoints it takes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from decoding.engines.serial import SerialEngine
from decoding.sampling import Sampler, Warp
from decoding.stopping.value import ValueStop
from decoding.structures.chain import Chain
from decoding.verifiers.token import TokenVerifier
from predictors.calibration import Calibration
from predictors.inputs import Inputs
from predictors.survival import Survival
from runtime.errors import UserError
from tests.contract.engines import toy_pair
from tests.helpers.training.checkpoints import columns, write_checkpoint


def stop(folder: Path, threshold: float, survival: Survival | None = None) -> ValueStop:
    calibration = Calibration(survival=survival or Survival())
    write_checkpoint(folder, "value", columns("value", 0), calibration=calibration)
    rule = ValueStop(str(folder), threshold)
    rule.predictor.head.scale.fill_(0.3)  # an untrained head says nearly the same of everything
    return rule


def drafts(rule: ValueStop, gamma: int = 6) -> list[tuple[int, int, list[float]]]:
    """Tokens, draft forwards and predictions of each round but the last ones."""
    engine = SerialEngine(toy_pair(3, 1), Chain(gamma), rule, TokenVerifier(), Warp(), Warp())
    rounds = engine.decode([1, 0], 150, Sampler.seeded(0)).rounds[:-7]
    return [(len(one.draft_tokens), one.draft_forwards, one.predicted) for one in rounds]


def test_the_first_token_is_always_drawn_and_none_is_looked_at_in_vain(tmp_path: Path) -> None:
    for tokens, forwards, predicted in drafts(stop(tmp_path, 1.0)):
        assert (tokens, forwards, len(predicted)) == (1, 1, 1)


def test_it_goes_on_while_the_next_token_is_worth_it(tmp_path: Path) -> None:
    found = drafts(stop(tmp_path, 0.03))
    assert len({tokens for tokens, _, _ in found}) > 1
    for tokens, forwards, predicted in found:
        assert forwards == tokens, "no forward of its own"
        assert all(worth >= 0.03 for worth in predicted[:-1])
        assert tokens == 6 or predicted[-1] < 0.03
    assert {tokens for tokens, _, _ in drafts(stop(tmp_path, 0.0))} == {6}


def test_calibrated_survival_takes_the_place_of_the_product(tmp_path: Path) -> None:
    mapped = Survival(scale=0.5, bias=0.3, depth=-0.2)
    plain = drafts(stop(tmp_path, 0.0))
    for (_, _, products), (_, _, found) in zip(
        plain, drafts(stop(tmp_path, 0.0, mapped)), strict=True
    ):
        expected = mapped.of_products(torch.tensor(products, dtype=torch.float64))
        assert found == pytest.approx(expected.tolist()[: len(found)])


@pytest.mark.parametrize("gamma", [1, 2])
def test_the_shortest_drafts_of_the_smallest_vocabulary(tmp_path: Path, gamma: int) -> None:
    rule = stop(tmp_path, 0.0)
    engine = SerialEngine(toy_pair(2, 1), Chain(gamma), rule, TokenVerifier(), Warp(), Warp())
    for max_new in (1, 2, 20):
        trace = engine.decode([1, 0], max_new, Sampler.seeded(0))
        sizes = {len(round_.draft_tokens) for round_ in trace.rounds}
        assert len(trace.tokens) == max_new and max(sizes) == min(gamma, max_new - 1)


def test_thresholds_are_tried_at_equal_ratios(tmp_path: Path) -> None:
    grid = np.array(stop(tmp_path, 0.2).grid(20, 8))
    assert grid[0] == 0 and grid[-1] == 1 and len(grid) == 21
    assert np.allclose(grid[2:] / grid[1:-1], grid[2] / grid[1])


def test_only_the_state_at_the_token_costs_a_forward(tmp_path: Path) -> None:
    rule, table = stop(tmp_path, 0.2), torch.rand(2, 3, 4).numpy()
    replayed = type("Table", (), {"of_predictor": lambda self, name: table})()
    assert not rule.policy(replayed).ahead
    rule.predictor.inputs = Inputs(draft_before=[-1])
    assert not rule.policy(replayed).ahead
    rule.predictor.inputs = Inputs([-1])
    assert rule.policy(replayed).ahead
    assert np.isinf(rule.policy(replayed).reach[..., 0]).all(), "before the first, no look"


def test_a_predictor_of_something_else_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "other", "specdecpp", 3)
    with pytest.raises(UserError, match=r"^stop\.checkpoint: .* holds 'specdecpp', which does not"):
        ValueStop(str(tmp_path / "other"), 0.2)
