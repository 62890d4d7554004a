"""What second and third candidates are worth, on a tiny harvest."""

from pathlib import Path
from typing import Any

import pytest
import torch

from data_gen.labels import siblings
from papers.spechub.toy import RULES, single, toy_distributions
from papers.spechub.worth import _with_replacement, sibling_worth
from tests.helpers.data import harvests
from tests.helpers.data.harvests import write_harvest
from tests.unit.reports.test_figure_data import harvest

RRSW, HUB, TOP = ([0.25, 0.5], [0.75, 0.5], [0.5, 0.25, 1.0])
FIRST = [0.5, 0.0, 0.75]  # of a round's three tokens: the last one is never reached
DRAWN = [0.9, 0.5, 0.5]


def test_candidates_add_up_to_one_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = harvests._rounds

    def rounds(count: int, gamma: int, generator: torch.Generator) -> dict[str, Any]:
        siblings = {"rrsw_accept": RRSW, "hub_accept": HUB, "top_accept": TOP}
        same = {
            name: torch.tensor(said).expand(count, gamma, -1) for name, said in siblings.items()
        }
        accept = torch.tensor(FIRST).expand(count, gamma)
        q = torch.tensor(DRAWN).expand(count, gamma)
        return {**written(count, gamma, generator), **same, "accept_prob": accept, "q_drawn": q}

    monkeypatch.setattr(harvests, "_rounds", rounds)
    figure = sibling_worth([harvest(write_harvest(tmp_path / "tiny", rows=2, gamma=3))])
    found = {(law, candidate): value for _, law, candidate, value, *_ in figure.rows}
    first = (1 * 0.5 + 0.5 * 0.0) / 1.5  # over the first token, and the second one half as often
    assert found["RRSw", "first"] == pytest.approx(first)
    assert found["RRSw", "second"] == pytest.approx((1 - first) * 0.25)
    assert found["RRSw", "third"] == pytest.approx((1 - first) * 0.75 * 0.5)
    again = (0.5 * 0.1 + 0.5 * 1 * 0.25) / 1.5  # half of what is left at the first, all at the next
    assert found["RRS", "second"] == pytest.approx(again)
    assert found["RRS", "one of them"] == pytest.approx(first + again)
    assert found["RRSw", "one of them"] == pytest.approx(1 - (1 - first) * 0.75 * 0.5)
    assert found["SpecHub", "first"] == 0.75 and ("SpecHub", "third") not in found
    assert found["SpecHub", "one of them"] == pytest.approx(0.875)
    assert found["SpecHub", "second"] == pytest.approx(0.25 * 0.5)
    assert found["point masses", "third"] == pytest.approx(0.5 * 0.75)
    assert found["point masses", "one of them"] == 1.0
    assert figure.n == "toy, 20 prompts, 80 draft tokens"
    assert {row[0] for row in figure.rows} == {"T = 1"} and len(figure.rows) == 3 + 4 + 3 + 4


@pytest.mark.slow
def test_a_second_candidate_with_replacement_is_read_off_one_without() -> None:
    """Over all draws of both, what the rule for i.i.d. candidates accepts."""
    for (p, q), *_ in (each.pairs for each in toy_distributions()[:3]):
        size, found = len(q), 0.0
        top, uniform = torch.zeros(size, 3, dtype=torch.long), torch.zeros(size, 2)
        for place in torch.linspace(0.0005, 0.9995, 1000):
            uniform[:, 0] = place
            rows = p.expand(size, -1), q.expand(size, -1)
            accept = siblings(*rows, torch.arange(size), top, uniform).rrsw_accept
            left = q * (1 - (p / q).clamp(max=1))
            found += float((left * _with_replacement(accept.double(), q)).sum()) / 1000
        more = RULES["RRS"](p, q) - single(p, q)
        assert found == pytest.approx(more, abs=2e-3)
