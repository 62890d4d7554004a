"""What checkpoints say of harvests, of prompts they were not trained on."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data_gen.samples import of_prompts, read_inputs
from data_gen.storage.chunks import MANIFEST
from data_gen.storage.dataset import read_responses
from predictors.base import Predictor, Records, load_predictor
from predictors.calibration import balanced
from predictors.hrad import HRAD
from predictors.training.trainer import logits_in_chunks
from reports.artifacts import Checkpoint, Harvest
from reports.figure import Missing
from runtime.files import file_hash

AGES = (0, 1, 2, 3, 4, 6, 8)  # positions
POINTS = 400


@dataclass(frozen=True)
class Predicted:
    """What a predictor says of prompts it was not trained on.

    checkpoint, predictor: names; temperature: of the target; trained_on, dataset: harvests;
    in_domain: whether they are one, of which these are the test prompts; as_trained, calibrated,
    targets: [n, C] distributions; group: [n] prompts"""

    checkpoint: str
    predictor: str
    temperature: float
    trained_on: str
    dataset: str
    in_domain: bool
    as_trained: Tensor
    calibrated: Tensor
    targets: Tensor
    group: Tensor

    @property
    def where(self) -> str:
        return f"{self.dataset}, test split" if self.in_domain else self.dataset

    @property
    def prompts(self) -> int:
        return len(self.group.unique())


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


def one_of_each(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Of those of one predictor, with the same words in its settings, and one training harvest the
    first: of a sweep over numbers not every head is shown."""
    found: dict[tuple[str, ...], Checkpoint] = {}
    for checkpoint in checkpoints:
        config = checkpoint.config
        words = [value for value in config["settings"].values() if isinstance(value, str)]
        found.setdefault((config["predictor"], training_data(checkpoint), *words), checkpoint)
    return list(found.values())


def training_data(checkpoint: Checkpoint) -> str:
    """The hash of the harvest it was trained on."""
    return str(checkpoint.config["provenance"]["data"]["sha256"])


def predicted(checkpoint: Checkpoint, harvests: Sequence[Harvest]) -> list[Predicted]:
    """What a checkpoint says of every harvest it fits, of prompts it was not trained on; that of
    its training first.

    Empty where the harvest it was trained on is not among them: nothing says then which prompts it
    has seen. Harvests of other pairs, distributions or layers are left out, and those that stored
    no hidden states."""
    predictor, fitting = _on_harvests(checkpoint, harvests)
    return [_predicted(checkpoint, predictor, harvest, fitting[0]) for harvest in fitting]


def _on_harvests(
    checkpoint: Checkpoint, harvests: Sequence[Harvest]
) -> tuple[Predictor, list[Harvest]]:
    """The predictor and the harvests it fits, that of its training first."""
    predictor, home = load_predictor(checkpoint.folder, key="run"), trained_on(checkpoint, harvests)
    if home is None or not home.manifest["features_stored"]:
        return predictor, []
    return predictor, [
        home,
        *(other for other in harvests if other is not home and _fits(other, home, predictor)),
    ]


def trained_on(checkpoint: Checkpoint, harvests: Sequence[Harvest]) -> Harvest | None:
    wanted = training_data(checkpoint)
    return next(
        (harvest for harvest in harvests if file_hash(harvest.folder / MANIFEST) == wanted), None
    )


def _fits(other: Harvest, home: Harvest, predictor: Predictor) -> bool:
    """Whether it differs in its prompts alone, and holds some that `home` does not."""
    theirs, ours = other.manifest, home.manifest
    keys = ("pair", "warp", "draft_warp", "inputs")
    alike = all({**theirs[key], "name": ""} == {**ours[key], "name": ""} for key in keys)
    whole = theirs["features_stored"] and (predictor.gamma or 0) <= theirs["gamma"]
    return alike and whole and bool(unseen(other, home).any())


def _predicted(
    checkpoint: Checkpoint, predictor: Predictor, harvest: Harvest, home: Harvest
) -> Predicted:
    samples = held_out(predictor, harvest, home)
    logits = logits_in_chunks(predictor.head, samples["inputs"])
    return Predicted(
        checkpoint=checkpoint.folder.name,
        predictor=predictor.name,
        temperature=float(home.manifest["warp"]["temperature"]),
        trained_on=home.name,
        dataset=harvest.name,
        in_domain=harvest is home,
        as_trained=torch.softmax(logits, -1),
        calibrated=predictor.calibration.apply(logits),
        targets=predictor.targets(samples),
        group=samples["group"],
    )


def held_out(predictor: Predictor, harvest: Harvest, home: Harvest) -> Records:
    """Samples of the test split of the harvest trained on, or of those prompts of another one that
    it does not hold."""
    return predictor.samples(_held_out(predictor, harvest, home, predictor.kind, predictor.columns))


def _held_out(
    predictor: Predictor, harvest: Harvest, home: Harvest, kind: str, columns: Collection[str]
) -> Records:
    if harvest is home:
        return read_inputs(home.folder, predictor, kind, "test", columns, None)
    return of_prompts(
        read_inputs(harvest.folder, predictor, kind, "all", columns, None), unseen(harvest, home)
    )


def unseen(harvest: Harvest, home: Harvest) -> torch.Tensor:
    """[prompts] bool: those that `home` does not hold."""
    known = {tuple(response["prompt_tokens"]) for response in read_responses(home.folder, "all")}
    found = [
        tuple(response["prompt_tokens"]) not in known
        for response in read_responses(harvest.folder, "all")
    ]
    return torch.tensor(found)


def activations(harvest: Harvest, gamma: int = 3) -> Activations:
    """Inputs of `POINTS` rounds, without and with the embedding of the next token.

    Raises Missing where the harvest stored none.
    """
    if not (harvest.manifest["features_stored"] and harvest.manifest["gamma"] >= gamma):
        raise Missing("needs a harvest with stored hidden states: python scripts/gen_data.py")
    predictor = HRAD(gamma=gamma)
    columns = (*predictor.columns, "target_hidden")
    samples = predictor.samples(read_inputs(harvest.folder, predictor, "rounds", "all", columns))
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
    from features of `AGES`; of prompts as in `predicted`."""
    if checkpoint.config["predictor"] != HRAD.name:
        return []
    predictor, fitting = _on_harvests(checkpoint, harvests)
    return [
        _aged(checkpoint, predictor, harvest, fitting[0])
        for harvest in fitting
        if harvest.manifest["anchors"]["stride"] == 1
    ]


def _aged(checkpoint: Checkpoint, predictor: Predictor, harvest: Harvest, home: Harvest) -> Aged:
    records = _held_out(predictor, harvest, home, "rounds", (*predictor.columns, "anchor"))
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
