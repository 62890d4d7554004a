"""Reliability diagrams and the drift matrix, on predictions one can count."""

from dataclasses import replace
from math import log
from pathlib import Path

import pytest
import torch

from reports.checkpoint_data import Predicted
from reports.figure import Missing, save
from reports.figures.calibration import base_rate, diagrams, drift

ACCEPT = torch.tensor([0.2, 0.2, 0.8, 0.8])
HAPPENED = torch.tensor([0.0, 1.0, 1.0, 1.0])


def two(f: torch.Tensor) -> torch.Tensor:
    return torch.stack([1 - f, f], 1)


HOME = Predicted(
    checkpoint="head",
    predictor="specdecpp",
    temperature=1.0,
    trained_on="train",
    dataset="train",
    in_domain=True,
    as_trained=two(ACCEPT / 2),
    calibrated=two(ACCEPT),
    targets=two(HAPPENED),
    group=torch.tensor([0, 0, 1, 1]),
)
AWAY = replace(HOME, dataset="other", in_domain=False)


def test_bins_hold_predictions_and_outcomes_before_and_after() -> None:
    figure = diagrams([HOME, AWAY])
    assert figure.column("prompts of") == ["train, test split"] * 4 + ["other"] * 4
    assert figure.column("probabilities")[:4] == [
        "as trained",
        "as trained",
        "calibrated",
        "calibrated",
    ]
    assert figure.column("mean prediction")[:4] == pytest.approx([0.1, 0.4, 0.2, 0.8])
    assert figure.column("outcome")[:4] == pytest.approx([0.5, 1.0, 0.5, 1.0])
    assert figure.column("rows")[:4] == [2, 2, 2, 2]
    assert (
        figure.n == "4 prompts, 8 rows"
        and figure.kind == "measured"
        and "bootstrap" in figure.interval
    )


def test_intervals_are_over_prompts() -> None:
    one_bin = replace(HOME, calibrated=two(torch.full((4,), 0.5)))
    row = dict(zip(diagrams([one_bin]).columns, diagrams([one_bin]).rows[-1], strict=True))
    assert row["outcome"] == 0.75
    assert row["outcome low"] == pytest.approx(0.5) and row["outcome high"] == pytest.approx(1.0)


def test_of_three_classes_it_is_the_most_likely_one() -> None:
    probs = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]])
    targets = torch.tensor([[1.0, 0, 0], [0, 1.0, 0]])
    three = replace(
        HOME, as_trained=probs, calibrated=probs, targets=targets, group=torch.tensor([0, 1])
    )
    figure = diagrams([three])
    assert (
        figure.column("mean prediction")[0] == pytest.approx(0.6)
        and figure.column("outcome")[0] == 0.5
    )
    assert "most likely" in figure.how_to_read


def test_the_matrix_has_a_row_for_each_place_and_says_what_a_constant_would_score() -> None:
    figure = drift([HOME, AWAY])
    assert figure.column("prompts of") == ["train, test split", "other"]
    # bins of equal mass: |0.2 - 0.5| and |0.8 - 1| of half the rows each
    assert figure.column("calibration error") == pytest.approx([0.25, 0.25])
    assert figure.column("log loss")[0] == pytest.approx(-(log(0.8) + log(0.2) + 2 * log(0.8)) / 4)
    assert figure.column("base rate")[0] == pytest.approx(-(log(0.25) + 3 * log(0.75)) / 4)
    assert base_rate(two(torch.tensor([0.5, 0.5]))) == pytest.approx(log(2))
    low, high = (figure.column(f"calibration error {end}")[0] for end in ("low", "high"))
    assert low <= 0.25 <= high  # type: ignore[operator]


def test_nothing_to_predict_on_says_what_is_needed() -> None:
    for build in (diagrams, drift):
        with pytest.raises(Missing, match="train.py"):
            build([])


def test_pictures_are_drawn(tmp_path: Path) -> None:
    for figure in (diagrams([HOME, AWAY]), drift([HOME, AWAY, replace(AWAY, checkpoint="head 2")])):
        assert all(path.stat().st_size > 100 for path in save(figure, tmp_path))
