"""Settings that several programs share."""

from collections.abc import Mapping
from typing import Annotated, Any

from runtime.settings.kinds import Group, Part, Probability

PROMPTS = "the prompts"
WARP = "from the target's logits to p, the distribution that is sampled"
DRAFT_WARP = "from the draft's logits to q, the same for the draft"
LOGGER = "where the run is logged"

Dataset = Annotated[Part, PROMPTS]
Warp = Annotated[Part, WARP]
DraftWarp = Annotated[Part, DRAFT_WARP]
Logger = Annotated[Part, LOGGER]


class Splits(Group):
    """Shares of the prompts, by a hash of their id; the rest is for training."""

    calibration: Annotated[Probability, "for calibration and for choosing settings"]
    test: Annotated[Probability, "for judging"]

    @staticmethod
    def misfits(values: Mapping[str, Any]) -> Mapping[str, str]:
        if sum(values.values()) > 1:
            return {"test": f"at most 1 - splits.calibration = {1 - values['calibration']:g}"}
        return {}
