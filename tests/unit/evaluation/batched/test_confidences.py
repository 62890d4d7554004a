"""What the scheduler is told, from small tables."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from decoding.stopping.rollout_table import RolloutTable
from evaluation.batched.compared import (
    LOGGED,
    ORACLE,
    by_position,
    conditional,
    confidences,
    fitted,
    said,
)
from predictors.calibration import fit_platt
from predictors.confidences.maps import of_temperatures


def rounds(accept: NDArray[np.float64], confidence: NDArray[np.float64]) -> RolloutTable:
    """Both [B, T, gamma]: responses of T tokens, all of them drafted."""
    prompts, length, gamma = accept.shape
    whole, ends = np.full((prompts, length), gamma), np.full(prompts, length)
    names = [f"p{n}" for n in range(prompts)]
    tokens = np.zeros(accept.shape, int)
    return RolloutTable(
        *(names, ends, ends, False, tokens, whole, whole),
        *(accept, confidence, np.zeros(accept.shape), confidence),
    )


def test_rows_are_rounds_with_expected_labels() -> None:
    table = rounds(np.full((2, 5, 3), 0.5), np.full((2, 5, 3), 0.75))
    found = confidences(table, 2)
    assert found.gamma == 2 and found.group.tolist() == [0] * 5 + [1] * 5
    assert found.length.tolist() == 2 * [2, 2, 2, 1, 0]  # the last place is kept
    assert found.labels[0].tolist() == [0.5, 0.25]
    assert found.logits[0].tolist() == pytest.approx([np.log(3)] * 2)


def test_padding_is_left_out() -> None:
    table = rounds(np.full((2, 5, 3), 0.5), np.full((2, 5, 3), 0.75))
    table.length[1] = 2
    assert confidences(table, 3).group.tolist() == [0] * 5 + [1] * 2


def test_what_is_said_by_name() -> None:
    table = rounds(np.full((2, 5, 3), 0.5), np.full((2, 5, 3), 0.75))
    found = said(table, 3, {"halved": of_temperatures([2.0, 2.0, 2.0]), "none": None})
    assert list(found) == [LOGGED, "halved", ORACLE]
    assert found[LOGGED] == pytest.approx(0.75) and found[ORACLE] == pytest.approx(0.5)
    assert found["halved"] == pytest.approx(1 / (1 + 3**-0.5))


def test_a_fit_says_what_happens() -> None:
    draws = np.random.default_rng(0).random((8, 40, 2))
    table = rounds(draws / 2, draws)  # half as often as it says
    rows = confidences(table, 2)
    assert fitted(rows, None, None, False) is None
    found = said(table, 2, {"platt": fitted(rows, fit_platt, None, True)})
    far = {name: np.abs(found[name] - found[ORACLE]).mean() for name in (LOGGED, "platt")}
    assert far["platt"] < far[LOGGED] / 3


def test_a_constant_for_each_position() -> None:
    draws = np.random.default_rng(0).random((3, 20, 2))
    table = rounds(np.where(draws < 0.3, 0.9, 0.2), draws)
    found = by_position(confidences(table, 2)).conditional(torch.randn(5, 2).double())
    first, second = (table.accept[:, :end, i] for i, end in enumerate((19, 18)))
    assert found[:, 0].tolist() == pytest.approx([first.mean()] * 5)
    reached = table.accept[:, :18, 0]
    assert found[:, 1].tolist() == pytest.approx([(second * reached).sum() / reached.sum()] * 5)


def test_conditional_of_survival() -> None:
    found = conditional(torch.tensor([[0.5, 0.25, 0.0, 0.0]]).double())
    assert found.tolist() == [[0.5, 0.5, 0.0, 0.0]]
