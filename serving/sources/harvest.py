"""Confidences of our own harvests."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from data_gen.samples import EMBEDDINGS, inputs_of, read_inputs, refuse_short_rounds
from data_gen.storage import dataset
from data_gen.storage.shards import FEATURES
from predictors.base import Predictor, Records, load_predictor
from predictors.confidences.table import Confidences, Labels, joined, table
from predictors.outcomes import Chances, foresees
from predictors.training.trainer import logits_in_chunks
from runtime.errors import UserError
from runtime.settings.kinds import Path

COLUMNS = ("known", "drafted", "accept_prob", "q_drawn")


@dataclass(frozen=True)
class Harvest:
    """Confidences from a harvest: of a drawn token, its unwarped q, or the uncalibrated prediction
    of a checkpoint. The label of a prefix is its acceptance probability, the product of min(1,
    p/q). Every dataset of the harvest is a domain."""

    labels: ClassVar[Labels] = "expected"
    data: Annotated[Path, "folder made by scripts/gen_data.py"]
    checkpoint: Annotated[Path | None, "whose predictions; null: the draft's own probability"]

    def read(self) -> Confidences:
        """Read the table. Raises UserError if there is no harvest, or if the checkpoint was made
        for another."""
        harvest = dataset.Harvest.open(self.data, "source.data")
        if self.checkpoint is None:
            rounds: Records = harvest.rounds("all", COLUMNS)
            confidence = rounds["q_drawn"].double()
        else:
            predictor = self._predictor(harvest)
            rounds = read_inputs(harvest, predictor, "rounds", "all", COLUMNS)
            confidence = acceptance(predictor, rounds)
        names = [prompt.dataset for prompt in harvest.prompts("all")]
        logits = torch.logit(confidence, 1e-7)
        labels = rounds["accept_prob"].double().cumprod(1)
        length = torch.minimum(rounds["drafted"], rounds["known"])
        where, parts = f"source.data: {self.data}", list[Confidences]()
        for name in dict.fromkeys(names):
            kept = torch.tensor([other == name for other in names])[rounds["group"]]
            if kept.any():
                columns = (each[kept] for each in (logits, labels, length, rounds["group"]))
                parts.append(table(where, name, *columns))
        return replace(joined(parts, "source.data"), facts=harvest.context)

    def _predictor(self, harvest: dataset.Harvest) -> Predictor:
        predictor = load_predictor(
            str(self.checkpoint), expect=harvest.context, key="source.checkpoint"
        )
        if predictor.when != "token":
            raise UserError(
                f"source.checkpoint: expected a predictor of single draft tokens, got"
                f" {predictor.name}. Give another, or null"
            )
        reads = set(inputs_of(harvest, predictor).columns(predictor.when))
        if not harvest.features_stored and reads & {*FEATURES, *EMBEDDINGS}:
            raise UserError(
                f"source.checkpoint: {self.checkpoint} reads hidden states, {self.data} stores"
                " none. Harvest with features=stored"
            )
        refuse_short_rounds(harvest, predictor)
        return predictor


def acceptance(predictor: Predictor, rounds: Records) -> Tensor:
    """Return the head's probability that each drawn token is accepted if those before it are,
    [n, gamma] float64."""
    shape = rounds["accept_prob"].shape
    logits = logits_in_chunks(predictor.head, rounds["inputs"].reshape(shape.numel(), -1))
    probs = torch.softmax(logits.double(), -1).view(*shape, -1)
    return Chances.of(probs).first if foresees(probs.shape[-1]) else probs[..., 1]
