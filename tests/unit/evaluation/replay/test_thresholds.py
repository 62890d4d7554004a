"""The file of tuned thresholds: what is used of it, and what is refused."""

import copy
from typing import Any

import pytest

from evaluation.replay import thresholds
from tests.helpers.damage.refusals import refuses

STOP = {"_target_": "decoding.stopping.adaedl.AdaEDL", "threshold": None, "kappa": 0.2}
PAIR, WARP = {"name": "toy", "target": "aa"}, {"temperature": 0.0}
RUN = {"pair": PAIR, "warp": WARP, "draft_warp": WARP}
CHOICE = {"threshold": 0.25, "speculate": True, "speedup": 1.5, "interval": [None, None]}
FOUND: dict[str, Any] = {
    "format_version": thresholds.FORMAT_VERSION,
    **RUN,
    "gamma": 8,
    "cost": "a100",
    "measured_on": None,
    "data": {"folder": "data/toy", "identity": "00"},
    "command": "python scripts/tune.py",
    "rules": {"adaedl": {"setting": "threshold", "stop": STOP, "checkpoint": None}},
    "results": {"chosen": {"advice": "adaedl", "rules": {"adaedl": CHOICE}}},
}


def test_thresholds_are_for_a_pair_and_its_distributions():
    for run, other in (
        (RUN, None),
        (RUN | {"pair": {"name": "mine", "target": "aa"}}, None),
        (RUN | {"pair": {"name": "toy", "target": "bb"}}, "pair"),
        (RUN | {"draft_warp": {"temperature": 1.0}}, "draft_warp"),
    ):
        assert thresholds.misfit(FOUND, run) == other


@pytest.mark.parametrize(
    "missing",
    [
        "cost",
        "gamma",
        "measured_on",
        "rules.adaedl.stop",
        "rules.adaedl",
        "results.chosen.advice",
        "results.chosen.rules.adaedl.speculate",
    ],
)
def test_a_damaged_file_ends_with_one_line(missing, tmp_path):
    file = tmp_path / "x.json"
    thresholds.write(file, FOUND)
    assert thresholds.read(file) == FOUND
    found = node = copy.deepcopy(FOUND)
    *path, last = missing.split(".")
    for key in path:
        node = node[key]
    del node[last]
    thresholds.write(file, found)
    words = r"^thresholds: .*is damaged \(no(thing about| valid) .*python scripts/tune\.py"
    refuses(words, thresholds.read, file)
