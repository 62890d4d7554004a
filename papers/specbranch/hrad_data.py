"""Predictions of H-RAD checkpoints for rounds they were not trained on: by the kind of head, and
from older features."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from data_gen.storage.dataset import Harvest
from predictors.base import Predictor, Records, load_predictor
from predictors.calibration import balanced
from predictors.hrad import HRAD, class_chances, class_of_length, next_round
from predictors.training.trainer import logits_in_chunks
from reports.artifacts import Artifacts, Checkpoint, grouped
from reports.figure import Missing
from reports.harvest_data import held_out, of_each, on_harvests, one_of_each
from runtime.errors import TooFewRows

POSITIONS = (0, 1, 2, 3, 4, 6, 8)
ROUNDS = (0, 1, 2)
POINTS = 400
CLASSES, LENGTHS = "three classes", "lengths"
PROBABLE, LONE, EVEN = "most probable class", "most probable length", "priors divided out"
LENGTHS_COMMAND = "python train.py predictor=hrad predictor.predicts=lengths"


@dataclass(frozen=True)
class Activations:
    """Feature vectors of rounds [n, D] by kind of feature; class and prompt of each round, [n]."""

    checkpoint: str
    gamma: int
    features: Mapping[str, Tensor]
    label: Tensor
    group: Tensor


@dataclass(frozen=True)
class Heads:
    """Predictions of a head of three classes and of one of lengths for the same rounds.

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
    """Predictions of an H-RAD checkpoint for the same rounds from features of several ages.

    trained_age: of the states it was trained on, in rounds; unit: of the ages, "positions" or
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
    """Return the checkpoints that predict classes, one of each kind; those trained on older states
    are a separate kind."""
    by_age = grouped(sorted(classifiers(artifacts), key=_age), _age)
    return [one for alike in by_age for one in one_of_each(alike)]


def classifiers(artifacts: Artifacts) -> list[Checkpoint]:
    """Return the checkpoints that predict classes."""
    return [one for one in artifacts.checkpoints if _is_hrad(one, lengths=False)]


def _is_hrad(checkpoint: Checkpoint, lengths: bool) -> bool:
    """Return whether a checkpoint is an H-RAD head of lengths, or of classes without `lengths`."""
    config = checkpoint.config
    of_lengths = config["settings"].get("predicts") == "lengths"
    return config["predictor"] == HRAD.name and of_lengths == lengths


def _age(checkpoint: Checkpoint) -> int:
    return int(checkpoint.config["settings"].get("age", 0))


def counterpart(checkpoint: Checkpoint, checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """Return the checkpoint that predicts lengths and differs in nothing else; None if there is
    none."""

    def rest(one: Checkpoint) -> tuple[str, dict[str, Any]]:
        return one.training_data, {**one.config["settings"], "predicts": ""}

    lengths = (one for one in checkpoints if _is_hrad(one, lengths=True))
    return next((one for one in lengths if rest(one) == rest(checkpoint)), None)


def activations(checkpoint: Checkpoint, artifacts: Artifacts) -> Activations:
    """Return, for `POINTS` rounds of the test split of the training harvest, the inputs of the head
    and its counterpart, and the last hidden layer of each. Raises Missing if the harvest is
    missing, stored no states, or has no such rounds."""
    predictor, fitting = on_harvests(checkpoint, artifacts.harvests)
    if not fitting:
        raise Missing(
            "needs an H-RAD checkpoint and the harvest it was trained on, with stored hidden"
            " states: python scripts/gen_data.py; python train.py predictor=hrad"
        )
    heads: dict[str, Any] = {CLASSES: predictor.head}
    if lengths := counterpart(checkpoint, artifacts.checkpoints):
        heads[LENGTHS] = load_predictor(lengths.folder, key="run").head

    def rounds_of_several(home: Harvest) -> Records:
        samples = predictor.samples(held_out(predictor, home, home))
        if len(samples["group"].unique()) < 2:
            raise TooFewRows("data: the test split has rounds of one prompt. Harvest more prompts")
        return samples

    (samples,) = of_each(fitting[:1], rounds_of_several)
    order = torch.randperm(len(samples["group"]), generator=torch.Generator().manual_seed(0))
    x = samples["inputs"][order[:POINTS]].float()
    with torch.no_grad():
        made = {name: head.activations(x) for name, head in heads.items()}
    targets = predictor.targets(samples)[order[:POINTS]]
    return Activations(
        checkpoint.folder.name,
        checkpoint.config["gamma"],
        {"inputs": x, **made},
        targets.argmax(1),
        samples["group"][order[:POINTS]],
    )


def heads(checkpoint: Checkpoint, lengths: Checkpoint, harvests: Sequence[Harvest]) -> list[Heads]:
    """Return the predictions of both heads on every harvest they fit, for prompts as in
    `predicted`. Raises Missing if none has samples."""
    classes, fitting = on_harvests(checkpoint, harvests)
    other, gamma = load_predictor(lengths.folder, key="run"), checkpoint.config["gamma"]

    def on_harvest(harvest: Harvest) -> Heads:
        samples = classes.samples(held_out(classes, harvest, fitting[0]))
        ours, theirs = (_calibrated(one, samples["inputs"]) for one in (classes, other))
        even = balanced(theirs, other.calibration.log_prior).argmax(1)
        probs = {CLASSES: ours, LENGTHS: class_chances(theirs)}
        return Heads(
            checkpoint=checkpoint.folder.name,
            dataset=harvest.name,
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

    return of_each(fitting, on_harvest)


def _calibrated(predictor: Predictor, inputs: Tensor) -> Tensor:
    return predictor.calibration.apply(logits_in_chunks(predictor.head, inputs))


# Older features -----------------------------------------------------------------------------------


def aged(checkpoint: Checkpoint, harvests: Sequence[Harvest], unit: str) -> list[Aged]:
    """Return the predictions of an H-RAD checkpoint for the same rounds of each harvest with rounds
    at every position, from features of several ages in "positions" or "rounds", for prompts as in
    `predicted`. Raises Missing if none has samples."""
    predictor, fitting = on_harvests(checkpoint, harvests)
    gamma, labelled = checkpoint.config["gamma"], cast(HRAD, predictor).labelled
    ages = POSITIONS if unit == "positions" else ROUNDS

    def on_harvest(harvest: Harvest) -> Aged:
        records = held_out(predictor, harvest, fitting[0], "rounds")
        rows = positions_back(records) if unit == "positions" else rounds_back(records, gamma)
        rows = rows[records["known"][rows[:, 0]] >= gamma]
        calibrated, log_prior = (
            _calibrated(predictor, records["inputs"]),
            predictor.calibration.log_prior,
        )
        now = rows[:, 0]
        asked = labelled({name: values[now] for name, values in records.items()})
        probs = {age: calibrated[rows[:, place]] for place, age in enumerate(ages)}
        back = (records["anchor"][now][:, None] - records["anchor"][rows]).double().mean(0)
        return Aged(
            checkpoint=checkpoint.folder.name,
            dataset=harvest.name,
            gamma=gamma,
            trained_age=_age(checkpoint),
            unit=unit,
            back=dict(zip(ages, back.tolist(), strict=True)),
            probs=probs,
            decided={age: balanced(chances, log_prior).argmax(1) for age, chances in probs.items()},
            targets=predictor.targets(asked),
            group=asked["group"],
        )

    every_position = [one for one in fitting if one.manifest.anchors.stride == 1]
    return of_each(every_position, on_harvest)


def positions_back(records: Records) -> Tensor:
    """Return the rows [m, ages] of rounds at every position and of those `POSITIONS` earlier."""
    now = (records["anchor"] >= max(POSITIONS)).nonzero()
    return now - torch.tensor(POSITIONS)  # rounds of a prompt lie one after the other


def rounds_back(records: Records, gamma: int) -> Tensor:
    """Return the rows [m, ages] of the rounds that a decode with drafts of `gamma` tokens reaches
    from the first position of each response, and of those `ROUNDS` rounds before them."""
    following, rows = next_round(records, gamma).tolist(), list[list[int]]()
    for row in (records["anchor"] == 0).nonzero()[:, 0].tolist():
        walked = list[int]()
        while row >= 0:
            walked.append(row)
            row = following[row]
        rows += [
            [walked[place - age] for age in ROUNDS] for place in range(max(ROUNDS), len(walked))
        ]
    return torch.tensor(rows, dtype=torch.int64).view(-1, len(ROUNDS))
