"""What second and third candidates are worth, on a tiny harvest."""

from pathlib import Path
from typing import Any

import pytest
import torch

from reports.figures.spechub.worth import sibling_worth
from tests import harvests
from tests.harvests import write_harvest
from tests.unit.reports.test_figure_data import harvest

RRSW, HUB, TOP = ([0.25, 0.5], [0.75, 0.5], [0.5, 0.25, 1.0])
FIRST = [0.5, 0.0, 0.75]  # of a round's three tokens: the last one is never reached


def test_a_candidate_counts_where_its_elder_ones_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = harvests._rounds

    def rounds(count: int, gamma: int, generator: torch.Generator) -> dict[str, Any]:
        siblings = {"rrsw_accept": RRSW, "hub_accept": HUB, "top_accept": TOP}
        same = {
            name: torch.tensor(said).expand(count, gamma, -1) for name, said in siblings.items()
        }
        accept = torch.tensor(FIRST).expand(count, gamma)
        return {**written(count, gamma, generator), **same, "accept_prob": accept}

    monkeypatch.setattr(harvests, "_rounds", rounds)
    figure = sibling_worth([harvest(write_harvest(tmp_path / "tiny", rows=2, gamma=3))])
    found = {(law, candidate): value for _, law, candidate, value, *_ in figure.rows}
    first = (1 * 0.5 + 0.5 * 0.0) / 1.5  # over the first token, and the second one half as often
    assert found["RRSw", "first"] == pytest.approx(first)
    assert found["RRSw", "second"] == pytest.approx(0.25)
    assert found["RRSw", "one of them"] == pytest.approx(1 - (1 - first) * 0.75 * 0.5)
    assert found["SpecHub", "first"] == 0.75 and ("SpecHub", "third") not in found
    assert found["SpecHub", "one of them"] == pytest.approx(0.875)
    assert found["point masses", "third"] == found["point masses", "one of them"] == 1.0
    assert figure.n == "toy, 20 prompts, 80 draft tokens"
    assert {row[0] for row in figure.rows} == {"T = 1"} and len(figure.rows) == 4 + 3 + 4
