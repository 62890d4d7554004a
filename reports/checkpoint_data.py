"""What checkpoints say of harvests, of prompts they were not trained on."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data_gen.samples import of_prompts, prompt_texts, read_inputs
from data_gen.storage.dataset import Harvest
from predictors.base import Predictor, Records, load_predictor
from predictors.training.trainer import logits_in_chunks
from reports.artifacts import Checkpoint
from reports.harvest_data import models, of_each


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
    no hidden states. Raises Missing where none of them has
    samples of it."""
    predictor, fitting = on_harvests(checkpoint, harvests)
    return of_each(fitting, lambda harvest: _predicted(checkpoint, predictor, harvest, fitting[0]))


def on_harvests(
    checkpoint: Checkpoint, harvests: Sequence[Harvest]
) -> tuple[Predictor, list[Harvest]]:
    """The predictor and the harvests it fits, that of its training first."""
    predictor, home = load_predictor(checkpoint.folder, key="run"), trained_on(checkpoint, harvests)
    if home is None or not home.features_stored:
        return predictor, []
    return predictor, [
        home,
        *(other for other in harvests if other is not home and _fits(other, home, predictor)),
    ]


def trained_on(checkpoint: Checkpoint, harvests: Sequence[Harvest]) -> Harvest | None:
    wanted = training_data(checkpoint)
    return next((harvest for harvest in harvests if harvest.sha256 == wanted), None)


def _fits(other: Harvest, home: Harvest, predictor: Predictor) -> bool:
    """Whether it differs in its prompts alone, and holds some that `home` does not."""
    alike = (
        models(other.context["pair"]) == models(home.context["pair"])
        and other.warps == home.warps
        and other.inputs == home.inputs
    )
    whole = other.features_stored and (predictor.gamma or 0) <= other.gamma
    return alike and whole and bool(unseen(other, home).any())


def _predicted(
    checkpoint: Checkpoint, predictor: Predictor, harvest: Harvest, home: Harvest
) -> Predicted:
    samples = held_out(predictor, harvest, home)
    logits = logits_in_chunks(predictor.head, samples["inputs"])
    return Predicted(
        checkpoint=checkpoint.folder.name,
        predictor=predictor.name,
        temperature=home.warps.target.temperature,
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
    return predictor.samples(
        held_out_records(predictor, harvest, home, predictor.kind, predictor.columns)
    )


def held_out_records(
    predictor: Predictor, harvest: Harvest, home: Harvest, kind: str, columns: Collection[str]
) -> Records:
    if harvest is home:
        return read_inputs(home, predictor, kind, "test", columns)
    return of_prompts(read_inputs(harvest, predictor, kind, "all", columns), unseen(harvest, home))


def unseen(harvest: Harvest, home: Harvest) -> torch.Tensor:
    """[prompts] bool: those that `home` does not hold."""
    held = set(prompt_texts(home))
    return torch.tensor([prompt not in held for prompt in prompt_texts(harvest)])
