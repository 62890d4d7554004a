"""Settings that several programs share."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from runtime.settings.kinds import Count, Group, Layers, Names, Part, Positive, Says, Seed

Dataset = Annotated[Part, "the prompts"]
Warp = Annotated[Part, "from the target's logits to p, the distribution that is sampled"]
DraftWarp = Annotated[Part, "from the draft's logits to q, the same for the draft"]
Logger = Annotated[Part, "where the run is logged"]
Limit = Annotated[Count | None, "prompts, evenly spaced over the split; null: all of them"]
Split = Literal["train", "calibration", "test"]
AnySplit = Literal["train", "calibration", "test", "all"]
SomeNames = Annotated[
    Names, Field(min_length=1), Says("a list of one or more different names, such as [a,b]")
]
Share = Annotated[float, Field(gt=0, lt=1)]


class Splits(Group):
    """Shares of the prompts, by a hash of their text; the rest is for training."""

    calibration: Annotated[
        Share, "share of the prompts, by a hash of their text, that is for choosing settings"
    ]
    test: Annotated[Share, "share that is for judging; what is left is for training"]

    @staticmethod
    def misfits(values: Mapping[str, Any]) -> Mapping[str, str]:
        if sum(values.values()) >= 1:
            return {"test": f"less than 1 - splits.calibration = {1 - values['calibration']:g}"}
        return {}


class Inputs(Group):
    """Layers whose hidden states are recorded, -1: what the output layer reads; predictors read
    some of them."""

    draft_layers: Annotated[
        Layers,
        "layers whose hidden states are recorded at every drawn token, -1: what the output layer"
        " reads; predictors read some of them",
    ]
    target_layers: Annotated[
        Layers, "the same of the target, at the last verified position before every round"
    ]


class Calibration(Group):
    fit: Annotated[Part | None, "the map that is fitted; null: the head as trained"]
    sequential: Annotated[
        Part | None, "temperatures fitted one position after the other; imported confidences only"
    ]
    survival: Annotated[
        bool,
        "calibrate the survival of prefixes too, where the predictor has one and it helps on"
        " prompts that it was not fitted on",
    ]


class Harvest(Group):
    """Settings that decide the records of a harvest, wherever its rounds begin."""

    seed: Annotated[Seed, "of every draw"]
    max_new_tokens: Annotated[Count, "most tokens of a target response"]
    gamma: Annotated[
        int,
        Field(ge=1, le=1000),
        "draft tokens of a round, the most that any stop rule or predictor.gamma can be replayed or"
        " trained with",
    ]
    mixing: Annotated[
        Annotated[float, Field(ge=0, lt=1)],
        "share of response tokens in the mixed sequences that SpecDec++ learns from",
    ]
    batch_size: Annotated[
        Count, "prompts answered together; one batch is one set of shards and the unit of resuming"
    ]
    label_gb: Annotated[
        Positive | None,
        "GB that labelling may take beside the models and a batch; null: half of what is free",
    ]
    inputs: Inputs


class Replay(Group):
    """Settings of a replay and of the choice of thresholds."""

    gamma_max: Annotated[
        Count | None, "structure.gamma_max to tune for; null: the tokens of a harvested round"
    ]
    max_new_tokens: Annotated[Count | None, "tokens of the output; null: that of the harvest"]
    points: Annotated[int, Field(ge=1, le=1000), "thresholds tried from 0 to 1, besides 0"]
    choose: Annotated[Split, "prompts that thresholds, and the rule to advise, are chosen on"]
    judge: Annotated[Split, "prompts that speed-ups are estimated on, others than those"]

    @staticmethod
    def misfits(values: Mapping[str, Any]) -> Mapping[str, str]:
        if values["choose"] == values["judge"]:
            return {"judge": "another split than choose, else thresholds look too good"}
        return {}


class Method(Group):
    """The parts that decode together."""

    engine: Annotated[Part, "runs both models"]
    structure: Annotated[Part | None, "which draws a draft consists of"]
    verifier: Annotated[Part | None, "accepts or rejects them"]
    stop: Annotated[Part | None, "when drafting ends"]


class Methods(Group):
    """Methods by name, and the parts of the one that the command line makes."""

    warp: Warp
    draft_warp: DraftWarp
    engine: Annotated[Part, "of the method `custom`: runs both models"]
    structure: Annotated[Part, "of the method `custom`: which draws a draft consists of"]
    verifier: Annotated[Part, "of the method `custom`: accepts or rejects them"]
    stop: Annotated[Part, "of the method `custom`: when drafting ends"]
    method: Annotated[dict[str, Method], "what there is to compare, by name"]


def among(key: str, names: list[str], known: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the misfit of a list of names if one is not in `known`, else nothing."""
    if set(names) <= set(known):
        return {}
    return {key: f"names among {', '.join(known)}"}
