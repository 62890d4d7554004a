"""vLLM: lengths by batch size, and acceptance rates for its synthetic sampler."""

from dataclasses import dataclass
from shlex import quote
from typing import Annotated, Any

from runtime.settings.kinds import Text
from serving.export.known import Export, Known, in_json, not_told

CONFIG, SYNTHETIC = "speculative_config.json", "synthetic.json"


@dataclass(frozen=True)
class Vllm:
    """The values of --speculative-config."""

    method: Annotated[Text, "of the draft: eagle3, eagle, draft_model, dspark, ..."]

    def export(self, known: Known) -> Export:
        made = Export("vllm 0.33.0")
        longest = known.schedule.longest if known.schedule else known.gamma
        if longest:
            made.files[CONFIG] = in_json(self._config(known, longest))
            made.launch.append(_serve(known, CONFIG))
            if known.calibration is not None:
                made.files[SYNTHETIC] = in_json(self._synthetic(known))
                made.launch.append(_serve(known, SYNTHETIC))
        made.left_out += _left_out(known, longest)
        return made

    def _config(self, known: Known, longest: int) -> dict[str, Any]:
        config = {"method": self.method, "model": known.draft, "num_speculative_tokens": longest}
        if known.schedule is None:
            return config
        ranges = [list(one) for one in known.schedule.ranges]
        return {**config, "num_speculative_tokens_per_batch_size": ranges}

    def _synthetic(self, known: Known) -> dict[str, Any]:
        """Drafts are accepted as often as the calibrated data have it, whatever they say: for
        loads to be measured with, not for answers."""
        assert known.calibration is not None
        found, least = list[float](), 1.0
        for rate in known.calibration["accepted"]:
            least = min(least, max(rate, 0.0))
            found.append(least)
        return {
            "method": self.method,
            "model": known.draft,
            "num_speculative_tokens": len(found),
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": found,
        }


def _serve(known: Known, name: str) -> str:
    return f'vllm serve {quote(known.target)} --speculative-config "$(cat {known.file(name)})"'


def _left_out(known: Known, longest: int | None) -> list[str]:
    lines = not_told(
        known,
        calibration="vLLM 0.33.0 reads no temperatures. What is the same at every position can be"
        " multiplied into the head of a DSpark checkpoint",
        costs="vLLM profiles its own at start-up (enable_adaptive_verification)",
        thresholds="vLLM has no threshold on confidences",
    )
    if longest == 0:
        return ["schedule: nothing is drafted at any batch size. Serve without a draft", *lines]
    if known.schedule is not None:
        lines.append("schedule: more requests than its last range draft as that one does")
    return lines
