"""Calibration on held-out prompts: one temperature, after undoing a known shift of the class odds."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

BOUNDS = (0.05, 20.0)


@dataclass(frozen=True)
class Temperature:
    """Probabilities are softmax((logits + offset) / temperature).

    offset: [C] constants that undo what a loss is known to have done to the class odds; () for none. nll_before,
    nll_after: mean cross-entropy on the `rows` calibration rows of softmax(logits) and of the calibrated probabilities.
    """

    temperature: float = 1.0
    offset: tuple[float, ...] = ()
    rows: int = 0
    nll_before: float | None = None
    nll_after: float | None = None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [n, C] -> probabilities [n, C]."""
        if self.offset:
            logits = logits + logits.new_tensor(self.offset)
        return torch.softmax(logits / self.temperature, dim=-1)

    def to_dict(self) -> dict[str, Any]:
        return {"method": "temperature", **asdict(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Temperature":
        arguments = {name: value for name, value in values.items() if name != "method"}
        return cls(**{**arguments, "offset": tuple(arguments["offset"])})


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> float:
    """Mean over rows of -sum_c targets log softmax(logits). Both [n, C]; float64 inside."""
    return float(-(targets.double() * torch.log_softmax(logits.double(), dim=-1)).sum(-1).mean())


def fit_temperature(logits: torch.Tensor, targets: torch.Tensor, offset: tuple[float, ...] = ()) -> Temperature:
    """The temperature that minimises cross-entropy (Guo et al. 2017); the identity where none does better than it.

    logits: [n, C]. targets: [n, C] distributions (soft labels) or one-hot rows. offset: as in `Temperature`. The
    objective is convex in 1 / temperature, so a bounded scalar search over log temperature finds the minimum.
    """
    from scipy.optimize import minimize_scalar

    shifted = logits + logits.new_tensor(offset) if offset else logits
    bounds = [math.log(bound) for bound in BOUNDS]
    found = minimize_scalar(
        lambda log_t: cross_entropy(shifted / math.exp(log_t), targets), bounds=bounds, method="bounded"
    )
    before, after = cross_entropy(logits, targets), float(found.fun)
    if after >= before:
        return Temperature(1.0, (), len(logits), before, before)
    return Temperature(math.exp(found.x), offset, len(logits), before, after)
