"""Prefix survival, the probability that the first k draft tokens are all accepted, on which
SpecDec++ stops; and the test whether a fit helps on prompts it was not fitted on."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from runtime.errors import UserError

CLIP, LEAST = 1e-6, 1e-12  # least distance of a product from 1 and from 0, for its log-odds
BOUNDS = ((0.05, 20.0), (-20.0, 20.0), (-20.0, 20.0))
FOLDS = 5
DEPTHS = {"1": (1, 1), "2": (2, 2), "3": (3, 3), "4": (4, 4), "5-8": (5, 8), "9-": (9, math.inf)}
"""Positions that are reported together."""


@dataclass(frozen=True)
class Survival:
    """A map from acceptance probabilities to survival: log-odds(P(first k accepted)) = scale *
    log-odds(f_1 ... f_k) + bias + depth * log k, increasing in the product, and never above that of
    a shorter prefix.

    The product is exact if f_i is the acceptance probability given everything before token i and
    that the tokens before it were accepted (2405.19715, section 3.3). A head that knows less makes
    correlated errors on successive tokens, which no calibration of single tokens corrects. With the
    defaults the map is the product. rows, prompts, nll_before, nll_after, note: as in
    `predictors.calibration.Calibration`; nll_before is that of the product."""

    scale: float = 1.0
    bias: float = 0.0
    depth: float = 0.0
    rows: int = 0
    prompts: int = 0
    nll_before: float | None = None
    nll_after: float | None = None
    note: str = ""

    def __call__(self, f: Tensor) -> Tensor:
        """Return the survival of each prefix, float64 [..., gamma], from the acceptance
        probabilities of the tokens of a draft [..., gamma]."""
        return self.of_products(f.double().cumprod(-1))

    def of_products(self, products: Tensor) -> Tensor:
        """Return the survival from the products [..., gamma] of the first 1, 2, ... probabilities.

        Takes a running minimum over k: with a positive `depth`, or beyond `LEAST`, a longer prefix
        would otherwise be more likely than its beginning."""
        if self.is_product:
            return products
        k = torch.arange(1, products.shape[-1] + 1, dtype=products.dtype, device=products.device)
        odds = self.scale * _log_odds(products) + self.bias + self.depth * k.log()
        return torch.sigmoid(odds).cummin(-1)[0]

    def of_product(self, product: float, k: int, before: float = 1.0) -> float:
        """Return `of_products` of one prefix. before: survival of the prefix shorter by one."""
        if self.is_product:
            return product
        kept = min(max(product, LEAST), 1 - CLIP)
        odds = self.scale * math.log(kept / (1 - kept)) + self.bias + self.depth * math.log(k)
        return min(before, 1 / (1 + math.exp(-max(odds, -700.0))))

    def of_prefixes(self, rows: "Prefixes") -> Tensor:
        """Return the survival of the prefixes of whole rollouts, [n]."""
        rollout, before = (rows.k == 1).cumsum(0) - 1, rows.k.long() - 1
        products = rows.product.new_zeros(int(rollout[-1]) + 1, int(before.max()) + 1)
        products[rollout, before] = rows.product
        return self.of_products(products)[rollout, before]

    @property
    def is_product(self) -> bool:
        return (self.scale, self.bias, self.depth) == (1.0, 0.0, 0.0)


class Prefixes(NamedTuple):
    """Every prefix that drafting would reach, rollout by rollout, the shortest first.

    All [n]: product f_1 ... f_k; length k; the probability prod_{i<=k} min(1, p/q) that the target
    accepts all of it; its prompt. For a sampled target that probability has the expectation of the
    verdict and less variance, for a greedy one it is the verdict."""

    product: Tensor
    k: Tensor
    accepted: Tensor
    group: Tensor


def counted(products: Tensor, accepted: Tensor, length: Tensor, group: Tensor) -> Prefixes:
    """Return the prefixes of A rollouts. products, accepted: [A, gamma] of each prefix; length
    (valid tokens), group: [A]."""
    k = torch.arange(1, products.shape[1] + 1).expand(products.shape)
    columns = (products.double(), k.double(), accepted.double(), group[:, None].expand(k.shape))
    reached = k <= length[:, None]
    return Prefixes(*(column[reached] for column in columns))


def by_depth(k: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield ("all", every row), then ("1", ...), ..., ("9-", ...) as far as there are any, as masks
    [n] of prefixes of lengths k [n]."""
    yield "all", k > 0
    for name, (first, last) in DEPTHS.items():
        if (rows := (k >= first) & (k <= last)).any():
            yield name, rows


