"""SGLang: temperatures and costs for DSpark heads, lengths by batch size for EAGLE drafts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from decoding.batch_cost import BatchTable
from decoding.cost import CostTable
from runtime.settings.kinds import NotNegative, Text
from serving.export.base import Export, Given, calibration_errors, temperatures
from serving.schedule import Schedule

STS, SPS, ADDITIVE, ADAPTIVE = "sts.json", "sps.json", "sps_additive.json", "adaptive.json"


@dataclass(frozen=True)
class Sglang:
    """Temperatures and costs act only with SGLANG_RAGGED_VERIFY_MODE=compact or cap-accept."""

    overhead: Annotated[
        NotNegative, "seconds of a step besides forwards, in the units of the costs"
    ]
    algorithm: Annotated[Text, "--speculative-algorithm of the draft whose lengths adapt"]

    def export(self, given: Given) -> Export:
        made = Export("sglang 0.5.23")
        if given.calibration is not None:
            fitted, made.left_out = temperatures(given.calibration)
            made.add_json(STS, sts(given.calibration, fitted))
        by_batch = given.schedule and given.schedule.costs
        if not (by_batch and self._costs_by_batch(by_batch, given.gamma, made)) and given.costs:
            self._costs(given.costs, given.gamma, made)
        if STS in made.files or SPS in made.files:
            tables = {"confidence-sts": STS, "sps-table": SPS}
            paths = [
                f" --speculative-dspark-{table}-path {given.file(name)}"
                for table, name in tables.items()
                if name in made.files
            ]
            made.launch.append(
                "SGLANG_RAGGED_VERIFY_MODE=cap-accept python -m sglang.launch_server"
                f" --model-path {quote(given.target)} --speculative-algorithm DSPARK"
                f" --speculative-draft-model-path {quote(given.draft)}"
                f" --speculative-dspark-block-size {given.gamma}{''.join(paths)}"
            )
        if given.schedule is not None:
            self._schedule(given, given.schedule, made)
        made.left_out += given.left_out(
            thresholds="SGLang has no threshold on confidences; its scheduler fills a budget"
        )
        return made

    def _costs_by_batch(self, costs: BatchTable, gamma: int | None, made: Export) -> bool:
        """Return whether the schedule holds the costs of steps by the number of requests."""
        if len(costs.requests) < 2:
            return False
        gamma = gamma or costs.rows[-1] - 1
        if gamma + 1 > costs.rows[-1]:
            made.left_out.append(
                f"schedule: its costs end at {costs.rows[-1]} rows of a request, gamma is {gamma}."
                " Make it from a harvest of longer rounds"
            )
            return False
        table, error = additive(costs, gamma, self.overhead)
        made.add_json(SPS, steps_by_batch(costs, gamma, self.overhead))
        made.add_json(ADDITIVE, table)
        made.left_out.append(
            f"costs: those of the schedule ({costs.made}), by requests. {SPS} knows rows alone: at"
            f" each size all {gamma} tokens are verified. {ADDITIVE} is a sum of requests and rows,"
            f" at most {error:.1%} from them. Give one of the two"
        )
        return True

    def _costs(self, costs: CostTable, gamma: int | None, made: Export) -> None:
        rows = list(costs.target.rows)
        if gamma is None:
            made.left_out.append("costs: they take a draft's length. Write gamma=")
        elif len(rows) < 2:
            made.left_out.append(
                "costs: they say one number of rows, which SGLang takes for no table. Measure:"
                " python scripts/tune.py cost=measure"
            )
        else:
            draft, least = costs.draft * gamma, min(costs.target.seconds)
            besides = draft + self.overhead
            made.add_json(SPS, steps(rows, [each + besides for each in costs.target.seconds]))
            table = {
                "bias_seconds": least + self.overhead,
                "bs_probes": [1],
                "alpha_seconds": [draft],
                "m_probes": rows,
                "theta_seconds": [seconds - least for seconds in costs.target.seconds],
            }
            made.add_json(ADDITIVE, table)
            made.left_out.append(
                "costs: they are of one request, so a draft takes as long for any number of them;"
                f" {ADDITIVE} is the same as a sum. Give one of the two"
            )

    def _schedule(self, given: Given, schedule: Schedule, made: Export) -> None:
        longest = schedule.longest
        if longest == 0:
            made.left_out.append("schedule: nothing is drafted at any size. Serve without a draft")
            return
        # A single candidate pins the length of a slot.
        slots = {str(part.low): {"candidate_steps": [part.length]} for part in schedule.ranges}
        made.add_json(ADAPTIVE, slots)
        made.launch.append(
            f"python -m sglang.launch_server --model-path {quote(given.target)}"
            f" --speculative-algorithm {quote(self.algorithm)}"
            f" --speculative-draft-model-path {quote(given.draft)}"
            f" --speculative-eagle-topk 1 --speculative-num-steps {longest}"
            f" --speculative-num-draft-tokens {longest + 1} --speculative-adaptive"
            f" --speculative-adaptive-config {given.file(ADAPTIVE)}"
        )
        made.left_out.append(
            "schedule: more requests than its last range draft as that one does; a batch is padded"
            " to the next CUDA graph before its slot is looked up"
        )


def sts(calibration: Mapping[str, Any], fitted: list[float]) -> dict[str, Any]:
    """Return the file of temperatures. Errors are by SGLang's definition, as logged and after
    calibration, over all calibrated data."""
    errors = calibration_errors(calibration, "sglang")
    whole = all(errors)
    return {
        "temperatures": fitted,
        "dataset": ", ".join(calibration["data"]["domains"]),
        "num_samples": calibration["proposals"],
        "ece_before": [stages[0] for stages in errors] if whole else [],
        "ece_after": [stages[-1] for stages in errors] if whole else [],
    }


def steps(rows: Sequence[int], seconds: Sequence[float]) -> dict[str, Any]:
    """Return steps per second by the target's rows. seconds: of whole steps."""
    return {
        "sample_batch_tokens": rows,
        "sample_steps_per_sec": [1 / each for each in seconds],
        "max_batch_tokens": rows[-1],
    }


