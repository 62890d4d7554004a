"""What predictors see and know, on features and counts made by hand."""

from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch

from papers.specbranch.activations import same_class, tsne
from papers.specbranch.feature_age import feature_age
from papers.specbranch.hrad_data import (
    CLASSES,
    EVEN,
    LENGTHS,
    LONE,
    PROBABLE,
    Activations,
    Aged,
    Heads,
)
from papers.specbranch.lengths import GAIN, lengths_table
from papers.specdecpp.heads import sweep
from reports.artifacts import Checkpoint
from reports.figure import Missing, save
from reports.figures.confusion import confusions

GENERATOR = torch.Generator().manual_seed(0)


def activations(apart: float) -> Activations:
    """Two classes whose features lie `apart`, 12 rounds of each, of 4 prompts."""
    label = torch.tensor([0, 2] * 12)
    noise = torch.randn(24, 5, generator=GENERATOR)
    explicit = noise + apart * label[:, None]
    return Activations(
        "h", 3, {"inputs": noise, "three classes": explicit}, label, torch.arange(24) // 6
    )


def with_lengths(found: Activations) -> Activations:
    return replace(found, features={**found.features, LENGTHS: found.features["inputs"]})


def test_neighbours_of_other_prompts_are_counted() -> None:
    found = activations(50.0)
    value, low, high = same_class(found.features[CLASSES], found)
    # of the 18 rounds of other prompts 9 are of the same class, and the 10th neighbour is not
    assert [value, low, high] == pytest.approx([0.9] * 3)
    nothing = same_class(torch.randn(24, 5, generator=GENERATOR), activations(0.0))[0]
    assert 0.3 < nothing < 0.7  # type: ignore[operator]


def test_every_round_is_a_point_in_both_panels() -> None:
    found = activations(50.0)
    figure = tsne(found)
    assert figure.column("features") == ["inputs"] * 24 + [CLASSES] * 24
    assert figure.column("class")[:4] == ["none", "all", "none", "all"]
    assert figure.n == "4 prompts, 24 rounds" and figure.kind == "modelled"
    assert (
        "three classes 0.900 (0.900-0.900)" in figure.how_to_read
        and "by chance 0.500" in figure.how_to_read
    )
    assert "predictor.predicts=lengths" in figure.how_to_read
    assert "predictor.predicts" not in tsne(with_lengths(found)).how_to_read
    again = tsne(found)
    assert again.rows == figure.rows


def hrad(counts: list[list[int]] | None) -> Checkpoint:
    test = (
        {"hrad": {"confusion": [[9]]}, "hrad, priors divided out": {"confusion": counts}}
        if counts
        else {"hrad": {}}
    )
    data = {"splits": {"test": {"prompts": 7, "rows": 20}}}
    config = {
        "predictor": "hrad",
        "gamma": 3,
        "classes": ["none", "some", "all"],
        "metrics": {"test": test},
        "provenance": {"data": data},
    }
    return Checkpoint(Path("ck/h"), config)


def test_confusion_is_that_of_the_decision() -> None:
    figure = confusions(hrad([[6, 2, 2], [1, 3, 1], [0, 1, 4]]))
    assert figure.column("rows") == [6, 2, 2, 1, 3, 1, 0, 1, 4]
    assert figure.column("of the true class, %")[:3] == [60, 20, 20]
    assert "Right 65.0%" in figure.how_to_read and "right 50.0%" in figure.how_to_read
    assert figure.n == "7 prompts, 20 rounds of 3 draft tokens"
    with pytest.raises(Missing, match="predictor=hrad"):
        confusions(hrad(None))


def heads() -> Heads:
    """The classes are known to the one head, and only their shares to the other."""
    targets = torch.tensor([[1.0, 0, 0], [1, 0, 0], [0, 1, 0], [0.5, 0.5, 0]])
    probs = {
        CLASSES: 0.9 * targets + 0.1 / 3,
        LENGTHS: torch.tensor([0.625, 0.375, 0.0]).expand(4, 3),
    }
    right, none, everything = torch.tensor([0, 0, 1, 0]), torch.zeros(4).long(), torch.full((4,), 2)
    decided = {
        (CLASSES, PROBABLE): right,
        (LENGTHS, PROBABLE): none,
        (LENGTHS, LONE): everything,
        (CLASSES, EVEN): right,
        (LENGTHS, EVEN): 1 - right,
    }
    return Heads("h", "toy", 3, probs, decided, targets, torch.tensor([0, 0, 1, 1]))


