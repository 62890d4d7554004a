"""Scores of predicted class probabilities against hard or soft labels.

Everything takes `probs` and `targets` as [n, C] distributions; a soft label s is the target (1 - s,
s), a hard one a one-hot row. For two classes the scores are those of the second column, the usual
binary definitions."""

from typing import Any

import numpy as np
import torch

TINY = 1e-12


def scores(probs: torch.Tensor, targets: torch.Tensor, bins: int = 15) -> dict[str, Any]:
    """Return `kl`, `brier`, `ece`, `auroc`; for more than two classes also `accuracy` and
    `confusion`."""
    probs, targets = probs.double(), targets.double()
    result: dict[str, Any] = {
        "kl": kl(probs, targets),
        "brier": brier(probs, targets),
        "ece": ece(probs, targets, bins),
        "auroc": auroc(probs, targets),
    }
    if probs.shape[1] > 2:
        result["confusion"] = confusion(probs, targets)
        result["accuracy"] = float((probs.argmax(-1) == targets.argmax(-1)).double().mean())
    return result


def kl(probs: torch.Tensor, targets: torch.Tensor) -> float:
    """Return mean[CE(targets, probs) - H(targets)], 0 log 0 = 0; the log loss of hard labels."""
    return float((log_loss(probs, targets) + torch.special.xlogy(targets, targets).sum(-1)).mean())


def log_loss(probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each row, [n], probabilities kept above 0."""
    return -(targets * probs.clamp_min(TINY).log()).sum(-1)


def brier(probs: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the mean squared error."""
    return float(squared_error(probs, targets).mean())


def squared_error(probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return (f - s)^2 of each row for two classes, summed over the classes for more, [n]."""
    return ((probs - targets) ** 2).sum(-1) / (2 if probs.shape[1] == 2 else 1)


def ece(probs: torch.Tensor, targets: torch.Tensor, bins: int = 15) -> float:
    """Return the expected calibration error of `one_column` over equal-width bins, sum_b n_b / n
    |mean prediction - mean outcome|."""
    predicted, outcome = one_column(probs, targets)
    which = (predicted * bins).long().clamp(max=bins - 1)
    gaps = torch.zeros(bins, dtype=torch.float64)
    gaps.index_add_(0, which, (predicted - outcome).double())
    return float(gaps.abs().sum() / len(probs))


def one_column(probs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prediction and outcome [n] of the second of two classes; with more, of the class with
    the highest prediction (top label)."""
    if probs.shape[1] == 2:
        return probs[:, 1], targets[:, 1]
    predicted, top = probs.max(-1)
    return predicted, targets.gather(1, top[:, None])[:, 0]


def auroc(probs: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the area under the ROC curve; of more than two classes the mean of one-vs-rest. NaN
    where only one class occurs.

    A row with soft label s counts as a positive of weight s and a negative of weight 1 - s."""
    columns = [1] if probs.shape[1] == 2 else range(probs.shape[1])
    return float(np.mean([_auroc(probs[:, c], targets[:, c]) for c in columns]))


def _auroc(score: torch.Tensor, s: torch.Tensor) -> float:
    """Return P(score of a positive > score of a negative) + P(equal) / 2, with weights s, 1 - s."""
    positive, negative = s.sum(), (1 - s).sum()
    if positive <= 0 or negative <= 0:
        return float("nan")
    _, rank = torch.unique(score, return_inverse=True)
    size = int(rank.max()) + 1
    up = torch.zeros(size, dtype=torch.float64).index_add_(0, rank, s.double())
    down = torch.zeros(size, dtype=torch.float64).index_add_(0, rank, 1 - s.double())
    return float((up * (down.cumsum(0) - down / 2)).sum() / (positive * negative))


def confusion(probs: torch.Tensor, targets: torch.Tensor) -> list[list[int]]:
    """Return `[C][C]` counts: row = true class, column = predicted class (argmax)."""
    counts = torch.zeros(probs.shape[1], probs.shape[1], dtype=torch.int64)
    pairs = targets.argmax(-1), probs.argmax(-1)
    table: list[list[int]] = counts.index_put_(pairs, torch.tensor(1), accumulate=True).tolist()
    return table
