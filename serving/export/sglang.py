"""SGLang: temperatures and costs for DSpark heads, lengths by batch size for EAGLE drafts."""

from dataclasses import dataclass
from shlex import quote
from typing import Annotated, Any

from decoding.cost import CostTable
from runtime.settings.kinds import NotNegative, Text
from serving.export import sglang_costs as by_batch
from serving.export.known import Export, Known, in_json, not_told, temperatures
from serving.schedule import Schedule

STS, SPS, ADDITIVE, ADAPTIVE = "sts.json", "sps.json", "sps_additive.json", "adaptive.json"


@dataclass(frozen=True)
class Sglang:
    """Temperatures and costs act only with SGLANG_RAGGED_VERIFY_MODE=compact or cap-accept."""

    overhead: Annotated[
        NotNegative, "seconds of a step besides forwards, in the units of the costs"
    ]
    algorithm: Annotated[Text, "--speculative-algorithm of the draft whose lengths adapt"]

    def export(self, known: Known) -> Export:
        made = Export("sglang 0.5.23")
        self._confidences(known, made)
        if not self._costs_by_batch(known, made):
            self._costs(known, made)
        if STS in made.files or SPS in made.files:
            made.launch.append(_dspark(known, made))
        self._schedule(known, made)
        made.left_out += not_told(
            known, thresholds="SGLang has no threshold on confidences; its scheduler fills a budget"
        )
        return made

    def _confidences(self, known: Known, made: Export) -> None:
        if known.calibration is None:
            return
        found, lines = temperatures(known)
        made.files[STS] = in_json(sts(known, found))
        made.left_out += lines

    def _costs_by_batch(self, known: Known, made: Export) -> bool:
        """Whether the schedule says what steps cost by the number of requests."""
        costs = known.schedule and known.schedule.costs
        if not costs or len(costs.requests) < 2:
            return False
        gamma = known.gamma or costs.rows[-1] - 1
        if gamma + 1 > costs.rows[-1]:
            made.left_out.append(
                f"schedule: its costs end at {costs.rows[-1]} rows of a request, gamma is {gamma}."
                " Make it from a harvest of longer rounds"
            )
            return False
        table, error = by_batch.additive(costs, gamma, self.overhead)
        made.files[SPS] = in_json(by_batch.steps(costs, gamma, self.overhead))
        made.files[ADDITIVE] = in_json(table)
        made.left_out.append(
            f"costs: those of the schedule ({costs.made}), by requests. {SPS} knows rows alone: at"
            f" each size all {gamma} tokens are verified. {ADDITIVE} is a sum of requests and rows,"
            f" at most {error:.1%} from them. Give one of the two"
        )
        return True

    def _costs(self, known: Known, made: Export) -> None:
        draft = known.draft_seconds()
        if known.costs is None:
            return
        if draft is None:
            made.left_out.append("costs: they take a draft's length. Write gamma=")
        elif len(known.costs.target.rows) < 2:
            made.left_out.append(
                "costs: they say one number of rows, which SGLang takes for no table. Measure:"
                " python scripts/tune.py cost=measure"
            )
        else:
            made.files[SPS] = in_json(steps(known.costs, draft + self.overhead))
            made.files[ADDITIVE] = in_json(additive(known.costs, draft, self.overhead))
            made.left_out.append(
                "costs: they are of one request, so a draft takes as long for any number of them;"
                f" {ADDITIVE} is the same as a sum. Give one of the two"
            )

    def _schedule(self, known: Known, made: Export) -> None:
        if known.schedule is None:
            return
        longest = known.schedule.longest
        if longest == 0:
            made.left_out.append("schedule: nothing is drafted at any size. Serve without a draft")
            return
        made.files[ADAPTIVE] = in_json(adaptive(known.schedule))
        made.launch.append(
            f"python -m sglang.launch_server --model-path {quote(known.target)}"
            f" --speculative-algorithm {quote(self.algorithm)}"
            f" --speculative-draft-model-path {quote(known.draft)}"
            f" --speculative-eagle-topk 1 --speculative-num-steps {longest}"
            f" --speculative-num-draft-tokens {longest + 1} --speculative-adaptive"
            f" --speculative-adaptive-config {known.file(ADAPTIVE)}"
        )
        made.left_out.append(
            "schedule: more requests than its last range draft as that one does; a batch is padded"
            " to the next CUDA graph before its slot is looked up"
        )


def sts(known: Known, found: list[float]) -> dict[str, Any]:
    """Errors are those of SGLang's definition, as logged and after calibration, over the whole of
    the data that were calibrated."""
    calibration = known.calibration
    assert calibration is not None
    domains = next(iter(calibration["scores"].values()))
    positions = next(iter(domains.values()))["positions"]
    errors = [[v["sglang"][0] for v in one["stages"].values()] for one in positions]
    whole = all(errors)
    return {
        "temperatures": found,
        "dataset": ", ".join(calibration["data"]["domains"]),
        "num_samples": calibration["proposals"],
        "ece_before": [pair[0] for pair in errors] if whole else [],
        "ece_after": [pair[-1] for pair in errors] if whole else [],
    }


def steps(costs: CostTable, besides: float) -> dict[str, Any]:
    """Steps per second by the target's rows. besides: seconds of a step but the target's."""
    rows = list(costs.target.rows)
    return {
        "sample_batch_tokens": rows,
        "sample_steps_per_sec": [1 / (seconds + besides) for seconds in costs.target.seconds],
        "max_batch_tokens": rows[-1],
    }


def additive(costs: CostTable, draft: float, overhead: float) -> dict[str, Any]:
    """Seconds of a step: of anything, of the draft by requests, of the target by rows."""
    least = min(costs.target.seconds)
    return {
        "bias_seconds": least + overhead,
        "bs_probes": [1],
        "alpha_seconds": [draft],
        "m_probes": list(costs.target.rows),
        "theta_seconds": [seconds - least for seconds in costs.target.seconds],
    }


def adaptive(schedule: Schedule) -> dict[str, Any]:
    """A single candidate pins the length of a slot."""
    return {str(one.low): {"candidate_steps": [one.length]} for one in schedule.ranges}


def _dspark(known: Known, made: Export) -> str:
    sts_path = f" --speculative-dspark-confidence-sts-path {known.file(STS)}"
    sps_path = f" --speculative-dspark-sps-table-path {known.file(SPS)}"
    return (
        "SGLANG_RAGGED_VERIFY_MODE=cap-accept python -m sglang.launch_server"
        f" --model-path {quote(known.target)} --speculative-algorithm DSPARK"
        f" --speculative-draft-model-path {quote(known.draft)} --speculative-dspark-block-size"
        f" {known.gamma}{sts_path if STS in made.files else ''}"
        f"{sps_path if SPS in made.files else ''}"
    )
