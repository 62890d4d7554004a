"""What an H-RAD checkpoint reads in harvests, and what it says of them from older features."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data_gen.samples import read_inputs
from predictors.base import Predictor
from predictors.calibration import balanced
from predictors.hrad import HRAD
from predictors.training.trainer import logits_in_chunks
from reports.artifacts import Checkpoint, Harvest
from reports.checkpoint_data import held_out_records, on_harvests
from reports.figure import Missing
from reports.harvest_data import of_each

AGES = (0, 1, 2, 3, 4, 6, 8)  # positions
POINTS = 400


@dataclass(frozen=True)
class Activations:
    """Feature vectors of rounds [n, D] by kind of feature; the class of the round and its prompt,
    [n]."""

    dataset: str
    gamma: int
    features: Mapping[str, Tensor]
    label: Tensor
    group: Tensor


@dataclass(frozen=True)
class Aged:
    """What an H-RAD checkpoint says of the same rounds from features of several ages.

    probs: age in positions -> calibrated probabilities [n, 3]; decided: age -> class [n]; targets:
    [n, 3]; group: [n]"""

    checkpoint: str
    dataset: str
    gamma: int
    probs: Mapping[int, Tensor]
    decided: Mapping[int, Tensor]
    targets: Tensor
    group: Tensor


def activations(harvest: Harvest, gamma: int = 3) -> Activations:
    """Inputs of `POINTS` rounds, without and with the embedding of the next token.

    Raises Missing where the harvest stored none, or has no such rounds.
    """
    if not (harvest.manifest["features_stored"] and harvest.manifest["gamma"] >= gamma):
        raise Missing("needs a harvest with stored hidden states: python scripts/gen_data.py")
    predictor: Any = HRAD(gamma=gamma)  # its inputs are names until it is trained
    columns = (*predictor.columns, "target_hidden")
    (samples,) = of_each(
        [harvest],
        lambda one: predictor.samples(read_inputs(one.folder, predictor, "rounds", "all", columns)),
    )
    order = torch.randperm(len(samples["group"]), generator=torch.Generator().manual_seed(0))[
        :POINTS
    ]
    both = samples["inputs"][order].float()
    states = samples["target_hidden"][order].float()
    return Activations(
        harvest.name,
        gamma,
        {"hidden states": states, "with embedding": both},
        samples["label"][order],
        samples["group"][order],
    )


def aged(checkpoint: Checkpoint, harvests: Sequence[Harvest]) -> list[Aged]:
    """What an H-RAD checkpoint says of the same rounds of each harvest with one at every position,
    from features of `AGES`; of prompts as in `predicted`. Raises Missing where none has samples."""
    if checkpoint.config["predictor"] != HRAD.name:
        return []
    predictor, fitting = on_harvests(checkpoint, harvests)
    return of_each(
        [harvest for harvest in fitting if harvest.manifest["anchors"]["stride"] == 1],
        lambda harvest: _aged(checkpoint, predictor, harvest, fitting[0]),
    )


def _aged(checkpoint: Checkpoint, predictor: Predictor, harvest: Harvest, home: Harvest) -> Aged:
    records = held_out_records(predictor, harvest, home, "rounds", (*predictor.columns, "anchor"))
    gamma = checkpoint.config["gamma"]
    kept = ((records["anchor"] >= max(AGES)) & (records["known"] >= gamma)).nonzero()[:, 0]
    all_probs = predictor.calibration.apply(logits_in_chunks(predictor.head, records["inputs"]))
    probs = {
        age: all_probs[kept - age] for age in AGES
    }  # rounds of a prompt lie one after the other
    log_prior = predictor.calibration.log_prior
    return Aged(
        checkpoint=checkpoint.folder.name,
        dataset=harvest.name,
        gamma=gamma,
        probs=probs,
        decided={age: balanced(found, log_prior).argmax(1) for age, found in probs.items()},
        targets=predictor.targets(
            predictor.samples({name: values[kept] for name, values in records.items()})
        ),
        group=records["group"][kept],
    )
