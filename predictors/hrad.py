"""H-RAD of SpecBranch (arXiv 2506.01979): will the target accept none, some or all of the next
round's draft?"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from predictors.base import Predictor, Records
from predictors.inputs import Inputs, When, named_inputs
from predictors.training.batches import Items, RowDropout, balancing_weights, smote, standardisation
from predictors.training.losses import balanced_cross_entropy, smoothed_cross_entropy
from predictors.training.trainer import Trainer
from runtime.errors import TooFewRows, UserError
from runtime.settings.kinds import DraftLength, Layers, Names


class ClassMLP(nn.Module):
    """The network Linear(D, 256) - ReLU - Dropout - Linear(256, 64) - ReLU - Dropout - Linear(64,
    C) on (x - mean) / scale."""

    mean: torch.Tensor
    scale: torch.Tensor

    def __init__(self, dim: int, dropout: float, classes: int = 3) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("scale", torch.ones(dim))
        self.layers = nn.Sequential(
            *(nn.Linear(dim, 256), nn.ReLU(), RowDropout(dropout)),
            *(nn.Linear(256, 64), nn.ReLU(), RowDropout(dropout)),
            nn.Linear(64, classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits [n, C] of float32 [n, D]."""
        logits: torch.Tensor = self.layers[-1](self.activations(x))
        return logits

    def activations(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last hidden layer [n, 64] of float32 [n, D]."""
        hidden: torch.Tensor = self.layers[:-1]((x - self.mean) / self.scale)
        return hidden


def round_length(accepted: torch.Tensor, drafted: torch.Tensor, gamma: int) -> torch.Tensor:
    """Return the accepted length of rounds cut to gamma tokens, int64 [n]; a round that was
    accepted whole counts as gamma, also where an end token cut it short.

    accepted, drafted: [n], of rounds of gamma tokens or more (token-wise verdicts, so cutting a
    round cuts both)."""
    accepted, drafted = accepted.clamp(max=gamma), drafted.clamp(max=gamma)
    return torch.where(accepted == drafted, gamma, accepted)


def class_of_length(length: torch.Tensor, gamma: int) -> torch.Tensor:
    """Return 0 for nothing accepted, 1 for some, 2 for all, int64 [n], of lengths [n] as
    `round_length` has them."""
    return (length > 0).long() + (length == gamma).long()


def length_chances(accept: torch.Tensor, drafted: torch.Tensor, gamma: int) -> torch.Tensor:
    """Return the probability of each `round_length` along the rollout, [n, gamma + 1].

    accept: [n, >= gamma], each token's probability of acceptance given that those before it are
    accepted; drafted: [n], 1 or more."""
    inside = torch.arange(gamma) < drafted[:, None]
    reached = accept[:, :gamma].where(inside, torch.ones(())).cumprod(-1)
    before = torch.cat([torch.ones_like(reached[:, :1]), reached[:, :-1]], dim=-1)
    return torch.cat([before - reached, reached[:, -1:]], dim=-1)


def class_chances(lengths: torch.Tensor) -> torch.Tensor:
    """Return the probabilities of the classes [n, 3] from those of the lengths [n, gamma + 1]."""
    return torch.stack([lengths[:, 0], lengths[:, 1:-1].sum(-1), lengths[:, -1]], dim=-1)


def next_round(records: Records, gamma: int) -> torch.Tensor:
    """Return for each round the row of the next one in serial decoding with drafts of `gamma`
    tokens, int64 [n]; -1 where the response ends before.

    For a sampled target it is a round of the recorded response, whatever tokens the round itself
    would have committed. Raises UserError unless there is a round at every position."""
    anchor, group = records["anchor"], records["group"]
    if ((anchor.diff() != 1) & (group.diff() == 0)).any():
        raise UserError(
            "predictor.age: expected a harvest with a round at every position, got one with gaps."
            " Harvest again: python scripts/gen_data.py anchors.stride=1"
        )
    row = torch.arange(len(anchor)) + records["accepted"].clamp(max=gamma) + 1
    inside = row.clamp(max=len(row) - 1)
    return torch.where((row == inside) & (group[inside] == group), row, -1)


def log_prior(label: torch.Tensor, classes: int) -> tuple[float, ...]:
    """Return the log of each class's share among labels [n], relative to equal shares, [C], with
    one added to every count."""
    shares = (torch.bincount(label, minlength=classes) + 1) / (len(label) + classes)
    return tuple((shares * classes).log().tolist())


@dataclass
class HRAD(Predictor):
    """Predicts the class of the accepted length from the target's states at the last verified
    position.

    gamma: at most that of the harvest. standardise: by constants of the training fold, saved with
    the weights. predicts: "lengths" is the direct predictor (as in AdaEAGLE) that the paper
    compares its three classes with; stop=predicted_length asks it. labels: for a greedy target
    coins and soft are the same; soft ones are not rebalanced, so no priors are divided out of
    them."""

    name: ClassVar[str] = "hrad"
    when: ClassVar[When] = "round"
    columns: ClassVar[tuple[str, ...]] = (
        *("anchor", "known", "accepted", "drafted", "accept_prob", "q_max"),
    )
    label: ClassVar[str] = (
        "accepted draft tokens n in the next round of gamma: none n = 0, some 0 < n < gamma, all n"
        " = gamma, or everything up to a drafted end token; with predicts=lengths n itself, where"
        " all is gamma; with labels=soft how probable each is"
    )
    caveat: ClassVar[str] = (
        "Without labels=soft, SMOTE and the class-balanced sampler teach equal class priors;"
        " calibration multiplies those of the training split back in. The most probable class is"
        " then nearly always the most frequent one, so decoding divides them out again"
        " (stop.balance): what it decides is in the confusion matrix."
    )

    gamma: Annotated[
        DraftLength,
        "draft tokens of the rounds it predicts; where acceptance is low a longer round is never"
        " all accepted",
    ] = 3
    predicts: Annotated[
        Literal["classes", "lengths"],
        "none, some or all; lengths: each number of accepted tokens by itself, to compare with",
    ] = "classes"
    labels: Annotated[
        Literal["coins", "soft"],
        "the class that the coins of the harvest gave a round, as in the paper; soft: how probable"
        " each class was, learned without SMOTE, balancing and smoothing",
    ] = "coins"
    dropout: Annotated[float, Field(ge=0, lt=1), "share of units left out in training"] = 0.4
    label_smoothing: Annotated[float, Field(ge=0, lt=1), "share of a label given to all"] = 0.1
    smote_neighbours: Annotated[int, Field(ge=0, le=1000), "k of SMOTE; 0: no SMOTE"] = 5
    age: Annotated[
        int,
        Field(ge=0, le=8),
        "rounds between what it reads and the round it predicts; 1: as branches are asked about"
        " with engine.a_priori=true, from a harvest with a round at every position",
    ] = 0
    standardise: Annotated[bool, "false: raw states into the MLP, as in the paper"] = True
    layers: Annotated[
        Layers | None, "of the harvest those it reads, in their order; null: all of them"
    ] = None
    token: Annotated[bool, "whether it reads the embedding of the last committed token"] = True
    inputs: Annotated[
        Names, "what it reads besides the target's states, such as history; []: as in the paper"
    ] = field(default_factory=list)  # type: ignore[assignment]  # names until `begin`
    offset: tuple[float, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        self.layers = None if self.layers is None else tuple(self.layers)
        self.more = named_inputs(self.inputs)

    @property
    def classes(self) -> tuple[str, ...]:
        if self.predicts == "lengths":
            return tuple(map(str, range(self.gamma + 1)))
        return ("none", "some", "all")

    @property
    def reads(self) -> Inputs:
        token = self.token or self.more.token
        return replace(self.more, target_hidden=self.layers, token=token)

    def samples(self, records: Records) -> Records:
        """Return `labelled` rounds with the `inputs` from `age` rounds earlier."""
        if not self.age:
            return self.labelled(records)
        following = asked = next_round(records, self.gamma)
        for _ in range(1, self.age):
            asked = torch.where(asked >= 0, following[asked], -1)
        read = asked >= 0
        late = {name: values[asked[read]] for name, values in records.items()}
        return self.labelled({**late, "inputs": records["inputs"][read]})

    def labelled(self, records: Records) -> Records:
        """Return the rounds whose first `gamma` verdicts are known, with their `label`, and `q_max`
        of the first token."""
        complete = records["known"] >= self.gamma
        if not complete.any():
            raise TooFewRows(
                f"predictor.gamma: no harvested round of {self.gamma} tokens is complete. Lower it"
            )
        rows = {name: values[complete] for name, values in records.items()}
        label = round_length(rows["accepted"], rows["drafted"], self.gamma)
        if self.predicts == "classes":
            label = class_of_length(label, self.gamma)
        return {**rows, "label": label, "q_max": rows["q_max"][:, 0]}

    def build(self, dim: int) -> ClassMLP:
        return ClassMLP(dim, self.dropout, len(self.classes))

    def fit(self, records: Records, inputs: Inputs, trainer: Trainer) -> "HRAD":
        """Train on `inputs` [n, D] and their labels. Only the rows that are not held out are
        rebalanced; soft labels are learned as they are."""
        held = self.begin(records, inputs, trainer)
        x = records["inputs"]
        if self.standardise:
            self.head.mean, self.head.scale = standardisation(x, ~held)
        if self.labels == "soft":
            y, loss = self.targets(records), partial(smoothed_cross_entropy, smoothing=0.0)
            trainer.train(self.head, Items(x, y, kept=~held), Items(x, y, kept=held), loss, loss)
            return self
        label = records["label"]
        self.offset = log_prior(label, len(self.classes))
        more = smote(x, label, ~held, self.smote_neighbours, trainer.seed)
        fold = Items(x, label, kept=~held, more=more)
        trainer.train(
            self.head,
            fold,
            Items(x, label, kept=held),
            partial(smoothed_cross_entropy, smoothing=self.label_smoothing),
            partial(balanced_cross_entropy, smoothing=self.label_smoothing),
            weights=balancing_weights(fold.y),
        )
        return self

    def targets(self, records: Records) -> torch.Tensor:
        if self.labels == "soft":
            chances = length_chances(records["accept_prob"], records["drafted"], self.gamma)
            return chances if self.predicts == "lengths" else class_chances(chances)
        return F.one_hot(records["label"], len(self.classes)).float()


PREDICTOR = HRAD