def test_classes_and_lengths_are_compared_on_the_same_rounds() -> None:
    figure = lengths_table([heads()])
    rows = {tuple(row[1:3]): row for row in figure.rows}
    right = {key: row[3] for key, row in rows.items()}
    assert right == {
        (CLASSES, PROBABLE): 0.875,  # a label that is a chance is right that often
        (LENGTHS, PROBABLE): 0.625,
        (LENGTHS, LONE): 0.0,
        (CLASSES, EVEN): 0.875,
        (LENGTHS, EVEN): 0.125,
        (GAIN, PROBABLE): 0.25,
        (GAIN, LONE): 0.875,
        (GAIN, EVEN): 0.75,
        ("shares", PROBABLE): 0.625,
    }
    assert rows[GAIN, PROBABLE][4:6] == [0.0, 0.5], "over the two prompts"
    known = -(0.625 * log(0.625) + 0.375 * log(0.375))
    assert rows[LENGTHS, PROBABLE][6] == pytest.approx(known)
    assert rows["shares", PROBABLE][6] == pytest.approx(known)
    assert rows[GAIN, PROBABLE][6] == pytest.approx(rows[CLASSES, PROBABLE][6] - known)
    assert rows[LENGTHS, LONE][6:] == [None] * 3
    assert figure.n == "2 prompts, 4 rounds of 3 draft tokens"
    with pytest.raises(Missing, match="predictor.predicts=lengths"):
        lengths_table([])


def aged(unit: str = "positions") -> Aged:
    """Fresh features know the class, stale ones the shares."""
    label = torch.tensor([0, 0, 1, 0])
    targets = torch.nn.functional.one_hot(label, 3).float()
    shares = torch.tensor([0.75, 0.25, 0.0]).expand(4, 3)
    sure = 0.9 * targets + 0.05 * (1 - targets)
    return Aged(
        *("h", "toy", 3, 0, unit),
        back={0: 0.0, 4: 6.0},
        probs={0: sure, 4: shares},
        decided={0: label, 4: torch.tensor([0, 0, 0, 1])},
        targets=targets,
        group=torch.tensor([0, 0, 1, 1]),
    )


def test_each_age_has_its_accuracy_and_log_loss() -> None:
    figure = feature_age([aged()])
    assert figure.column("age (positions)") == [0, 4] and figure.how_to_read == ""
    assert figure.column("accuracy") == [1.0, 0.5] and figure.column("most frequent class") == [
        0.75,
        0.75,
    ]
    entropy = -(0.75 * log(0.75) + 0.25 * log(0.25))
    assert figure.column("log loss") == pytest.approx([-log(0.9), entropy])
    assert figure.column("base rate, log loss") == pytest.approx([entropy, entropy])
    worse = figure.column("log loss above age 0")
    assert worse == pytest.approx([0.0, entropy + log(0.9)]), "of the same rounds"
    assert figure.n == "2 prompts, 4 rounds of 3 draft tokens" and "bootstrap" in figure.interval
    with pytest.raises(Missing, match="anchors.stride=1"):
        feature_age([])


def test_ages_in_rounds_say_how_far_a_round_goes() -> None:
    figure = feature_age([aged("rounds")])
    assert figure.column("age (rounds)") == [0, 4] and figure.name == "feature-age-rounds-h"
    assert figure.how_to_read == "Positions in a round, on average: toy 1.50."
    older = feature_age([replace(aged("rounds"), trained_age=1)])
    assert older.how_to_read.startswith("Trained on states of age 1, in rounds. Positions")


def head(depth: int, w_rej: float, loss: float) -> Checkpoint:
    stages = {"calibrated": {"log_loss": [loss, loss - 0.1, None]}}
    config: dict[str, Any] = {
        "predictor": "specdecpp",
        "settings": {"depth": depth, "w_rej": w_rej, "context": "mixed"},
        "metrics": {
            "reliability": {"train (test split)": {"token": stages}},
            "test": {"specdecpp": {"kl": 0.4, "ece": 0.02, "auroc": 0.7}},
        },
        "provenance": {"data": {"splits": {"test": {"prompts": 7, "rows": 2000}}}},
    }
    return Checkpoint(Path(f"ck/d{depth}w{w_rej}"), config)


def test_heads_are_ordered_by_their_settings() -> None:
    figure = sweep([head(3, 6.0, 0.6), head(0, 6.0, 0.7), head(0, 1.0, 0.8), hrad(None)])
    assert [row[2:4] for row in figure.rows] == [[0, 1.0], [0, 6.0], [3, 6.0]]
    assert (
        figure.column("log loss") == [0.8, 0.7, 0.6]
        and figure.column("log loss high") == [None] * 3
    )
    assert figure.n == "7 prompts, 2,000 rows"
    with pytest.raises(Missing, match="predictor.depth=0,1,2,3,4"):
        sweep([head(3, 6.0, 0.6), head(3, 6.0, 0.5)])


@pytest.mark.slow
def test_pictures_are_drawn(tmp_path: Path) -> None:
    figures = [
        tsne(activations(5.0)),
        tsne(with_lengths(activations(5.0))),
        lengths_table([heads()]),
        confusions(hrad([[6, 2, 2], [1, 3, 1], [0, 1, 4]])),
        feature_age([aged()]),
        feature_age([aged("rounds")]),
        sweep([head(3, 6.0, 0.6), head(0, 6.0, 0.7)]),
    ]
    for figure in figures:
        assert all(path.stat().st_size > 100 for path in save(figure, tmp_path))
