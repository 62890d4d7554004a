"""What decides the content of a harvest's records, apart from pair and prompts."""

from dataclasses import dataclass
from typing import Any

from data_gen.responses.generate import ResponseSettings
from decoding.models.loading import ModelPair
from decoding.sampling import Warp
from predictors.layers import RecordedLayers
from runtime.errors import UserError, checked_count, checked_seed, checked_switch


@dataclass(frozen=True)
class HarvestSettings:
    """gamma: draft tokens per rollout; mixing: share of response tokens in mixed sequences
    (SpecDec++'s r); stride: response positions between rollouts; batch_size: prompts answered
    together, and per shard; layers: whose hidden states are recorded; features_stored: false leaves
    hidden states and embeddings out, to be recomputed for training (`data_gen.recompute`)."""

    gamma: int
    seed: int
    max_new_tokens: int
    batch_size: int
    mixing: float
    stride: int
    warp: Warp
    draft_warp: Warp
    layers: RecordedLayers
    features_stored: bool = True

    def __post_init__(self) -> None:
        for key in ("gamma", "batch_size", "max_new_tokens"):
            checked_count(key, getattr(self, key))
        checked_count("anchors.stride", self.stride)
        checked_seed(self.seed)
        if not 0 <= self.mixing < 1:
            raise UserError(
                f"mixing: expected a share in [0, 1), got {self.mixing}. SpecDec++ uses 0.15"
            )
        checked_switch("features.stored", self.features_stored)

    def of_responses(self, pair: ModelPair) -> ResponseSettings:
        return ResponseSettings(
            self.max_new_tokens,
            pair.eos_ids,
            self.warp,
            self.draft_warp,
            self.stride,
            self.layers.of("target_hidden"),
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
