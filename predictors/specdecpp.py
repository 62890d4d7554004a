"""The acceptance head of SpecDec++ (arXiv 2405.19715): will the target accept this draft token?"""

import math
import pathlib
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from predictors.base import Predictor, Records
from predictors.inputs import Inputs, When, named_inputs
from predictors.released_head import read_head
from predictors.training.batches import Items
from predictors.training.losses import weighted_soft_bce
from predictors.training.trainer import Trainer
from runtime.settings.kinds import Layers, Names, Path


class AcceptanceHead(nn.Module):
    """A head of `depth` residual blocks x <- x + SiLU(W x + b), then a linear map to the logits
    (reject, accept).

    tie_blocks: all blocks share one W, b, as in the released code; the paper's text has one per
    block. Depth 0 is logistic regression."""

    def __init__(self, dim: int, depth: int, tie_blocks: bool) -> None:
        super().__init__()
        self.repeats = depth if tie_blocks else 1
        self.blocks = nn.ModuleList(
            nn.Linear(dim, dim) for _ in range(min(depth, 1) if tie_blocks else depth)
        )
        self.out = nn.Linear(dim, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits [n, 2] of float32 [n, D]."""
        for _ in range(self.repeats):
            for block in self.blocks:
                x = x + F.silu(block(x))
        logits: torch.Tensor = self.out(x)
        return logits


def kept_depths(records: Records) -> Records:
    """Return the tokens of each round up to and including the first rejected one. Columns of
    tokens, [N, gamma, ...], become [n, ...].

    Their hidden states are those of decoding, and P(all k accepted) is the product of P(token i
    accepted | those before it accepted): the head learns the factor that the stop rule multiplies.
    A greedy target gives no label to later tokens. A sampled one does (p is taken along the
    rollout), but a token behind a rejected one is not part of the product. The harvest's accept
    draws decide what is rejected, so a depth occurs as often as it is reached. `depth` is the
    number of the round's tokens before this one."""
    shape = records["accept_prob"].shape
    depth = torch.arange(shape[1])
    most = torch.minimum(records["drafted"], records["known"])
    kept = (depth <= records["accepted"][:, None]) & (depth < most[:, None])
    of_tokens = {name: values for name, values in records.items() if values.shape[:2] == shape}
    per_round = {"group": records["group"][:, None].expand(shape), "depth": depth.expand(shape)}
    return {name: values[kept] for name, values in (of_tokens | per_round).items()}


@dataclass
class SpecDecPP(Predictor):
    """Predicts s = min(1, p/q) of a drawn draft token from the draft's hidden state at that token.

    context: "mixed": candidates at all response positions, in a context of response tokens and
        earlier candidates, but labelled as in a context of response tokens alone; "rollout":
        `kept_depths`.
    w_rej, w_acc: weights of the loss, whose minimum lies at log-odds log(s / (1 - s)) -
        log(w_rej / w_acc): softmax(head) is the paper's f, to which its threshold of 0.7 (with
        w_rej = 6) applies; `predict_proba` undoes this shift before the temperature.
    """

    name: ClassVar[str] = "specdecpp"
    when: ClassVar[When] = "token"
    classes: ClassVar[tuple[str, ...]] = ("reject", "accept")
    label: ClassVar[str] = (
        "accept_prob = min(1, p(Y)/q(Y)) of a drawn draft token Y, under the warped distributions"
    )
    caveat: ClassVar[str] = (
        "Before calibration the output is the paper's f, which w_rej lowers by log(w_rej / w_acc)"
        " in log-odds; calibration adds that back. Stop thresholds tuned on f have to be tuned"
        " again."
    )

    context: Annotated[
        Literal["mixed", "rollout"],
        "of the tokens it learns from: the paper's token mixing, or that of harvested rounds, which"
        " decoding sees",
    ] = "mixed"
    depth: Annotated[int, Field(ge=0, le=64), "residual blocks; 0: logistic regression"] = 3
    tie_blocks: Annotated[bool, "one W, b for all blocks, as in the released code"] = False
    w_rej: Annotated[float, Field(gt=0, le=1e6), "weight of rejections in the loss"] = 6.0
    w_acc: Annotated[float, Field(gt=0, le=1e6), "weight of acceptances in the loss"] = 1.0
    layers: Annotated[
        Layers | None, "of the harvest those it reads, in their order; null: all of them"
    ] = None
    inputs: Annotated[
        Names,
        "what it reads besides the draft's states, such as q_stats; of rounds (context=rollout)"
        " also target_hidden, draft_before, q_path, depth and history; []: as in the paper",
    ] = field(default_factory=list)  # type: ignore[assignment]  # names until `begin`
    released: Annotated[
        Path | None,
        "folder of a head that SpecDec++'s own program saved: it is taken as it is, and only"
        " calibrated and scored; null: a head is trained",
    ] = None

    def __post_init__(self) -> None:
        self.layers = None if self.layers is None else tuple(self.layers)
        self.more = named_inputs(self.inputs)

    @property
    def reads(self) -> Inputs:
        before = self.layers if "draft_before" in self.more.names else ()
        return replace(self.more, draft_hidden=self.layers, draft_before=before)

    @property
    def kind(self) -> str:
        return "mixed" if self.context == "mixed" else "rounds"

    @property
    def columns(self) -> tuple[str, ...]:
        verdicts = () if self.context == "mixed" else ("known", "drafted", "accepted")
        return (*verdicts, "accept_prob", "q", "q_max")

    def samples(self, records: Records) -> Records:
        return records if self.context == "mixed" else kept_depths(records)

    @property
    def offset(self) -> tuple[float, ...]:
        return 0.0, math.log(self.w_rej / self.w_acc)

    def build(self, dim: int) -> AcceptanceHead:
        return AcceptanceHead(dim, self.depth, self.tie_blocks)

    def fit(self, records: Records, inputs: Inputs, trainer: Trainer) -> "SpecDecPP":
        """Train on `inputs` [n, D] and `accept_prob` [n]; a micro-batch is all positions of
        `batch_size` prompts."""
        held = self.begin(records, inputs, trainer)
        if self.released is not None:
            read_head(pathlib.Path(self.released), cast(AcceptanceHead, self.head))
            return self
        x, s, group = records["inputs"], records["accept_prob"], records["group"]
        loss = partial(weighted_soft_bce, w_rej=self.w_rej, w_acc=self.w_acc)
        fold, rest = Items(x, s, group, kept=~held), Items(x, s, kept=held)
        trainer.train(self.head, fold, rest, loss, loss)
        return self

    def targets(self, records: Records) -> torch.Tensor:
        s = records["accept_prob"]
        return torch.stack([1 - s, s], dim=-1)


PREDICTOR = SpecDecPP
