"""What predictors make of harvested rounds."""

from pathlib import Path

import pytest
import torch

from data_gen.samples import read_samples
from data_gen.storage.dataset import Harvest
from predictors.hrad import HRAD
from predictors.specdecpp import SpecDecPP, kept_depths
from runtime.errors import UserError
from tests.helpers.data.harvests import DIM, PROMPTS, write_harvest


def test_rollouts_end_with_the_first_rejected_token() -> None:
    gamma, values = 4, torch.arange(20.0).view(5, 4)
    records = {
        "accepted": torch.tensor([0, 2, 4, 1, 2]),
        "drafted": torch.tensor(
            [4, 4, 4, 1, 4]
        ),  # the fourth round ended with an end token, accepted
        "known": torch.tensor(
            [4, 4, 4, 4, 2]
        ),  # nothing is known of the fifth after two accepted tokens
        "group": torch.tensor([0, 0, 1, 1, 2]),
        **dict.fromkeys(("accept_prob", "q", "q_max"), values),
        "inputs": values[..., None].expand(5, gamma, 3),
    }
    rows = kept_depths(records)
    assert rows["accept_prob"].tolist() == [0, 4, 5, 6, 8, 9, 10, 11, 12, 16, 17]
    assert rows["depth"].tolist() == [0, 0, 1, 2, 0, 1, 2, 3, 0, 0, 1]
    assert rows["group"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2]
    assert torch.equal(rows["inputs"][:, 0], rows["accept_prob"]) and rows["inputs"].shape == (
        11,
        3,
    )


def test_a_depth_occurs_as_often_as_it_is_reached() -> None:
    """The product of mean labels by depth is the probability that a whole round is accepted."""
    generator = torch.Generator().manual_seed(0)
    n, accept = 200_000, torch.tensor([0.9, 0.5, 0.8])
    accepted = (torch.rand(n, 3, generator=generator) < accept).int().cumprod(1).sum(1)
    several = accept.expand(n, 3)
    records = {
        **{"accepted": accepted, "drafted": torch.full((n,), 3), "known": torch.full((n,), 3)},
        **{"group": torch.zeros(n), "accept_prob": several, "q": several, "q_max": several},
    }
    reached = torch.bincount(kept_depths(records)["depth"]) / n
    torch.testing.assert_close(reached, torch.tensor([1.0, 0.9, 0.45]), atol=4e-3, rtol=0)


def test_both_contexts_and_hrad_read_one_harvest(tmp_path: Path) -> None:
    folder = write_harvest(tmp_path / "toy", rows=5, gamma=3)
    mixed, rollouts, classes = (
        read_samples(Harvest.open(folder), predictor, "test")
        for predictor in (SpecDecPP(), SpecDecPP(context="rollout"), HRAD(2))
    )
    assert len(mixed["inputs"]) == len(classes["label"]) == 5 * PROMPTS["test"]
    assert rollouts["inputs"].shape == (len(rollouts["accept_prob"]), DIM)
    assert rollouts["q"].shape == rollouts["group"].shape == rollouts["accept_prob"].shape


def test_rounds_of_unknown_length_are_left_out() -> None:
    records = {
        "known": torch.tensor([3, 1, 2]),
        "accepted": torch.tensor([2, 1, 0]),
        "drafted": torch.tensor([3, 3, 3]),
        "q_max": torch.rand(3, 3),
        "group": torch.tensor([0, 0, 1]),
    }
    rows = HRAD(gamma=2).samples(records)
    assert rows["label"].tolist() == [2, 0] and rows["group"].tolist() == [0, 1]
    assert torch.equal(rows["q_max"], records["q_max"][[0, 2], 0])
    with pytest.raises(UserError, match=r"^predictor\.gamma: no harvested round of 4 tokens"):
        HRAD(gamma=4).samples(records)
