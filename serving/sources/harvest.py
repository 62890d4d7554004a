"""Confidences of our own harvests."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from data_gen.samples import EMBEDDINGS, inputs_of, read_inputs, refuse_short_rounds
from data_gen.storage.dataset import read_manifest, read_records, read_responses
from data_gen.storage.shards import FEATURES
from predictors.base import Predictor, Records, load_predictor
from predictors.confidences.table import Confidences, Labels, joined, table
from predictors.outcomes import Chances, foresees
from predictors.training.trainer import logits_in_chunks
from runtime.errors import UserError
from runtime.settings.kinds import Path

COLUMNS = ("known", "drafted", "accept_prob", "q_drawn")
CONTEXT = ("pair", "warp", "draft_warp")


@dataclass(frozen=True)
class Harvest:
    """The confidence of a drawn token is the draft's probability of it, at temperature 1 and
    unfiltered, or what a checkpoint says, before its calibration. Labels are expected: of a prefix
    the product of min(1, p/q). Every dataset of the harvest is a domain."""

    labels: ClassVar[Labels] = "expected"
    data: Annotated[Path, "folder made by scripts/gen_data.py"]
    checkpoint: Annotated[Path | None, "whose predictions; null: the draft's own probability"]

    def read(self) -> Confidences:
        """Raises UserError for no harvest, and a checkpoint that was made for another."""
        manifest = read_manifest(self.data, "source.data")
        if self.checkpoint is None:
            rounds: Records = read_records(self.data, "rounds", "all", COLUMNS)
            confidence = rounds["q_drawn"].double()
        else:
            predictor = self._predictor(manifest)
            rounds = read_inputs(self.data, predictor, "rounds", "all", COLUMNS)
            confidence = acceptance(predictor, rounds)
        found = self._by_dataset(torch.logit(confidence, 1e-7), rounds)
        return replace(found, facts={key: manifest[key] for key in CONTEXT})

    def _predictor(self, manifest: dict[str, Any]) -> Predictor:
        wanted = {key: manifest[key] for key in CONTEXT}
        predictor = load_predictor(str(self.checkpoint), expect=wanted, key="source.checkpoint")
        if predictor.when != "token":
            raise UserError(
                f"source.checkpoint: expected a predictor of single draft tokens, got"
                f" {predictor.name}. Give another, or null"
            )
        reads = set(inputs_of(self.data, predictor).columns(predictor.when))
        if not manifest["features_stored"] and reads & {*FEATURES, *EMBEDDINGS}:
            raise UserError(
                f"source.checkpoint: {self.checkpoint} reads hidden states, {self.data} stores"
                " none. Harvest with features=stored"
            )
        refuse_short_rounds(self.data, predictor)
        return predictor

    def _by_dataset(self, logits: Tensor, rounds: Records) -> Confidences:
        names = [row["dataset"] for row in read_responses(self.data, "all")]
        labels = rounds["accept_prob"].double().cumprod(1)
        length = torch.minimum(rounds["drafted"], rounds["known"])
        parts = []
        for name in dict.fromkeys(names):
            prompts = torch.tensor([one == name for one in names])
            kept = prompts[rounds["group"]]
            said, happened, count = (each[kept] for each in (logits, labels, length))
            if kept.any():
                where, group = f"source.data: {self.data}", rounds["group"][kept]
                parts.append(table(where, name, said, happened, count, group))
        return joined(parts, "source.data")


def acceptance(predictor: Predictor, rounds: Records) -> Tensor:
    """[n, gamma] float64, what the head says of each drawn token: that it is accepted if those
    before it are."""
    shape = rounds["accept_prob"].shape
    logits = logits_in_chunks(predictor.head, rounds["inputs"].reshape(shape.numel(), -1))
    probs = torch.softmax(logits.double(), -1).view(*shape, -1)
    return Chances.of(probs).first if foresees(probs.shape[-1]) else probs[..., 1]
