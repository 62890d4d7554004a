"""Settings that, besides pair and prompts, decide the content of a harvest's records."""

from dataclasses import dataclass
from typing import Annotated, Any

from hydra.utils import instantiate
from pydantic import Field

from decoding.sampling import Warp
from predictors.features.layers import RecordedLayers
from runtime.settings.groups import Harvest
from runtime.settings.kinds import Count, DraftLength, Seed


@dataclass(frozen=True)
class HarvestSettings:
    """Settings of a harvest, without groups. mixing: SpecDec++'s r; features_stored: false leaves
    hidden states and embeddings out, to be recomputed for training (`data_gen.recompute`);
    label_gb: changes records only by rounding, and is not part of a plan."""

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

    @classmethod
    def of(
        cls, harvest: Harvest, warps: Any, stride: int, features_stored: bool = True
    ) -> "HarvestSettings":
        """Return the settings of a group. warps: an object with `warp` and `draft_warp`."""
        names = ("gamma", "seed", "max_new_tokens", "batch_size", "mixing", "label_gb")
        return cls(
            **{name: getattr(harvest, name) for name in names},
            stride=stride,
            warp=instantiate(warps.warp),
            draft_warp=instantiate(warps.draft_warp),
            layers=RecordedLayers(harvest.inputs.draft_layers, harvest.inputs.target_layers),
            features_stored=features_stored,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that plan and manifest record."""
        names = ("gamma", "seed", "max_new_tokens", "batch_size", "mixing")
        return {
            **{name: getattr(self, name) for name in names},
            "anchors": {"stride": self.stride},
            "warp": self.warp.to_dict(),
            "draft_warp": self.draft_warp.to_dict(),
            "inputs": self.layers.to_dict(),
            "features_stored": self.features_stored,
        }
