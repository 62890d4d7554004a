"""vLLM: lengths by batch size, and acceptance rates for its synthetic sampler."""

from dataclasses import dataclass
from itertools import accumulate
from shlex import quote
from typing import Annotated, Any

from runtime.settings.kinds import Text
from serving.export.base import Export, Given

CONFIG, SYNTHETIC = "speculative_config.json", "synthetic.json"


@dataclass(frozen=True)
class Vllm:
    """Exports the values of --speculative-config."""

    method: Annotated[Text, "of the draft: eagle3, eagle, draft_model, dspark, ..."]

    def export(self, given: Given) -> Export:
        made, schedule = Export("vllm 0.33.0"), given.schedule
        longest = schedule.longest if schedule else given.gamma
        draft = {"method": self.method, "model": given.draft}
        if longest:
            config: dict[str, Any] = {**draft, "num_speculative_tokens": longest}
            if schedule is not None:
                ranges = [list(part) for part in schedule.ranges]
                config["num_speculative_tokens_per_batch_size"] = ranges
            made.add_json(CONFIG, config)
            if given.calibration is not None:
                # Synthetic: drafts are accepted at the rates of the calibrated data, whatever their
                # tokens: for load tests, not for answers.
                rates = [min(max(rate, 0.0), 1.0) for rate in given.calibration["accepted"]]
                synthetic = {
                    **draft,
                    "num_speculative_tokens": len(rates),
                    "rejection_sample_method": "synthetic",
                    "synthetic_acceptance_rates": list(accumulate(rates, min)),
                }
                made.add_json(SYNTHETIC, synthetic)
        made.launch = [
            f'vllm serve {quote(given.target)} --speculative-config "$(cat {given.file(name)})"'
            for name in made.files
        ]
        if longest == 0:
            made.left_out = [
                "schedule: nothing is drafted at any batch size. Serve without a draft"
            ]
        made.left_out += given.left_out(
            calibration="vLLM 0.33.0 reads no temperatures. What is the same at every position can"
            " be multiplied into the head of a DSpark checkpoint",
            costs="vLLM profiles its own at start-up (enable_adaptive_verification)",
            thresholds="vLLM has no threshold on confidences",
        )
        if schedule is not None and longest:
            made.left_out.append(
                "schedule: more requests than its last range draft as that one does"
            )
        return made
