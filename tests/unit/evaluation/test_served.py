"""Tables of many requests at once, from known figures."""

import numpy as np
import pytest

from evaluation.served import acceptance
from evaluation.table import table


@pytest.mark.parametrize(("rounds", "tau"), [(5, "2.00"), (np.nan, "-")])
def test_tau_is_of_engines_that_count_their_rounds(rounds: float, tau: str) -> None:
    row = {"policy": "x", "prompt": "group 0", "requests": 2, "emitted": 10, "rounds": rounds}
    row |= {"drafted": 8, "accepted": 5, "drafts": 4, "accepted_at": [3, 2]}
    *_, line = acceptance(table("timed", [row]), {}).splitlines()
    assert [cell.strip() for cell in line.split("|")[2:5]] == ["2, measured", tau, "2.25"]
