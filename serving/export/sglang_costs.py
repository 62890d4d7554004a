"""SGLang's tables of what a step costs, by batch size: from the costs a schedule was chosen by."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from decoding.batch_cost import BatchTable

Array = NDArray[np.float64]


def steps(costs: BatchTable, gamma: int, overhead: float) -> dict[str, Any]:
    """Steps per second by target rows: at every size all of the draft is verified."""
    rows = [size * (gamma + 1) for size in costs.requests]
    seconds = [
        costs.target(size, size * (gamma + 1)) + gamma * costs.draft(size) + overhead
        for size in costs.requests
    ]
    return {
        "sample_batch_tokens": rows,
        "sample_steps_per_sec": [1 / each for each in seconds],
        "max_batch_tokens": rows[-1],
    }


def additive(costs: BatchTable, gamma: int, overhead: float) -> tuple[dict[str, Any], float]:
    """Seconds of a step: of anything, of requests (their draft and states), of target rows; and by
    how much of themselves a target forward's seconds differ from it at most. The target's part is
    the nearest sum of two piecewise linear functions, by relative error, neither below 0."""
    sizes = costs.requests
    counts = sorted({*sizes, *(size * (gamma + 1) for size in sizes)})
    cells = np.array([(s, s * each) for s in sizes for each in range(1, gamma + 2)])
    seconds = np.array([costs.target(*cell) for cell in cells.tolist()])
    least = float(seconds.min())
    basis = np.hstack([_hats(cells[:, 0], sizes), _hats(cells[:, 1], counts)])
    found, _ = nnls(basis / seconds[:, None], (seconds - least) / seconds)
    error = np.abs(basis @ found + least - seconds) / seconds
    of_requests, of_rows = found[: len(sizes)], found[len(sizes) :]
    drafting = np.array([gamma * costs.draft(size) for size in sizes])
    table = {
        "bias_seconds": least + overhead,
        "bs_probes": list(sizes),
        "alpha_seconds": (of_requests + drafting).tolist(),
        "m_probes": counts,
        "theta_seconds": of_rows.tolist(),
    }
    return table, float(error.max())


def _hats(values: Array, probes: list[int]) -> Array:
    """[n, probes], the share of each probe in what is interpolated between them."""
    return np.stack([np.interp(values, probes, one) for one in np.eye(len(probes))], 1)