def fit_survival(rows: Prefixes) -> Survival:
    """Return the `Survival` of lowest cross-entropy with the labels, or the product if that
    `Survival` is not better on other prompts."""
    if not torch.isfinite(rows.product).all():
        raise UserError(
            "calibration.survival: the predictor returns NaN. Train with a lower trainer.lr"
        )
    before = binary_nll(rows.product, rows.accepted)
    nll, prompts = float(before.mean()), len(rows.group.unique())
    product = Survival(rows=len(rows.k), prompts=prompts, nll_before=nll, nll_after=nll)
    if product.prompts < 2:
        return replace(product, note="product kept: a fit takes rollouts of two prompts")
    fitted = _minimum(rows)
    after = float(binary_nll(fitted.of_prefixes(rows), rows.accepted).mean())
    held_out = cross_fitted(
        lambda kept: _minimum(Prefixes(*(column[kept] for column in rows))).of_prefixes(rows),
        rows.group,
    )
    gain = before - binary_nll(held_out, rows.accepted)
    if after > before.mean() or not better(gain, rows.group):
        return replace(product, note="product kept: no better on prompts it was not fitted on")
    return replace(
        product, scale=fitted.scale, bias=fitted.bias, depth=fitted.depth, nll_after=after
    )


def _minimum(rows: Prefixes) -> Survival:
    """Return the logistic regression on (log-odds, 1, log k), which is convex."""
    from scipy.optimize import minimize

    x = torch.stack([_log_odds(rows.product), torch.ones_like(rows.k), rows.k.log()], 1).numpy()
    s = rows.accepted.numpy()

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        z = x @ weights
        error = 1 / (1 + np.exp(-z)) - s
        return float(np.mean(np.logaddexp(0, z) - s * z)), x.T @ error / len(s)

    best = minimize(loss, np.array([1.0, 0.0, 0.0]), jac=True, method="L-BFGS-B", bounds=BOUNDS)
    return Survival(*best.x.tolist())


def _log_odds(products: Tensor) -> Tensor:
    return torch.logit(products.clamp(LEAST, 1 - CLIP))


def binary_nll(f: Tensor, s: Tensor) -> Tensor:
    """Return -s log f - (1 - s) log(1 - f), [n], f kept `CLIP` away from 0 and 1."""
    f = f.clamp(CLIP, 1 - CLIP)
    return -s * f.log() - (1 - s) * (1 - f).log()


def cross_fitted(predict: Callable[[Tensor], Tensor], group: Tensor) -> Tensor:
    """Return values [n, ...] of all rows, each from a fit that has not seen the row's prompt.

    predict: mask [n] of the rows to fit on -> values of all rows. group: [n], prompts, which are
    dealt into `FOLDS` folds."""
    prompts = torch.unique(group)
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(0))
    folds = [
        torch.isin(group, prompts[part]) for part in order.tensor_split(min(FOLDS, len(prompts)))
    ]
    values = [predict(~fold) for fold in folds]
    held_out = values[0].clone()
    for fold, value in zip(folds, values, strict=True):
        held_out[fold] = value[fold]
    return held_out


def better(gain: Tensor, group: Tensor) -> bool:
    """Return whether the mean of gain [n] exceeds its standard error, with prompts as the
    independent units."""
    _, prompt = torch.unique(group, return_inverse=True)
    prompts, mean = int(prompt.max()) + 1, gain.mean()
    excess = torch.zeros(prompts, dtype=gain.dtype).index_add_(0, prompt, gain - mean)
    error = excess.square().sum().sqrt() / len(gain) * math.sqrt(prompts / max(1, prompts - 1))
    return bool(mean > error)
