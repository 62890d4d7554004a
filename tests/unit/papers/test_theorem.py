"""Rules that know the chance of survival, on a tiny harvest."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from papers.specdecpp.theorem import NAMES, SPEED, Rollouts, _rows, threshold_rules
from reports.figure import Missing
from tests.helpers.data import harvests
from tests.helpers.data.harvests import WARP, write_harvest
from tests.unit.reports.test_figure_data import harvest


def test_sure_drafts_are_drawn_to_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = harvests._rounds

    def rounds(count: int, gamma: int, generator: torch.Generator) -> dict[str, Any]:
        said = {"accept_prob": torch.ones(count, gamma), "drafted": torch.full((count,), gamma)}
        return {**written(count, gamma, generator), **said}

    monkeypatch.setattr(harvests, "_rounds", rounds)
    folder = write_harvest(tmp_path / "tiny", rows=4, gamma=3)
    figure = threshold_rules([harvest(folder)])
    assert len(figure.rows) == 2 * len(NAMES) and figure.kind == "modelled"
    assert figure.column(SPEED)[:3] == pytest.approx([4 / (5 + 3)] * 3)
    assert [row[-1] for row in figure.rows[1:3]] == [0.0, 3]


def test_halves_are_of_the_prompts_there_are() -> None:
    accept, group = np.random.default_rng(0).random((12, 4)), np.repeat([0, 2, 4, 6], 3)
    rows = list(_rows([Rollouts([], "T = 1", accept, group)]))
    assert all(value is not None and value == value for row in rows for value in row[3:9])


def test_a_greedy_target_has_nothing_to_know(tmp_path: Path) -> None:
    greedy = harvest(write_harvest(tmp_path / "tiny"), warp={**WARP, "temperature": 0.0})
    for some in ([], [greedy]):
        with pytest.raises(Missing, match="sampled target"):
            threshold_rules(some)


def test_other_distributions_have_rows_of_their_own(tmp_path: Path) -> None:
    one = harvest(write_harvest(tmp_path / "tiny", rows=8))
    other = harvest(one.folder, warp={**one.context["warp"], "top_k": 50})
    assert len(threshold_rules([one, other]).rows) == 2 * len(threshold_rules([one, one]).rows)
