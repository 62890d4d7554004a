"""H-RAD of SpecBranch (arXiv 2506.01979): will the target accept none, some or all of the next
round's draft?"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from predictors.base import Records
from predictors.calibration import Calibration
from predictors.inputs import Inputs, When
from predictors.layers import checked_layers
from predictors.training.batches import Items, RowDropout
from predictors.training.losses import balanced_cross_entropy, smoothed_cross_entropy
from predictors.training.resampling import (
    balancing_weights,
    hold_out_prompts,
    smote,
    standardisation,
)
from predictors.training.trainer import Trainer
from runtime.errors import TooFewRows, UserError, checked_count


class ClassMLP(nn.Module):
    """Linear(D, 256) - ReLU - Dropout - Linear(256, 64) - ReLU - Dropout - Linear(64, 3) on (x -
    mean) / scale."""

    mean: torch.Tensor
    scale: torch.Tensor

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("scale", torch.ones(dim))
        self.layers = nn.Sequential(
            *(nn.Linear(dim, 256), nn.ReLU(), RowDropout(dropout)),
            *(nn.Linear(256, 64), nn.ReLU(), RowDropout(dropout)),
            nn.Linear(64, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [n, D] -> [n, 3]."""
        logits: torch.Tensor = self.layers((x - self.mean) / self.scale)
        return logits


def round_class(accepted: torch.Tensor, drafted: torch.Tensor, gamma: int) -> torch.Tensor:
    """Class of a round of at most gamma tokens: 0 nothing accepted, 2 everything, 1 some of it.
    int64 [n].

    accepted, drafted: [n], of rounds at least that long (token-wise verdicts: cutting a round short
    cuts both)."""
    accepted, drafted = accepted.clamp(max=gamma), drafted.clamp(max=gamma)
    return torch.where(accepted == 0, 0, torch.where(accepted == drafted, 2, 1))


def log_prior(label: torch.Tensor, classes: int) -> tuple[float, ...]:
    """[C] log of each class's share among labels [n], relative to equal shares; a class that is
    missing counts once."""
    shares = (torch.bincount(label, minlength=classes) + 1) / (len(label) + classes)
    return tuple((shares * classes).log().tolist())


@dataclass
class HRAD:
    """Predicts the class of the accepted length from the target's states at the last verified
    position.

    gamma: draft tokens of the rounds whose outcome it predicts, at most those harvested.
    smote_neighbours: k of SMOTE, 0 switches it off. standardise: give the MLP standardised columns
    (constants of the training fold, saved with the weights); the paper feeds the raw states.
    layers: those of the harvest it reads; None for all. token: whether it reads the last committed
    token's embedding, as in the paper."""

    name: ClassVar[str] = "hrad"
    kind: ClassVar[str] = "rounds"
    when: ClassVar[When] = "round"
    columns: ClassVar[tuple[str, ...]] = ("known", "accepted", "drafted", "q_max")
    classes: ClassVar[tuple[str, ...]] = ("none", "some", "all")
    label: ClassVar[str] = (
        "accepted draft tokens n in the next round of gamma: none n = 0, some 0 < n < gamma, all n"
        " = gamma, or everything up to a drafted end token"
    )
    caveat: ClassVar[str] = (
        "SMOTE and the class-balanced sampler teach equal class priors; calibration multiplies"
        " those of the training split back in. The most probable class is then nearly always the"
        " most frequent one, so decoding divides them out again (stop.balance): what it decides is"
        " in the confusion matrix."
    )

    gamma: int = 3
    dropout: float = 0.4
    label_smoothing: float = 0.1
    smote_neighbours: int = 5
    standardise: bool = True
    layers: Sequence[int] | None = None
    token: bool = True
    inputs: Inputs = field(init=False)
    calibration: Calibration = field(default=Calibration(), init=False)
    offset: tuple[float, ...] = field(default=(), init=False)
    head: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        checked_count("predictor.gamma", self.gamma)
        self.layers = checked_layers(self.layers)
        if not (
            0 <= self.dropout < 1 and 0 <= self.label_smoothing < 1 and self.smote_neighbours >= 0
        ):
            raise UserError(
                "predictor: dropout and label_smoothing must lie in [0, 1), smote_neighbours be at"
                " least 0"
            )

    @property
    def reads(self) -> Inputs:
        return Inputs(target_hidden=self.layers, token=self.token)

    def samples(self, records: Records) -> Records:
        """The rounds whose first `gamma` verdicts are known, with their `label`; `q_max` of
        the first token."""
        known = records["known"] >= self.gamma
        if not known.any():
            raise TooFewRows(
                f"predictor.gamma: no harvested round of {self.gamma} tokens is complete. Lower it"
            )
        rows = {name: values[known] for name, values in records.items()}
        label = round_class(rows["accepted"], rows["drafted"], self.gamma)
        return {**rows, "label": label, "q_max": rows["q_max"][:, 0]}

    def build(self, dim: int) -> ClassMLP:
        return ClassMLP(dim, self.dropout)

    def fit(self, records: Records, inputs: Inputs, trainer: Trainer) -> "HRAD":
        """Train on `inputs` [n, D] and `label` [n]; prompts are held out first, then the rest is
        rebalanced."""
        x, label, group = records["inputs"].float(), records["label"], records["group"]
        held = hold_out_prompts(group, trainer.validation_fraction, trainer.seed)
        fold = x[~held], label[~held], group[~held]
        torch.manual_seed(trainer.seed)
        head = self.build(x.shape[1])
        if self.standardise:
            head.mean, head.scale = standardisation(fold[0])
        self.offset = log_prior(label, len(self.classes))
        if self.smote_neighbours:
            fold = smote(*fold, self.smote_neighbours, trainer.seed)
        self.inputs, self.head = inputs, head
        trainer.train(
            head,
            Items(fold[0], fold[1]),
            Items(x[held], label[held]),
            partial(smoothed_cross_entropy, smoothing=self.label_smoothing),
            partial(balanced_cross_entropy, smoothing=self.label_smoothing),
            weights=balancing_weights(fold[1]),
        )
        return self

    def targets(self, records: Records) -> torch.Tensor:
        return F.one_hot(records["label"], len(self.classes)).float()

    @torch.inference_mode()
    def predict_proba(self, x: torch.Tensor) -> torch.Tensor:
        """Calibrated probabilities [n, 3] of (none, some, all) for float32 inputs [n, D]."""
        return self.calibration.apply(self.head(x))


PREDICTOR = HRAD
