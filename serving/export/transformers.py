"""transformers: the draft's generation config."""

import json
from dataclasses import dataclass
from typing import Annotated, Any

from runtime.settings.kinds import Text
from serving.export.known import Export, Known, in_json, not_told

CONFIG = "generation_config.json"


@dataclass(frozen=True)
class Transformers:
    """Assisted generation reads the draft's generation config: how many tokens, and below which
    probability of a token drafting ends."""

    rule: Annotated[Text, "the tuned rule that ends a draft after a token of low probability"]

    def export(self, known: Known) -> Export:
        made = Export("transformers 5.23.0")
        length = known.schedule.ranges[0].length if known.schedule else known.gamma
        threshold = self._threshold(known, made)
        if length:
            made.files[CONFIG] = in_json(
                {
                    "num_assistant_tokens": length,
                    "num_assistant_tokens_schedule": "constant",
                    "assistant_confidence_threshold": threshold,
                }
            )
            made.launch += [
                "from transformers import GenerationConfig",
                f"settings = GenerationConfig.from_pretrained({json.dumps(known.folder)})",
                "draft.generation_config.update(**settings.to_diff_dict())",
                "target.generate(**inputs, assistant_model=draft)",
            ]
        if length is None and known.thresholds is not None:
            made.left_out.insert(0, "thresholds: they take a draft's length. Write gamma=")
        if length == 0:
            made.left_out.append("schedule: nothing is drafted for one request")
        made.left_out += not_told(
            known,
            calibration="the threshold is on the draft's own probability, as it is",
            costs="assisted generation prices nothing",
            schedule="one request alone is decoded: the length is that of the first range",
        )
        return made

    def _threshold(self, known: Known, made: Export) -> float:
        """0: drafting goes on to the last token."""
        found: Any = known.thresholds
        if found is None:
            return 0.0
        rule = found["results"]["chosen"]["rules"].get(self.rule)
        if rule is None:
            made.left_out.append(f"thresholds: nothing is tuned of {self.rule}")
            return 0.0
        made.left_out.append(
            "thresholds: here they are on the draft's probability at temperature 1; transformers"
            " takes that after the draft's logits processors"
        )
        if not rule["speculate"]:
            made.left_out.append(f"thresholds: no threshold of {self.rule} makes drafts pay here")
        return float(rule["threshold"])
