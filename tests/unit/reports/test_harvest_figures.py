"""Which figures a small harvest, two checkpoints, costs and thresholds give."""

from pathlib import Path
from typing import Any

import pytest

from reports.artifacts import Artifacts, Checkpoint, Harvest
from reports.checkpoint_data import one_of_each
from reports.figure import Figure, Missing
from reports.figure_registry import builders, figure_registry
from tests.harvests import PAIR, PROMPTS, write_harvest
from tests.unit.reports.figures.test_theory import COST, FOUND
from tests.unit.reports.test_figure_data import checkpoint, harvest
from tests.unit.reports.test_figure_registry import WITHOUT_INPUT

SCORED = {"reliability": {"train": {"token": {"calibrated": {"log_loss": [0.6, 0.5, 0.7]}}}}}


def built(artifacts: Artifacts) -> tuple[dict[str, list[Figure]], dict[str, str]]:
    """Figures and needs by title, of those that are not drawn from an evaluation alone or from
    nothing."""
    figures: dict[str, list[Figure]] = {}
    lacking: dict[str, str] = {}
    for _, entry in figure_registry():
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
        Artifacts(harvests=[home], checkpoints=known, costs=[cost], thresholds=[FOUND])
    )
    assert {title: len(found) for title, found in figures.items()} == {
        "Draft probability of accepted and rejected tokens": 1,
        "Highest draft probability at accepted and rejected tokens": 1,
        "Entropy of the draft at accepted and rejected tokens": 1,
        "Acceptance against draft probability": 1,
        "Time per token by draft length": 1,
        "Forward times by regression": 1,
        "Frontiers of discarded tokens and target calls": 1,
        "Best threshold of every rule": 1,
        "Reliability before and after calibration": 2,
        "Drift across datasets": 2,
        "What H-RAD reads": 1,
        "Confusion of classes": 1,
        "Prediction against the age of features": 1,
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
