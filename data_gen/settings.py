"""What decides the content of a harvest's records, apart from pair and prompts."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from data_gen.responses.generate import ResponseSettings
from decoding.models.loading import ModelPair
from decoding.sampling import Warp
from predictors.features.layers import RecordedLayers
from runtime.settings.kinds import Count, DraftLength, Seed


@dataclass(frozen=True)
class HarvestSettings:
    """What a harvest's program is told, without groups. mixing: SpecDec++'s r; features_stored:
    false leaves hidden states and embeddings out, to be recomputed for training
    (`data_gen.recompute`); label_gb: changes records by rounding alone, and is no part of a
    plan."""

    gamma: Annotated[DraftLength, "draft tokens of a rollout"]
    seed: Annotated[Seed, "of every draw"]
    max_new_tokens: Annotated[Count, "most tokens of a response"]
    batch_size: Annotated[Count, "prompts answered together, and in one set of shards"]
    mixing: Annotated[float, Field(ge=0, lt=1), "share of response tokens in mixed sequences"]
    stride: Annotated[Count, "response positions between rollouts"]
    warp: Annotated[Warp, "of the target"]
    draft_warp: Annotated[Warp, "of the draft"]
    layers: Annotated[RecordedLayers, "whose hidden states are recorded"]
    features_stored: Annotated[bool, "whether they are on disk"] = True
    label_gb: Annotated[float | None, "memory of labelling, decimal GB; null: half of it"] = None

    def of_responses(self, pair: ModelPair) -> ResponseSettings:
        return ResponseSettings(
            self.max_new_tokens,
            pair.eos_ids,
            self.warp,
            self.draft_warp,
            self.stride,
            self.layers.of("target_hidden"),
            self.layers.of("draft_hidden"),
        )

    def to_dict(self) -> dict[str, Any]:
        """As the plan and the manifest record it."""
        return {
            "gamma": self.gamma,
            "seed": self.seed,
            "max_new_tokens": self.max_new_tokens,
            "batch_size": self.batch_size,
            "mixing": self.mixing,
            "anchors": {"stride": self.stride},
            "warp": self.warp.to_dict(),
            "draft_warp": self.draft_warp.to_dict(),
            "inputs": self.layers.to_dict(),
            "features_stored": self.features_stored,
        }
