"""Costs of many requests, against sums by hand."""

from math import prod

import numpy as np
import pytest
import yaml
from safetensors import safe_open

from decoding.batch_cost import PerRow, Roofline, share
from tests.hostile import ROOT


def roofline(overhead: float = 0.0) -> Roofline:
    """Reads 2 GB at 1 GB/s; 0.1 TFLOP/s make 0.02 s of each row."""
    return Roofline(1.0, 0.1, 1.0, 0.5, 2.0, 1e6, 1e5, 100, overhead)


def test_a_forward_takes_as_long_as_its_bytes_or_its_operations() -> None:
    cost = roofline()
    assert cost.target(1, 5) == pytest.approx(2.0 + 0.1)
    assert cost.target(10, 50) == pytest.approx(2.0 + 1.0)
    assert cost.target(10, 400) == pytest.approx(8.0)
    assert cost.draft(10) == pytest.approx(1.0 + 0.1)
    assert roofline(0.5).draft(10) == pytest.approx(1.6)


def test_the_shares_of_all_requests_are_the_step() -> None:
    cost = roofline()
    found = share(cost, 10, 3)
    assert 10 * found.draft == pytest.approx(cost.draft(10))
    assert np.allclose(
        10 * found.target.of(np.arange(1, 5)), [cost.target(10, 10 * rows) for rows in range(1, 5)]
    )
    assert 10 * found.autoregressive == pytest.approx(cost.target(10, 10))


def test_rows_cost_what_is_given() -> None:
    cost = PerRow(1.0, 0.5, 0.1, 0.01)
    assert (cost.target(2, 2), cost.target(9, 5)) == (1.5, 3.0)
    assert cost.draft(11) == pytest.approx(0.2)


def test_the_roofline_of_the_embedded_pair_has_the_sizes_of_its_draft() -> None:
    """Two bytes of every key, value and weight; the output layer is about 8,192 tokens."""
    cost = yaml.safe_load((ROOT / "conf/batch_cost/h100_smollm2.yaml").read_text())
    with safe_open(ROOT / "pairs/smollm2/eagle_layers.safetensors", "pt") as file:
        sizes = {name: file.get_slice(name).get_shape() for name in file.keys()}
    kept = [
        size[0] for name, size in sizes.items() if name.endswith(("k_proj.weight", "v_proj.weight"))
    ]
    assert cost["draft_state"] == 2 * sum(kept)
    weights = sum(map(prod, sizes.values())) + 8192 * sizes["model.norm.weight"][0]
    assert cost["draft_weights"] == pytest.approx(weights / 1e9, abs=1e-4)
