"""TensorRT-LLM: lengths by batch size, and the acceptance below which it stops to speculate."""

from dataclasses import dataclass
from shlex import quote
from typing import Annotated, Any

import yaml

from decoding.cost import CostTable
from runtime.settings.kinds import Count, Text
from serving.export.known import Export, Known, not_told
from serving.schedule import Range, Schedule, joined

CONFIG, CUTOFF = "speculative_config.yaml", "max_concurrency.yaml"


@dataclass(frozen=True)
class TensorrtLlm:
    """The key speculative_config of the file that --config (or --extra_llm_api_options) names.

    Keys of `draft_len_schedule` are the most requests a length is for, as since #12262; releases
    before it took them for the fewest."""

    decoding_type: Annotated[Text, "of the draft: Eagle3, MTP, DraftTarget, ..."]
    window: Annotated[Count, "speculative iterations that the acceptance is averaged over"]

    def export(self, known: Known) -> Export:
        made = Export("tensorrt_llm 1.3.0rc27 (llm_args.py of its sources; not run)")
        lengths, lines = _lengths(known.schedule)
        made.left_out += lines
        longest = max(lengths.values()) if lengths else known.gamma
        if longest and (known.schedule is None or lengths):
            config = {**self._draft(known, longest), **self._floor(known.costs, longest, made)}
            schedule = {"draft_len_schedule": lengths} if lengths else {}
            made.files[CONFIG] = _yaml({**config, **schedule})
            made.launch.append(_serve(known, CONFIG))
            if len(lengths) == 1:
                made.files[CUTOFF] = _yaml({**config, "max_concurrency": next(iter(lengths))})
                made.left_out.append(f"schedule: {CUTOFF} says the same; give one of the two")
        elif known.costs is not None and known.schedule is None:
            made.left_out.append("costs: they take a draft's length. Write gamma=")
        made.left_out += not_told(
            known,
            calibration="TensorRT-LLM schedules by no confidences (pull request 17056 is open)",
            thresholds="TensorRT-LLM has no threshold on confidences",
        )
        return made

    def _draft(self, known: Known, longest: int) -> dict[str, Any]:
        return {
            "decoding_type": self.decoding_type,
            "speculative_model": known.draft,
            "max_draft_len": longest,
        }

    def _floor(self, costs: CostTable | None, length: int, made: Export) -> dict[str, Any]:
        """The share of drafted tokens below which plain decoding is faster than drafts of
        `length`."""
        if costs is None:
            return {}
        step = costs.target(length + 1) + costs.draft * length
        share = (step / costs.autoregressive - 1) / length
        if share > 1:
            made.left_out.append(f"costs: a draft of {length} tokens never pays. Serve without one")
        floor = round(min(max(share, 0.0), 1.0), 6)
        return {"acceptance_rate_window_size": self.window, "acceptance_rate_threshold": floor}


def _lengths(schedule: Schedule | None) -> tuple[dict[int, int], list[str]]:
    """Length by the most requests it is for, and what differs: the first length is the longest, and
    none is drafted beyond the last."""
    if schedule is None:
        return {}, []
    first, lines = schedule.ranges[0].length, list[str]()
    cut = [Range(one.low, one.high, min(one.length, first)) for one in schedule.ranges]
    if cut != list(schedule.ranges):
        lines.append(f"schedule: no length may be above the first, {first}; longer ones are cut")
    while cut and cut[-1].length == 0:
        cut.pop()
    if not cut:
        return {}, [*lines, "schedule: nothing is drafted for one request. Serve without a draft"]
    lines.append("schedule: with more requests than its last range nothing is drafted")
    return {one.high: one.length for one in joined(cut)}, lines


def _yaml(config: dict[str, Any]) -> str:
    return yaml.safe_dump({"speculative_config": config}, sort_keys=False)


def _serve(known: Known, name: str) -> str:
    return f"trtllm-serve {quote(known.target)} --extra_llm_api_options {known.file(name)}"
