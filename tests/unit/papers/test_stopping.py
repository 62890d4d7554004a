"""H-RAD without branches, in replay: figures made by hand, and of small harvests."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from decoding.stopping.fixed import Fixed
from evaluation.replay.simulate import Replayer
from evaluation.replay.tuning import sweep
from papers.specbranch import stopping
from papers.specbranch.stopping import (
    ACCURACY,
    COSTS,
    EPSILONS,
    EXPLICIT,
    FIGURES,
    FIXED,
    HYBRID,
    SAME,
    SPREAD,
    Replays,
    right,
    spread_of,
)
from reports.artifacts import Artifacts
from reports.figure import Figure
from tests.helpers.data.harvests import described_as, write_harvest
from tests.helpers.data.rollout_tables import sampled_table
from tests.helpers.evaluation.evaluations import drawn, lacks, records_by
from tests.helpers.reports.artifacts import checkpoint

GRID = [1, 2, 3]


def replays(**accept: list[float]) -> Replays:
    """Fixed lengths on harvests of two prompts of six positions, with three tokens from each."""
    replayers = {
        name: Replayer(sampled_table(np.tile(each, (2, 6, 1))), 3) for name, each in accept.items()
    }
    rules = {FIXED: Fixed(1)}
    counts = {
        name: sweep(one, {FIXED: rules[FIXED].policy(one.table)}, {FIXED: GRID})
        for name, one in replayers.items()
    }
    return Replays("h", 3, rules, replayers, counts)


def test_a_rule_is_right_as_often_as_its_class_or_its_length_comes_true():
    """Three tokens, accepted one after the other with .8, .5 and .5: lengths .2, .4, .2, .2."""
    found = replays(one=[0.8, 0.5, 0.5])
    for length, of_class, of_length in ((1, 0.6, 0.4), (2, 0.6, 0.2), (3, 0.2, 0.2)):
        classes, same, judged = right(found, FIXED, length, "one")
        assert judged.tolist() == [3, 3], "those with room for three tokens and one more"
        assert classes / judged == pytest.approx([of_class] * 2)
        assert same / judged == pytest.approx([of_length] * 2)


def test_a_threshold_is_chosen_on_the_other_harvests():
    found = replays(never=[0.0] * 3, always=[1.0] * 3)
    chosen = [found.chosen(FIXED, 10, name).threshold for name in ("never", "always")]
    assert chosen == [2, 1], "two rounds of three tokens each, or no draft worth its time"


def test_a_spread_is_of_the_slowest_setting_over_the_fastest():
    assert spread_of([np.array([1.0, 2.0]), np.array([2.0, 4.0])]) == (2.0, 2.0, 2.0)


def test_rules_are_replayed_on_harvests_of_other_prompts(tmp_path, monkeypatch):
    monkeypatch.setattr(stopping, "POINTS", 1)
    home, *others = (
        described_as(write_harvest(tmp_path / name, rows=12, names=f"{name}-"))
        for name in ("home", "first", "second")
    )
    classes = checkpoint(tmp_path / "h", home.folder)
    heads = [classes, checkpoint(tmp_path / "lengths", home.folder, predicts="lengths")]

    def built(entry: int, **changes: Any) -> Figure:
        given = {"harvests": [home, *others], "checkpoints": heads} | changes
        (build,) = FIGURES[entry].builders(Artifacts(**given))
        return build()

    figure = built(0)
    rows = records_by(figure, "harvest", "c", "rule")
    assert {key[0] for key in rows} == {"first", "second", "all"}
    for name in ("first", "second", "all"):
        assert rows[name, 5, HYBRID][f"speed over {HYBRID}"] == 1
        assert {rows[name, c, EXPLICIT][SAME] is not None for c in COSTS} == {True}
        assert rows[name, 5, EXPLICIT][ACCURACY] >= rows[name, 5, EXPLICIT][SAME]
    drawn(figure, tmp_path)
    lacks("predicts=lengths", partial(built, 0, checkpoints=heads[:1]))
    lacks("two others", partial(built, 0, harvests=[home, others[0]]))

    figure = built(1)
    assert figure.column("epsilon")[:6] == list(EPSILONS)
    rows = records_by(figure, "c", "rule", "epsilon")
    for (c, rule, _), row in rows.items():
        speeds = [rows[c, rule, eps]["speed-up"] for eps in EPSILONS]
        assert row[SPREAD] == pytest.approx(max(speeds) / min(speeds))
    drawn(figure, tmp_path)
    lacks("layers", partial(built, 2))
