"""transformers: the draft's generation config."""

import json
from dataclasses import dataclass
from typing import Annotated

from runtime.settings.kinds import Text
from serving.export.base import Export, Given

CONFIG = "generation_config.json"


@dataclass(frozen=True)
class Transformers:
    """Exports the draft's generation config, which assisted generation reads: the number of tokens,
    and the probability of a token below which drafting ends."""

    rule: Annotated[Text, "the tuned rule that ends a draft after a token of low probability"]

    def export(self, given: Given) -> Export:
        made = Export("transformers 5.23.0")
        length = given.schedule.ranges[0].length if given.schedule else given.gamma
        threshold = self._threshold(given, made)
        if length:
            config = {
                "num_assistant_tokens": length,
                "num_assistant_tokens_schedule": "constant",
                "assistant_confidence_threshold": threshold,
            }
            made.add_json(CONFIG, config)
            made.launch += [
                "from transformers import GenerationConfig",
                f"settings = GenerationConfig.from_pretrained({json.dumps(given.folder)})",
                "draft.generation_config.update(**settings.to_diff_dict())",
                "target.generate(**inputs, assistant_model=draft)",
            ]
        if length is None and given.thresholds is not None:
            made.left_out.insert(0, "thresholds: they take a draft's length. Write gamma=")
        if length == 0:
            made.left_out.append("schedule: nothing is drafted for one request")
        made.left_out += given.left_out(
            calibration="the threshold is on the draft's own probability, as it is",
            costs="assisted generation prices nothing",
            schedule="one request alone is decoded: the length is that of the first range",
        )
        return made

    def _threshold(self, given: Given, made: Export) -> float:
        """Return the threshold; with 0, drafting goes on to the last token."""
        if given.thresholds is None:
            return 0.0
        rule = given.thresholds["results"]["chosen"]["rules"].get(self.rule)
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
