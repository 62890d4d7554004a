"""The optimiser of drafts: Muon for weight matrices, AdamW for the norms' vectors."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn


@torch.no_grad()
def orthogonalised(matrix: Tensor) -> Tensor:
    """Nearly the orthogonal factor of `matrix` [m, n]: five quintic Newton-Schulz steps (Muon,
    Jordan et al. 2024).

    In the matrix's own dtype (torch.optim.Muon: always bfloat16, slow on a CPU without it)."""
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


class Muon:
    """Momentum, orthogonalised, for weight matrices; AdamW for the norms' vectors. Its whole state
    is `state`."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        momentum: float,
        dtype: torch.dtype = torch.float32,
        factors: Mapping[str, float] | None = None,
    ) -> None:
        """factors: of the learning rate, for parameters that have one of their own."""
        self.parameters, self.momentum, self.dtype = parameters, momentum, dtype
        self.factors = factors or {}
        self.state = {f"{name}.momentum": torch.zeros_like(p) for name, p in parameters.items()}
        self.state |= {
            f"{name}.square": torch.zeros_like(p) for name, p in parameters.items() if p.ndim == 1
        }

    @torch.no_grad()
    def step(self, lr: float, number: int) -> None:
        """Update from the gradients, which are cleared. `number` counts steps from 1."""
        for name, parameter in self.parameters.items():
            gradient, momentum = parameter.grad, self.state[f"{name}.momentum"]
            if gradient is None:  # nothing depended on it
                continue
            if parameter.ndim == 2:
                momentum.mul_(self.momentum).add_(gradient)
                update = orthogonalised((gradient + self.momentum * momentum).to(self.dtype)).to(
                    parameter
                )
                rate = lr * self.factors.get(name, 1.0)
                parameter.sub_(
                    update, alpha=0.2 * rate * math.sqrt(max(parameter.shape))
                )  # root mean square as Adam's
            else:
                square = self.state[f"{name}.square"]
                momentum.lerp_(gradient, 0.1)
                square.lerp_(gradient.square(), 0.05)
                unbiased = (square / (1 - 0.95**number)).sqrt_() + 1e-8
                parameter.sub_(lr * momentum / (1 - 0.9**number) / unbiased)
            parameter.grad = None
