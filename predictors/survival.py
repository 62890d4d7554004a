"""Prefix survival: how likely all of the first k draft tokens are accepted, the number SpecDec++
stops on."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from predictors.training.held_out import better, cross_fitted
from runtime.errors import UserError

CLIP, LEAST = 1e-6, 1e-12  # of a product, in log-odds: from 1, and from 0
BOUNDS = ((0.05, 20.0), (-20.0, 20.0), (-20.0, 20.0))
DEPTHS = ((1, 1), (2, 2), (3, 3), (4, 4), (5, 8), (9, math.inf))
"""Positions that are reported together."""


@dataclass(frozen=True)
class Survival:
    """log-odds(P(first k accepted)) = scale * log-odds(f_1 ... f_k) + bias + depth * log k,
    increasing in the product, and at most what it is for any shorter prefix.

    The product is exact when f_i is the acceptance probability given everything before token i, and
    that the tokens before it were accepted (2405.19715, section 3.3). A head that knows less is
    wrong about the same stretch of text several times in a row, which no calibration of single
    tokens mends. With the defaults the product itself is returned. rows, prompts, nll_before,
    nll_after, note: as in `predictors.calibration.Calibration`, before being the product."""

    scale: float = 1.0
    bias: float = 0.0
    depth: float = 0.0
    rows: int = 0
    prompts: int = 0
    nll_before: float | None = None
    nll_after: float | None = None
    note: str = ""

    def __call__(self, f: Tensor) -> Tensor:
        """Acceptance probabilities of the tokens of a draft [..., gamma] -> survival of each of its
        prefixes, float64 [..., gamma]."""
        return self.of_products(f.double().cumprod(-1))

    def of_products(self, products: Tensor) -> Tensor:
        """The same for the products [..., gamma] of the first 1, 2, ... probabilities. A running
        minimum over k: by a positive `depth`, or beyond `LEAST`, a longer prefix would otherwise be
        more likely than its beginning."""
        if self.is_product:
            return products
        k = torch.arange(1, products.shape[-1] + 1, dtype=products.dtype, device=products.device)
        return torch.sigmoid(
            self.scale * _log_odds(products) + self.bias + self.depth * k.log()
        ).cummin(-1)[0]

    def of_product(self, product: float, k: int, before: float = 1.0) -> float:
        """`of_products` of one prefix. before: the same of the prefix that is shorter by one."""
        if self.is_product:
            return product
        kept = min(max(product, LEAST), 1 - CLIP)
        odds = self.scale * math.log(kept / (1 - kept)) + self.bias + self.depth * math.log(k)
        return min(before, 1 / (1 + math.exp(-max(odds, -700.0))))

    def of_prefixes(self, rows: "Prefixes") -> Tensor:
        """The same for whole rollouts, [n]."""
        rollout, before = (rows.k == 1).cumsum(0) - 1, rows.k.long() - 1
        products = rows.product.new_zeros(int(rollout[-1]) + 1, int(before.max()) + 1)
        products[rollout, before] = rows.product
        return self.of_products(products)[rollout, before]

    @property
    def is_product(self) -> bool:
        return (self.scale, self.bias, self.depth) == (1.0, 0.0, 0.0)


class Prefixes(NamedTuple):
    """Every prefix that drafting would reach, rollout by rollout, the shortest first. All [n]:
    product f_1 ... f_k, its length k, the probability that the target accepts all of it, and the
    prompt it came from."""

    product: Tensor
    k: Tensor
    accepted: Tensor
    group: Tensor

    def between(self, first: float, last: float) -> "Prefixes":
        rows = (self.k >= first) & (self.k <= last)
        return Prefixes(*(column[rows] for column in self))


def prefixes(f: Tensor, accept_prob: Tensor, length: Tensor, group: Tensor) -> Prefixes:
    """Prefixes of A rollouts: f, accept_prob [A, gamma]; length (tokens that count), group [A].

    The label is prod_{i<=k} min(1, p/q), the probability that all k drawn tokens are accepted: for
    a sampled target it has the expectation of the verdict and less variance, for a greedy one it is
    the verdict."""
    return counted(f.double().cumprod(1), accept_prob.double().cumprod(1), length, group)


def counted(said: Tensor, accepted: Tensor, length: Tensor, group: Tensor) -> Prefixes:
    """The same of whatever is said of each prefix. said, accepted: [A, gamma]."""
    k = torch.arange(1, said.shape[1] + 1).expand(said.shape)
    columns = (said.double(), k.double(), accepted.double(), group[:, None].expand(said.shape))
    reached = k <= length[:, None]
    return Prefixes(*(column[reached] for column in columns))


def by_depth(rows: Prefixes) -> Iterator[tuple[str, Prefixes]]:
    """("all", everything), then ("1", ...), ..., ("9-", ...) as far as there are any."""
    yield "all", rows
    for first, last in DEPTHS:
        part = rows.between(first, last)
        if len(part.k):
            yield (
                (str(first) if last == first else f"{first}-{'' if last == math.inf else last}"),
                part,
            )


def fit_survival(rows: Prefixes) -> Survival:
    """The `Survival` of lowest cross-entropy with the labels, the product where that is no better
    on other prompts."""
    if not torch.isfinite(rows.product).all():
        raise UserError(
            "calibration.survival: the predictor returns NaN. Train with a lower trainer.lr"
        )
    before = binary_nll(rows.product, rows.accepted)
    product = Survival(
        rows=len(rows.k), prompts=len(rows.group.unique()), nll_before=float(before.mean())
    )
    product = replace(product, nll_after=product.nll_before)
    if product.prompts < 2:
        return replace(product, note="product kept: a fit takes rollouts of two prompts")
    found = _minimum(rows)
    after = float(binary_nll(found.of_prefixes(rows), rows.accepted).mean())
    held_out = cross_fitted(
        lambda kept: _minimum(Prefixes(*(column[kept] for column in rows))).of_prefixes(rows),
        rows.group,
    )
    gain = before - binary_nll(held_out, rows.accepted)
    if after > before.mean() or not better(gain, rows.group):
        return replace(product, note="product kept: no better on prompts it was not fitted on")
    return replace(product, scale=found.scale, bias=found.bias, depth=found.depth, nll_after=after)


def _minimum(rows: Prefixes) -> Survival:
    """Logistic regression on (log-odds, 1, log k): convex."""
    from scipy.optimize import minimize

    x = torch.stack([_log_odds(rows.product), torch.ones_like(rows.k), rows.k.log()], 1).numpy()
    s = rows.accepted.numpy()

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        z = x @ weights
        error = 1 / (1 + np.exp(-z)) - s
        return float(np.mean(np.logaddexp(0, z) - s * z)), x.T @ error / len(s)

    found = minimize(loss, np.array([1.0, 0.0, 0.0]), jac=True, method="L-BFGS-B", bounds=BOUNDS)
    return Survival(*found.x.tolist())


def _log_odds(products: Tensor) -> Tensor:
    return torch.logit(products.clamp(LEAST, 1 - CLIP))


def binary_nll(f: Tensor, s: Tensor) -> Tensor:
    """-s log f - (1 - s) log(1 - f), [n], f kept `CLIP` away from 0 and 1."""
    f = f.clamp(CLIP, 1 - CLIP)
    return -s * f.log() - (1 - s) * (1 - f).log()
