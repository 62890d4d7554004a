"""Costs of many requests, against sums by hand."""

import json
from dataclasses import asdict
from math import prod

import numpy as np
import pytest
import yaml
from safetensors import safe_open

from decoding.batch_cost import BatchTable, PerRow, Roofline, read_batch_cost, share, tabled
from tests.helpers.damage.hostile import ROOT
from tests.helpers.damage.refusals import refuses

TABLE = BatchTable("measured", [1, 4], [1, 3], [[1.0, 2.0], [4.0, 8.0]], [0.1, 0.2])


def roofline(overhead: float = 0.0) -> Roofline:
    """Reads 2 GB at 1 GB/s; 0.1 TFLOP/s make 0.02 s of each row."""
    return Roofline(1.0, 0.1, 1.0, 0.5, 2.0, 1e6, 1e5, 100, overhead)


def test_a_forward_takes_as_long_as_its_bytes_or_operations_or_as_is_given():
    cost = roofline()
    assert cost.target(1, 5) == pytest.approx(2.0 + 0.1)
    assert cost.target(10, 50) == pytest.approx(2.0 + 1.0)
    assert cost.target(10, 400) == pytest.approx(8.0)
    assert cost.draft(10) == pytest.approx(1.0 + 0.1)
    assert roofline(0.5).draft(10) == pytest.approx(1.6)
    cost = PerRow(1.0, 0.5, 0.1, 0.01)
    assert (cost.target(2, 2), cost.target(9, 5)) == (1.5, 3.0)
    assert cost.draft(11) == pytest.approx(0.2)


def test_the_shares_of_all_requests_are_the_step():
    cost = roofline()
    found = share(cost, 10, 3)
    assert 10 * found.draft == pytest.approx(cost.draft(10))
    steps = [cost.target(10, 10 * rows) for rows in range(1, 5)]
    assert np.allclose(10 * found.target.of(np.arange(1, 5)), steps)
    assert 10 * found.autoregressive == pytest.approx(cost.target(10, 10))


def test_the_roofline_of_the_embedded_pair_has_the_sizes_of_its_draft():
    """Two bytes of every key, value and weight; the output layer is about 8,192 tokens."""
    cost = yaml.safe_load((ROOT / "conf/batch_cost/h100_smollm2.yaml").read_text())
    with safe_open(ROOT / "pairs/smollm2/eagle_layers.safetensors", "pt") as file:
        sizes = {name: file.get_slice(name).get_shape() for name in file.keys()}
    states = ("k_proj.weight", "v_proj.weight")
    kept = [size[0] for name, size in sizes.items() if name.endswith(states)]
    assert cost["draft_state"] == 2 * sum(kept)
    weights = sum(map(prod, sizes.values())) + 8192 * sizes["model.norm.weight"][0]
    assert cost["draft_weights"] == pytest.approx(weights / 1e9, abs=1e-4)


def test_a_table_is_linear_in_between_and_knows_nothing_beyond():
    assert (TABLE.target(1, 1), TABLE.target(4, 12), TABLE.draft(4)) == (1, 8, 0.2)
    assert TABLE.target(1, 2) == pytest.approx(1.5)
    assert TABLE.target(4, 6) == pytest.approx(5)  # a row and a half of each
    assert TABLE.target(2, 4) == pytest.approx(1.5 + (6 - 1.5) / 3)
    assert TABLE.draft(2) == pytest.approx(0.1 + 0.1 / 3)
    refuses("^batch: expected at most 4", TABLE.draft, 5)
    refuses("^batch: expected at most 4", TABLE.target, 5, 5)
    refuses("^gamma_max: expected at most 2.* got 3", TABLE.target, 1, 4)


def test_any_costs_fit_a_table():
    cost = roofline()
    found = tabled(cost, [1, 10, 40], 3)
    assert found.made == "modelled"
    for size in found.requests:
        assert found.draft(size) == cost.draft(size)
        assert all(found.target(size, size * n) == cost.target(size, size * n) for n in range(1, 5))


@pytest.mark.parametrize(
    "changed",
    [
        {"requests": [4, 1]},
        {"rows": [2, 3]},
        {"draft_seconds": [0.1]},
        {"target_seconds": [[1.0, 2.0]]},
        {"target_seconds": [[1.0, 2.0], [4.0]]},
        {"target_seconds": [[1.0, 2.0], [4.0, 0.0]]},
        {"made": "guessed"},
    ],
)
def test_a_damaged_table_is_refused_in_one_line(changed, tmp_path):
    path, whole = tmp_path / "costs.json", asdict(TABLE)
    path.write_text(json.dumps({"seconds": whole}))
    assert read_batch_cost(path).target(4, 12) == 8
    path.write_text(json.dumps({"seconds": {**whole, **changed}}))
    refuses("^batch_cost.file: .*is damaged", read_batch_cost, path)
