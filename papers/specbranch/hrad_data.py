"""What H-RAD checkpoints make of rounds they were not trained on: by the kind of head, and from
older features."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data_gen.storage.dataset import Harvest
from predictors.base import Predictor, Records, load_predictor
from predictors.calibration import balanced
from predictors.hrad import HRAD, class_chances, class_of_length, next_round
from predictors.training.trainer import logits_in_chunks
from reports.artifacts import Artifacts, Checkpoint
from reports.checkpoint_data import (
    held_out,
    held_out_records,
    on_harvests,
    one_of_each,
    training_data,
)
from reports.figure import Missing
from reports.harvest_data import of_each
from runtime.errors import TooFewRows

POSITIONS = (0, 1, 2, 3, 4, 6, 8)
ROUNDS = (0, 1, 2)
POINTS = 400
CLASSES, LENGTHS = "three classes", "lengths"
PROBABLE, LONE, EVEN = "most probable class", "most probable length", "priors divided out"
LENGTHS_COMMAND = "python train.py predictor=hrad predictor.predicts=lengths"


@dataclass(frozen=True)
class Activations:
    """Feature vectors of rounds [n, D] by kind of feature; the class of the round and its prompt,
    [n]."""

    checkpoint: str
    gamma: int
    features: Mapping[str, Tensor]
    label: Tensor
    group: Tensor


@dataclass(frozen=True)
class Heads:
    """What a head of three classes and one of lengths say of the same rounds.

    probs: head -> calibrated probabilities of the classes [n, 3]; decided: (head, decision) ->
    class [n]; targets: [n, 3]; group: [n]"""

    checkpoint: str
    dataset: str
    gamma: int
    probs: Mapping[str, Tensor]
    decided: Mapping[tuple[str, str], Tensor]
    targets: Tensor
    group: Tensor


@dataclass(frozen=True)
class Aged:
    """What an H-RAD checkpoint says of the same rounds from features of several ages.

    trained_age: of the states it was trained on, rounds; unit: of the ages, "positions" or
    "rounds"; back: age -> positions, on average; probs: age -> calibrated probabilities [n, 3];
    decided: age -> class [n]; targets: [n, 3]; group: [n]"""

    checkpoint: str
    dataset: str
    gamma: int
    trained_age: int
    unit: str
    back: Mapping[int, float]
    probs: Mapping[int, Tensor]
    decided: Mapping[int, Tensor]
    targets: Tensor
    group: Tensor


def of_hrad(artifacts: Artifacts) -> list[Checkpoint]:
    """Those that predict classes, one of each; those trained on older states by themselves."""
    every = classifiers(artifacts.checkpoints)
    ages = sorted({_age(one) for one in every})
    return [
        one for age in ages for one in one_of_each([other for other in every if _age(other) == age])
    ]


def _age(checkpoint: Checkpoint) -> int:
    return int(checkpoint.config["settings"].get("age", 0))


def classifiers(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Those that predict classes."""
    return [
        one for one in checkpoints if one.config["predictor"] == HRAD.name and not _of_lengths(one)
    ]


