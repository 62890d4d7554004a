"""TensorRT-LLM: lengths by batch size, and the acceptance below which it stops to speculate."""

from dataclasses import dataclass
from shlex import quote
from typing import Annotated, Any

import yaml

from decoding.cost import CostTable
from runtime.settings.kinds import Count, Text
from serving.export.base import Export, Given
from serving.schedule import Range, Schedule, joined

CONFIG, CUTOFF = "speculative_config.yaml", "max_concurrency.yaml"


@dataclass(frozen=True)
class TensorrtLlm:
    """Exports the key speculative_config of the file named by --config (or
    --extra_llm_api_options).

    Keys of `draft_len_schedule` are the most requests a length is for, as since #12262; releases
    before it took them for the fewest."""

    decoding_type: Annotated[Text, "of the draft: Eagle3, MTP, DraftTarget, ..."]
    window: Annotated[Count, "speculative iterations that the acceptance is averaged over"]

    def export(self, given: Given) -> Export:
        made = Export("tensorrt_llm 1.3.0rc27 (llm_args.py of its sources; not run)")
        lengths = dict[int, int]()
        if given.schedule is not None:
            lengths, made.left_out = _lengths(given.schedule)
        longest = max(lengths.values()) if lengths else given.gamma
        if longest and (given.schedule is None or lengths):
            config: dict[str, Any] = {
                "decoding_type": self.decoding_type,
                "speculative_model": given.draft,
                "max_draft_len": longest,
            }
            if given.costs is not None:
                config["acceptance_rate_window_size"] = self.window
                config["acceptance_rate_threshold"] = _floor(given.costs, longest, made)
            schedule = {"draft_len_schedule": lengths} if lengths else {}
            made.files[CONFIG] = _yaml({**config, **schedule})
            made.launch.append(
                f"trtllm-serve {quote(given.target)} --extra_llm_api_options {given.file(CONFIG)}"
            )
            if len(lengths) == 1:
                made.files[CUTOFF] = _yaml({**config, "max_concurrency": next(iter(lengths))})
                made.left_out.append(f"schedule: {CUTOFF} says the same; give one of the two")
        elif given.costs is not None and given.schedule is None:
            made.left_out.append("costs: they take a draft's length. Write gamma=")
        made.left_out += given.left_out(
            calibration="TensorRT-LLM schedules by no confidences (pull request 17056 is open)",
            thresholds="TensorRT-LLM has no threshold on confidences",
        )
        return made


def _floor(costs: CostTable, length: int, made: Export) -> float:
    """Return the acceptance rate below which plain decoding is faster than drafts of `length`."""
    step = costs.target(length + 1) + costs.draft * length
    share = (step / costs.autoregressive - 1) / length
    if share > 1:
        made.left_out.append(f"costs: a draft of {length} tokens never pays. Serve without one")
    return round(min(max(share, 0.0), 1.0), 6)


def _lengths(schedule: Schedule) -> tuple[dict[int, int], list[str]]:
    """Return each length by the most requests it is for, and lines on differences from the
    schedule: the first length is the longest, and nothing is drafted beyond the last range."""
    first, lines = schedule.ranges[0].length, list[str]()
    cut = [Range(part.low, part.high, min(part.length, first)) for part in schedule.ranges]
    if cut != list(schedule.ranges):
        lines.append(f"schedule: no length may be above the first, {first}; longer ones are cut")
    while cut and cut[-1].length == 0:
        cut.pop()
    if not cut:
        return {}, [*lines, "schedule: nothing is drafted for one request. Serve without a draft"]
    lines.append("schedule: with more requests than its last range nothing is drafted")
    return {part.high: part.length for part in joined(cut)}, lines


def _yaml(config: dict[str, Any]) -> str:
    return yaml.safe_dump({"speculative_config": config}, sort_keys=False)
