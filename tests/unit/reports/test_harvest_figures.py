"""Which figures a small harvest, two checkpoints, costs and thresholds give."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from reports.artifacts import Artifacts, Checkpoint, Harvest
from reports.checkpoint_data import one_of_each
from reports.figure import Figure, Missing, save
from reports.figure_registry import builders
from tests.helpers.data import harvests
from tests.helpers.data.harvests import PAIR, PROMPTS, write_harvest
from tests.unit.reports.figures.test_batch import SCHEDULE
from tests.unit.reports.figures.test_theory import COST, FOUND
from tests.unit.reports.test_figure_data import checkpoint, harvest
from tests.unit.reports.test_figure_registry import LISTED, WITHOUT_INPUT

SCORED = {"reliability": {"train": {"token": {"calibrated": {"log_loss": [0.6, 0.5, 0.7]}}}}}


def built(artifacts: Artifacts) -> tuple[dict[str, list[Figure]], dict[str, str]]:
    """Figures and needs by title, of those that are not drawn from an evaluation alone or from
    nothing."""
    figures: dict[str, list[Figure]] = {}
    lacking: dict[str, str] = {}
    for _, entry in LISTED:
        for builder in builders(entry, artifacts) if entry.title not in WITHOUT_INPUT else ():
            try:
                figure = builder()
                figures.setdefault(entry.title, []).append(figure)
            except Missing as missing:
                lacking[entry.title] = str(missing)
    return figures, lacking


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Harvest:
    folder = write_harvest(tmp_path_factory.mktemp("home"))
    return harvest(folder, splits=PROMPTS)


def test_everything_is_there_or_says_what_it_needs(tmp_path: Path, home: Harvest) -> None:
    confusion = {"specdecpp": {}, "hrad": {"confusion": [[6, 2, 2], [1, 3, 1], [0, 1, 4]]}}
    heads = [checkpoint(tmp_path / name, home.folder, name) for name in ("hrad", "specdecpp")]
    data = {**heads[0].config["provenance"]["data"], "splits": {"test": {"prompts": 4, "rows": 20}}}
    more = {"provenance": {"data": data}, "metrics": {"test": confusion, **SCORED}}
    known = [Checkpoint(one.folder, {**one.config, **more}) for one in heads]
    cost: dict[str, Any] = {**COST, "pair": PAIR}
    figures, lacking = built(
        Artifacts(
            harvests=[home],
            checkpoints=known,
            costs=[cost],
            thresholds=[FOUND],
            schedules=[SCHEDULE, {**SCHEDULE, "details": {"scheduler": {}}}],
        )
    )
    assert {title: len(found) for title, found in figures.items()} == {
        "Draft probability of accepted and rejected tokens": 1,
        "Highest draft probability at accepted and rejected tokens": 1,
        "Entropy of the draft at accepted and rejected tokens": 1,
        "Acceptance against draft probability": 1,
        "What siblings are worth": 1,
        "Whether the best stop rule is a threshold on survival": 1,
        "Time per token by draft length": 1,
        "Forward times by regression": 1,
        "Frontiers of discarded tokens and target calls": 1,
        "Best threshold of every rule": 1,
        "A budget of rows shared by all requests": 1,
        "Reliability before and after calibration": 2,
        "Drift across datasets": 2,
        "What H-RAD makes of what it reads": 1,
        "Confusion of classes": 1,
        "Prediction against the age of features": 1,
        "Prediction against the age of features in rounds": 1,
    }
    assert {"Energy per token", "SpecDec++ heads by depth and weight"} <= lacking.keys()


def test_pairs_are_kept_apart(tmp_path: Path, home: Harvest) -> None:
    other = harvest(write_harvest(tmp_path / "other"), pair={**PAIR, "name": "renamed"})
    third = harvest(other.folder, pair={**PAIR, "draft": "dd"})
    figures, _ = built(Artifacts(harvests=[home, other, third]))
    found = figures["Acceptance against draft probability"]
    assert [figure.n.split(",")[1] for figure in found] == [" 40 prompts", " 20 prompts"]


def test_of_a_sweep_one_head_is_shown(tmp_path: Path, home: Harvest) -> None:
    first, second = (checkpoint(tmp_path / name, home.folder, "specdecpp") for name in ("a", "b"))
    third = checkpoint(tmp_path / "c", home.folder, "hrad")
    assert one_of_each([first, second, third]) == [first, third]


def unscored(folder: Path, home: Harvest, name: str) -> Checkpoint:
    made = checkpoint(folder, home.folder, name)
    return Checkpoint(folder, {**made.config, "metrics": {"test": {name: {}}}})


ONE_EACH = {"train": 1, "calibration": 1, "test": 1}


@pytest.mark.parametrize(
    ("rows", "prompts", "changes", "lacks"),
    [
        (1, ONE_EACH, {}, {"Prediction against the age of features"}),
        (1, {**ONE_EACH, "test": 2}, {}, {"Prediction against the age of features in rounds"}),
        (9, ONE_EACH, {}, {"What H-RAD makes of what it reads"}),
        (9, {**ONE_EACH, "test": 2}, {}, set()),
        (
            *(30, ONE_EACH, {"known": 1, "accepted": 0}),
            {"Prediction against the age of features", "What H-RAD makes of what it reads"},
        ),
        (
            *(30, ONE_EACH, {"known": 0, "accepted": 0}),
            {
                "Acceptance against draft probability",
                "Time per token by draft length",
                "What siblings are worth",
            },
        ),
        (30, ONE_EACH, {"drafted": 0, "accepted": 0}, {"Time per token by draft length"}),
        (30, ONE_EACH, {"accepted": 0}, set()),
        (30, ONE_EACH, {"accepted": 4}, set()),
        (30, {**ONE_EACH, "test": 0}, {}, {"Prediction against the age of features"}),
    ],
)
@pytest.mark.slow
def test_a_harvest_too_small_for_a_figure_is_named_and_the_others_are_drawn(
    rows: int,
    prompts: dict[str, int],
    changes: dict[str, int],
    lacks: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = harvests._rounds

    def rounds(count: int, gamma: int, generator: torch.Generator) -> dict[str, Any]:
        same = {name: torch.full((count,), value) for name, value in changes.items()}
        return {**written(count, gamma, generator), **same}

    monkeypatch.setattr(harvests, "_rounds", rounds)
    monkeypatch.setattr(harvests, "PROMPTS", prompts)
    home = harvest(write_harvest(tmp_path / "tiny", rows=rows))
    heads = [unscored(tmp_path / name, home, name) for name in ("hrad", "specdecpp")]
    cost: dict[str, Any] = {**COST, "pair": PAIR}
    figures, lacking = built(
        Artifacts(harvests=[home], checkpoints=heads, costs=[cost], thresholds=[FOUND])
    )
    assert not lacks & figures.keys()
    for title in lacks:
        assert str(home.folder) in lacking[title] and "gen_data.py" in lacking[title]
    for number, figure in enumerate(one for found in figures.values() for one in found):
        save(replace(figure, name=str(number)), tmp_path)


@pytest.mark.slow
def test_a_harvest_too_small_does_not_hide_another(tmp_path: Path, home: Harvest) -> None:
    small = harvest(write_harvest(tmp_path / "small", rows=1, names="other-"))
    hrad = unscored(tmp_path / "hrad", home, "hrad")
    figures, _ = built(Artifacts(harvests=[small, home], checkpoints=[hrad]))
    (figure,) = figures["Prediction against the age of features"]
    assert figure.column("dataset") == [home.name] * len(figure.rows)
