"""Calibration on held-out prompts: one temperature."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

BOUNDS = (0.05, 20.0)


@dataclass(frozen=True)
class Temperature:
    """Probabilities are softmax(logits / temperature).

    nll_before, nll_after: mean cross-entropy on the `rows` calibration rows with temperature 1 and with `temperature`.
    One temperature sharpens or flattens; it cannot undo a shift of the class priors (`w_rej`, balanced sampling).
    """

    temperature: float = 1.0
    rows: int = 0
    nll_before: float | None = None
    nll_after: float | None = None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [n, C] -> probabilities [n, C]."""
        return torch.softmax(logits / self.temperature, dim=-1)

    def to_dict(self) -> dict[str, Any]:
        return {"method": "temperature", **asdict(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Temperature":
        return cls(**{name: value for name, value in values.items() if name != "method"})


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> float:
    """Mean over rows of -sum_c targets log softmax(logits). Both [n, C]; float64 inside."""
    return float(-(targets.double() * torch.log_softmax(logits.double(), dim=-1)).sum(-1).mean())


def fit_temperature(logits: torch.Tensor, targets: torch.Tensor) -> Temperature:
    """The temperature that minimises cross-entropy (Guo et al. 2017); 1 where none does better.

    logits: [n, C]. targets: [n, C] distributions (soft labels) or one-hot rows. The objective is convex in
    1 / temperature, so a bounded scalar search over log temperature finds the minimum.
    """
    from scipy.optimize import minimize_scalar

    low, high = torch.tensor(BOUNDS).log().tolist()
    found = minimize_scalar(
        lambda log_t: cross_entropy(logits / float(torch.tensor(log_t).exp()), targets),
        bounds=(low, high),
        method="bounded",
    )
    before, after = cross_entropy(logits, targets), float(found.fun)
    if after >= before:
        return Temperature(1.0, len(logits), before, before)
    return Temperature(math.exp(found.x), len(logits), before, after)
