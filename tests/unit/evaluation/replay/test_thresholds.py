"""The file of tuned thresholds: what is used of it, and what is refused."""

import copy
from pathlib import Path
from typing import Any

import pytest

from evaluation.replay import thresholds
from runtime.errors import UserError

STOP = {"_target_": "decoding.stopping.adaedl.AdaEDL", "threshold": 0.4, "kappa": 0.2}
PAIR, WARP = {"name": "toy", "target": "aa"}, {"temperature": 0.0}
RUN = {"pair": PAIR, "warp": WARP, "draft_warp": WARP}
CHOICE = {"threshold": 0.25, "speculate": True, "speedup": 1.5, "interval": [None, None]}
FOUND: dict[str, Any] = {
    "format_version": thresholds.FORMAT_VERSION,
    **RUN,
    "gamma": 8,
    "cost": "a100",
    "measured_on": None,
    "data": {"folder": "data/toy", "sha256": "00"},
    "command": "python scripts/tune.py",
    "rules": {
        "adaedl": {"setting": "threshold", "stop": {**STOP, "threshold": None}, "checkpoint": None}
    },
    "results": {"chosen": {"advice": "adaedl", "rules": {"adaedl": CHOICE}}},
}


def test_thresholds_are_for_a_pair_and_its_distributions() -> None:
    renamed = {"name": "mine", "target": "aa"}
    assert (
        thresholds.misfit(FOUND, RUN) is None
        and thresholds.misfit(FOUND, RUN | {"pair": renamed}) is None
    )
    assert thresholds.misfit(FOUND, RUN | {"pair": {"name": "toy", "target": "bb"}}) == "pair"
    assert thresholds.misfit(FOUND, RUN | {"draft_warp": {"temperature": 1.0}}) == "draft_warp"


@pytest.mark.parametrize(
    "missing",
    [
        *(
            ["cost"],
            ["gamma"],
            ["measured_on"],
            ["rules", "adaedl", "stop"],
            ["rules", "adaedl"],
            ["results", "chosen", "advice"],
        ),
        ["results", "chosen", "rules", "adaedl", "speculate"],
    ],
)
def test_a_damaged_file_ends_with_one_line(missing: list[str], tmp_path: Path) -> None:
    thresholds.write(tmp_path / "x.json", FOUND)
    assert thresholds.read(tmp_path / "x.json") == FOUND
    found = copy.deepcopy(FOUND)
    node = found
    for key in missing[:-1]:
        node = node[key]
    del node[missing[-1]]
    thresholds.write(tmp_path / "x.json", found)
    with pytest.raises(
        UserError,
        match=r"^thresholds: .*is damaged \(no(thing about| valid) .*python scripts/tune\.py",
    ):
        thresholds.read(tmp_path / "x.json")


def test_a_checkpoint_without_weights_ends_with_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^rules\.hrad\.checkpoint: no checkpoint"):
        thresholds.checkpoint_hash(tmp_path, "rules.hrad.checkpoint")