def counterpart(checkpoint: Checkpoint, checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """The one that predicts lengths and differs in nothing else."""
    settings = checkpoint.config["settings"]
    return next(
        (
            other
            for other in checkpoints
            if other.config["predictor"] == HRAD.name
            and _of_lengths(other)
            and training_data(other) == training_data(checkpoint)
            and {**settings, "predicts": ""} == {**other.config["settings"], "predicts": ""}
        ),
        None,
    )


def _of_lengths(checkpoint: Checkpoint) -> bool:
    return bool(checkpoint.config["settings"].get("predicts") == "lengths")


def activations(
    checkpoint: Checkpoint, lengths: Checkpoint | None, harvests: Sequence[Harvest]
) -> Activations:
    """Of `POINTS` rounds of the test split of the harvest trained on: what the heads read, and what
    the last hidden layer of each makes of it. Raises Missing where the harvest is not there, stored
    no states, or has no such rounds."""
    predictor, fitting = on_harvests(checkpoint, harvests)
    if not fitting:
        raise Missing(
            "needs an H-RAD checkpoint and the harvest it was trained on, with stored hidden"
            " states: python scripts/gen_data.py; python train.py predictor=hrad"
        )
    heads = {CLASSES: predictor} | _lengths(lengths)
    (samples,) = of_each(fitting[:1], lambda home: _of_several(held_out(predictor, home, home)))
    order = torch.randperm(len(samples["group"]), generator=torch.Generator().manual_seed(0))
    x = samples["inputs"][order[:POINTS]].float()
    with torch.no_grad():
        made = {name: _head(one).activations(x) for name, one in heads.items()}
    targets = predictor.targets(samples)[order[:POINTS]]
    return Activations(
        checkpoint.folder.name,
        checkpoint.config["gamma"],
        {"inputs": x, **made},
        targets.argmax(1),
        samples["group"][order[:POINTS]],
    )


def _of_several(samples: Records) -> Records:
    if len(samples["group"].unique()) < 2:
        raise TooFewRows("data: the test split has rounds of one prompt. Harvest more prompts")
    return samples


def _lengths(checkpoint: Checkpoint | None) -> dict[str, Predictor]:
    return {} if checkpoint is None else {LENGTHS: load_predictor(checkpoint.folder, key="run")}


def _head(predictor: Predictor) -> Any:
    return predictor.head


def heads(checkpoint: Checkpoint, lengths: Checkpoint, harvests: Sequence[Harvest]) -> list[Heads]:
    """On every harvest they fit, of prompts as in `predicted`. Raises Missing where none has
    samples."""
    predictor, fitting = on_harvests(checkpoint, harvests)
    other = load_predictor(lengths.folder, key="run")
    return of_each(
        fitting, lambda harvest: _heads(checkpoint, predictor, other, (harvest, fitting[0]))
    )


def _heads(
    checkpoint: Checkpoint,
    classes: Predictor,
    lengths: Predictor,
    harvests: tuple[Harvest, Harvest],
) -> Heads:
    """harvests: that to look at, and that of the training."""
    samples, gamma = held_out(classes, *harvests), checkpoint.config["gamma"]
    ours, theirs = (_calibrated(one, samples["inputs"]) for one in (classes, lengths))
    even = balanced(theirs, lengths.calibration.log_prior).argmax(1)
    probs = {CLASSES: ours, LENGTHS: class_chances(theirs)}
    return Heads(
        checkpoint=checkpoint.folder.name,
        dataset=harvests[0].name,
        gamma=gamma,
        probs=probs,
        decided={
            (CLASSES, PROBABLE): ours.argmax(1),
            (LENGTHS, PROBABLE): probs[LENGTHS].argmax(1),
            (LENGTHS, LONE): class_of_length(theirs.argmax(1), gamma),
            (CLASSES, EVEN): balanced(ours, classes.calibration.log_prior).argmax(1),
            (LENGTHS, EVEN): class_of_length(even, gamma),
        },
        targets=classes.targets(samples),
        group=samples["group"],
    )


def _calibrated(predictor: Predictor, inputs: Tensor) -> Tensor:
    return predictor.calibration.apply(logits_in_chunks(predictor.head, inputs))


# Older features -----------------------------------------------------------------------------------


def aged(checkpoint: Checkpoint, harvests: Sequence[Harvest], unit: str) -> list[Aged]:
    """What an H-RAD checkpoint says of the same rounds of each harvest with one at every position,
    from features of several ages in "positions" or "rounds"; of prompts as in `predicted`. Raises
    Missing where none has samples."""
    if checkpoint.config["predictor"] != HRAD.name:
        return []
    predictor, fitting = on_harvests(checkpoint, harvests)
    return of_each(
        [harvest for harvest in fitting if harvest.manifest.anchors.stride == 1],
        lambda harvest: _aged(checkpoint, predictor, (harvest, fitting[0]), unit),
    )


def _aged(
    checkpoint: Checkpoint, predictor: Any, harvests: tuple[Harvest, Harvest], unit: str
) -> Aged:
    """harvests: as of `_heads`."""
    records = held_out_records(predictor, *harvests, "rounds", predictor.columns)
    gamma = checkpoint.config["gamma"]
    rows = positions_back(records) if unit == "positions" else rounds_back(records, gamma)
    ages = POSITIONS if unit == "positions" else ROUNDS
    rows = rows[records["known"][rows[:, 0]] >= gamma]
    said, log_prior = _calibrated(predictor, records["inputs"]), predictor.calibration.log_prior
    now = rows[:, 0]
    asked = predictor.labelled({name: values[now] for name, values in records.items()})
    probs = {age: said[rows[:, place]] for place, age in enumerate(ages)}
    back = (records["anchor"][now][:, None] - records["anchor"][rows]).double().mean(0)
    return Aged(
        checkpoint=checkpoint.folder.name,
        dataset=harvests[0].name,
        gamma=gamma,
        trained_age=_age(checkpoint),
        unit=unit,
        back=dict(zip(ages, back.tolist(), strict=True)),
        probs=probs,
        decided={age: balanced(found, log_prior).argmax(1) for age, found in probs.items()},
        targets=predictor.targets(asked),
        group=asked["group"],
    )


def positions_back(records: Records) -> Tensor:
    """[m, ages] rows of rounds at every position, and of those so many positions earlier."""
    now = (records["anchor"] >= max(POSITIONS)).nonzero()
    return now - torch.tensor(POSITIONS)  # rounds of a prompt lie one after the other


def rounds_back(records: Records, gamma: int) -> Tensor:
    """[m, ages] rows of the rounds that a decode with drafts of `gamma` tokens comes to from the
    first position of each response on, and of those so many rounds before them."""
    following, found = next_round(records, gamma).tolist(), list[list[int]]()
    for first in (records["anchor"] == 0).nonzero()[:, 0].tolist():
        walked, row = list[int](), first
        while row >= 0:
            walked.append(row)
            row = following[row]
        found += [
            [walked[place - age] for age in ROUNDS] for place in range(max(ROUNDS), len(walked))
        ]
    return torch.tensor(found, dtype=torch.int64).view(-1, len(ROUNDS))
