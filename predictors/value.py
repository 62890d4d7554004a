"""The value of one more draft token: predicts, before the draft runs again, the outcome of a drawn
token, of the one after it, and of candidates beside it."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from predictors.base import Predictor, Records
from predictors.features.catalogue import FIXED
from predictors.inputs import Inputs, When, named_inputs
from predictors.outcomes import NEGLIGIBLE, OUTCOMES, Chances
from predictors.training.batches import Items, RowDropout, standardisation
from predictors.training.losses import weighted_cross_entropy
from predictors.training.trainer import Trainer
from runtime.errors import TooFewRows, UserError
from runtime.settings.kinds import Names

LARGEST = 100_000
"""Parameters of a head: more would take longer to ask than they can save."""
SMALLEST = 1e-6  # added to a probability before its log
LARGEST_INPUT = 80  # inputs of exp are clamped to this, in float32


class ValueHead(nn.Module):
    """Two hidden layers on (z - mean) / scale, where z is x and the logs of its last `numbers`
    columns: probabilities of tokens span orders of magnitude, hidden states do not."""

    mean: Tensor
    scale: Tensor

    def __init__(self, dim: int, numbers: int, width: int, dropout: float) -> None:
        super().__init__()
        self.states = dim - numbers
        self.register_buffer("mean", torch.zeros(dim + numbers))
        self.register_buffer("scale", torch.ones(dim + numbers))
        self.layers = nn.Sequential(
            *(nn.Linear(dim + numbers, width), nn.SiLU(), RowDropout(dropout)),
            *(nn.Linear(width, width), nn.SiLU(), RowDropout(dropout)),
            nn.Linear(width, len(OUTCOMES)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [n, 5] of float32 [n, D]."""
        logits: Tensor = self.layers((self.spread(x) - self.mean) / self.scale)
        return logits

    def spread(self, x: Tensor) -> Tensor:
        """Return z of inputs [n, D]."""
        return torch.cat([x, x[:, self.states :].abs().add(SMALLEST).log()], dim=-1)

    def of_row(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return `forward` of one row [D] as [5], in numpy, for evaluation on a CPU, where calls
        into torch take most of the time."""
        mean, scale, *layers = self._arrays
        z = np.concatenate([x, np.log(np.abs(x[self.states :]) + np.float32(SMALLEST))])
        z = (z - mean) / scale
        for weight, bias in zip(layers[:-2:2], layers[1:-2:2], strict=True):
            z = weight @ z + bias
            z /= 1 + np.exp(-z.clip(-LARGEST_INPUT))
        return layers[-2] @ z + layers[-1]

    def train(self, mode: bool = True) -> "ValueHead":
        self.__dict__.pop("_arrays", None)
        return super().train(mode)

    @cached_property
    def _arrays(self) -> list[NDArray[np.float32]]:
        """Views of the buffers and parameters, made once between two calls of `train` or `eval`."""
        return [values.detach().numpy() for values in (self.mean, self.scale, *self.parameters())]


@dataclass
class Value(Predictor):
    """Predicts `OUTCOMES` of a drawn token from inputs that exist once it is drawn.

    The labels are probabilities by the harvest's p and q, not its accept draws: that the token is
    accepted, that the next one is, and that its siblings are. With a sampled draft, siblings are
    two more candidates drawn without replacement; with a greedy one, its second and third choice.
    A token is weighted by the probability that those before it are accepted.
    """

    name: ClassVar[str] = "value"
    when: ClassVar[When] = "token"
    classes: ClassVar[tuple[str, ...]] = OUTCOMES
    label: ClassVar[str] = (
        "what becomes of a drawn token, its two siblings and the next token, by p and q under the"
        " warped distributions"
    )
    caveat: ClassVar[str] = (
        "It learns from tokens whose next one was harvested, so it knows nothing of drafts longer"
        " than those of the harvest. Prefix k: once k tokens are drawn, the first k + 1 are"
        " accepted."
    )

    inputs: Annotated[  # type: ignore[assignment]  # names until `begin`
        Names,
        "what it reads, of draft_hidden, target_hidden, token, draft_before, q_stats, q_path,"
        " depth, history; draft_hidden alone costs a draft forward",
    ]
    width: Annotated[int, Field(ge=1, le=1024), "units of each of two hidden layers"] = 64
    dropout: Annotated[float, Field(ge=0, lt=1), "share of the units left out"] = 0.2
    head: ValueHead = field(init=False)

    def __post_init__(self) -> None:
        self.more = named_inputs(self.inputs)

    @property
    def reads(self) -> Inputs:
        return self.more

    @property
    def columns(self) -> tuple[str, ...]:
        siblings = ("rrsw_token", "rrsw_accept", "top_accept")
        return ("known", "drafted", "accepted", "accept_prob", "q", "q_max", *siblings)

    def samples(self, records: Records) -> Records:
        """Return tokens, with the `weight` of each and its label `outcomes` [n, 5]. `reached`:
        whether the verdicts of the harvest accepted the path before it."""
        accept, gamma = records["accept_prob"], records["accept_prob"].shape[1]
        following, known = next_acceptance(accept, records["drafted"], records["known"])
        weight = torch.cat([torch.ones_like(accept[:, :1]), accept.cumprod(1)[:, :-1]], dim=1)
        kept = known & (weight >= NEGLIGIBLE)
        if not kept.any():
            raise TooFewRows(
                "data: expected rounds in which a token follows another one, got none. Harvest"
                " others: python scripts/gen_data.py"
            )
        second, third = sibling_acceptance(records).unbind(-1)
        reached = torch.arange(gamma) <= records["accepted"][:, None]
        of_tokens = {
            "inputs": records["inputs"],
            "outcomes": Chances(accept, following, second, third).outcomes(),
            "weight": weight,
            "reached": reached,
            "group": records["group"][:, None].expand_as(accept),
            **{name: records[name] for name in ("q", "q_max")},
        }
        return {name: values[kept] for name, values in of_tokens.items()}

    def build(self, dim: int) -> ValueHead:
        numbers = sum(FIXED.get(name, 0) for name in self.more.names)
        size = (dim + numbers + 1 + self.width + 1 + len(OUTCOMES)) * self.width + len(OUTCOMES)
        if size > LARGEST:
            raise UserError(
                f"predictor.width: expected a head of at most {LARGEST} parameters, got {size} for"
                f" {self.width} units on {dim} inputs. Lower it, or read less"
            )
        return ValueHead(dim, numbers, self.width, self.dropout)

    def fit(self, records: Records, inputs: Inputs, trainer: Trainer) -> "Value":
        """Train on `inputs` [n, D] and `outcomes` [n, 5] by `weight` [n]."""
        held = self.begin(records, inputs, trainer)
        x, y = records["inputs"], records["outcomes"] * records["weight"][:, None]
        head, loss = self.head, weighted_cross_entropy
        head.mean, head.scale = standardisation(x, ~held, head.spread)
        trainer.train(head, Items(x, y, kept=~held), Items(x, y, kept=held), loss, loss)
        return self

    def targets(self, records: Records) -> Tensor:
        return records["outcomes"]

    @torch.inference_mode()
    def predict_proba(self, x: Tensor) -> Tensor:
        """Return calibrated probabilities [n, 5] of `OUTCOMES` for float32 inputs [n, D]."""
        if len(x) == 1 and x.device.type == "cpu" and not self.head.training:
            row = self.head.of_row(x[0].float().numpy())
            return self.calibration.apply(torch.from_numpy(row)[None])
        return super().predict_proba(x)


def next_acceptance(accept: Tensor, drafted: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Return the acceptance of the token after each one, [N, gamma], and whether it is known, bool
    [N, gamma]. Behind an end token there is none. accept: [N, gamma]; drafted, known: [N]."""
    following = torch.cat([accept[:, 1:], torch.zeros_like(accept[:, :1])], dim=1)
    number = torch.arange(1, accept.shape[1] + 1)
    return following, number < torch.minimum(drafted, known)[:, None]


def sibling_acceptance(records: Records) -> Tensor:
    """Return the acceptance of the second and third candidate beside each token, given that those
    before it are rejected, [N, gamma, 2].

    They are drawn as the token was; if that had probability 1, none is left to draw, and they are
    the next most probable tokens."""
    certain = records["rrsw_token"][..., :1] < 0
    return torch.where(certain, records["top_accept"][..., 1:], records["rrsw_accept"])


PREDICTOR = Value