def steps_by_batch(costs: BatchTable, gamma: int, overhead: float) -> dict[str, Any]:
    """Return `steps` if the whole draft is verified at every size."""
    rows = [size * (gamma + 1) for size in costs.requests]
    seconds = [
        costs.target(size, count) + gamma * costs.draft(size) + overhead
        for size, count in zip(costs.requests, rows, strict=True)
    ]
    return steps(rows, seconds)


def additive(costs: BatchTable, gamma: int, overhead: float) -> tuple[dict[str, Any], float]:
    """Return the seconds of a step as a sum of a constant, a part by requests (their draft and
    states) and a part by target rows; and the largest relative error for a target forward. The
    target's part is the nearest sum of two piecewise linear functions, by relative error, neither
    below 0."""
    sizes = costs.requests
    counts = sorted({*sizes, *(size * (gamma + 1) for size in sizes)})
    cells = np.array([(s, s * each) for s in sizes for each in range(1, gamma + 2)])
    seconds = np.array([costs.target(*cell) for cell in cells.tolist()])
    least = float(seconds.min())
    basis = np.hstack([_hats(cells[:, 0], sizes), _hats(cells[:, 1], counts)])
    weights, _ = nnls(basis / seconds[:, None], (seconds - least) / seconds)
    error = np.abs(basis @ weights + least - seconds) / seconds
    drafting = np.array([gamma * costs.draft(size) for size in sizes])
    table = {
        "bias_seconds": least + overhead,
        "bs_probes": list(sizes),
        "alpha_seconds": (weights[: len(sizes)] + drafting).tolist(),
        "m_probes": counts,
        "theta_seconds": weights[len(sizes) :].tolist(),
    }
    return table, float(error.max())


def _hats(values: NDArray[np.float64], probes: list[int]) -> NDArray[np.float64]:
    """Return the weight of each probe in linear interpolation at `values`, [n, probes]."""
    return np.stack([np.interp(values, probes, unit) for unit in np.eye(len(probes))], 1)
