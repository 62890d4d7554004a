"""SGLang's tables of costs by batch size, looked up as SGLang does."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from decoding.batch_cost import BatchTable, PerRow, Roofline, tabled
from serving.export.base import Export
from serving.export.sglang import Sglang, additive, steps_by_batch
from tests.helpers.serving.exports import SCHEDULE, told

GAMMA, OVERHEAD, SIZES = 3, 0.001, [1, 2, 4, 8]
SUM = tabled(PerRow(0.02, 0.001, 0.002, 0.0005), SIZES, GAMMA)
ROOF = tabled(
    Roofline(3350.0, 989.0, 7.505, 0.374, 2.0, 131072.0, 4096.0, 1024, 0.0),
    [1, 16, 64, 256, 512],
    GAMMA,
)


def seconds(table: dict[str, Any], requests: int, rows: int) -> float:
    """SGLang's: a bias and two functions, linear between their probes."""
    alpha = np.interp(requests, table["bs_probes"], table["alpha_seconds"])
    return float(
        table["bias_seconds"] + alpha + np.interp(rows, table["m_probes"], table["theta_seconds"])
    )


def test_steps_are_of_whole_drafts() -> None:
    found = steps_by_batch(SUM, GAMMA, OVERHEAD)
    assert found["sample_batch_tokens"] == [4, 8, 16, 32] and found["max_batch_tokens"] == 32
    step = SUM.target(4, 16) + 3 * SUM.draft(4) + OVERHEAD
    assert 1 / found["sample_steps_per_sec"][2] == pytest.approx(step)


def test_what_is_a_sum_is_told_whole() -> None:
    table, error = additive(SUM, GAMMA, OVERHEAD)
    assert error < 1e-6
    for size in SIZES:
        for rows in range(size, size * (GAMMA + 1) + 1):
            step = SUM.target(size, rows) + GAMMA * SUM.draft(size) + OVERHEAD
            assert seconds(table, size, rows) == pytest.approx(step, rel=1e-6)


def test_what_is_none_is_told_as_nearly_as_said() -> None:
    table, error = additive(ROOF, GAMMA, OVERHEAD)
    assert 0 < error < 0.5 and table["bias_seconds"] > 0
    assert min(table["alpha_seconds"] + table["theta_seconds"]) >= 0
    for name in ("bs_probes", "m_probes"):
        assert table[name] == sorted(set(table[name]))
    gaps = [
        seconds(table, size, size * each) - GAMMA * ROOF.draft(size) - OVERHEAD - target
        for size, line in zip(ROOF.requests, ROOF.target_seconds, strict=True)
        for each, target in zip(ROOF.rows, line, strict=True)
    ]
    flat = [one for line in ROOF.target_seconds for one in line]
    assert max(np.abs(gaps) / flat) == pytest.approx(error)


def exported(costs: BatchTable, /, **changed: Any) -> Export:
    schedule = replace(SCHEDULE, costs=costs)
    return Sglang(OVERHEAD, "EAGLE3").export(told(schedule=schedule, **changed))


def test_a_schedule_with_costs_gives_them_by_requests() -> None:
    made = exported(SUM)
    assert json.loads(made.files["sps.json"]) == steps_by_batch(SUM, GAMMA, OVERHEAD)
    assert json.loads(made.files["sps_additive.json"])["bs_probes"] == SIZES
    assert "costs: those of the schedule (given), by requests" in "\n".join(made.left_out)
    alone = exported(SUM, costs=None, calibration=None, gamma=None)
    assert alone.files["sps.json"] == made.files["sps.json"]


def test_costs_of_shorter_drafts_are_left_out() -> None:
    made = exported(SUM, gamma=5, calibration=None)
    assert "its costs end at 4 rows of a request, gamma is 5" in "\n".join(made.left_out)
    assert json.loads(made.files["sps_additive.json"])["bs_probes"] == [1]


def test_one_size_is_no_table_by_requests() -> None:
    made = exported(tabled(PerRow(0.02, 0.001, 0.002, 0.0), [1], GAMMA))
    assert json.loads(made.files["sps_additive.json"])["bs_probes"] == [1]
