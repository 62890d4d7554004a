"""Scores of predicted class probabilities against hard or soft labels.

Everything takes `probs` and `targets` as [n, C] distributions; a soft label s is the target (1 - s,
s), a hard one a one-hot row. For two classes the scores are those of the second column, the usual
binary definitions."""

from typing import Any

import numpy as np
import torch

TINY = 1e-12


def scores(probs: torch.Tensor, targets: torch.Tensor, bins: int = 15) -> dict[str, Any]:
    """`kl`, `brier`, `ece`, `auroc`; for more than two classes also `accuracy` and `confusion`.
    Unweighted."""
    probs, targets = probs.double(), targets.double()
    found: dict[str, Any] = {
        "kl": kl(probs, targets),
        "brier": brier(probs, targets),
        "ece": ece(probs, targets, bins),
        "auroc": auroc(probs, targets),
    }
    if probs.shape[1] > 2:
        found["confusion"] = confusion(probs, targets)
        found["accuracy"] = float((probs.argmax(-1) == targets.argmax(-1)).double().mean())
    return found


def kl(probs: torch.Tensor, targets: torch.Tensor) -> float:
    """mean[CE(targets, probs) - H(targets)], 0 log 0 = 0; the log loss when the labels are hard."""
    return float((log_loss(probs, targets) + torch.special.xlogy(targets, targets).sum(-1)).mean())


def log_loss(probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[n] cross-entropy of each row, probabilities kept above 0."""
    return -(targets * probs.clamp_min(TINY).log()).sum(-1)


def brier(probs: torch.Tensor, targets: torch.Tensor) -> float:
    """Mean squared error."""
    return float(squared_error(probs, targets).mean())


def squared_error(probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[n] (f - s)^2 of each row for two classes, summed over the classes for more."""
    return ((probs - targets) ** 2).sum(-1) / (2 if probs.shape[1] == 2 else 1)


def ece(probs: torch.Tensor, targets: torch.Tensor, bins: int = 15) -> float:
    """Expected calibration error over equal-width bins: sum_b n_b / n |mean prediction - mean
    outcome|.

    Of the probability `one_column` picks.
    """
    predicted, outcome = one_column(probs, targets)
    which = (predicted * bins).long().clamp(max=bins - 1)
    gap = torch.zeros(bins, dtype=torch.float64).index_add_(
        0, which, (predicted - outcome).double()
    )
    return float(gap.abs().sum() / len(probs))


def one_column(probs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(prediction, outcome) [n]: of the second of two classes, else of the class predicted most
    likely (top label)."""
    if probs.shape[1] == 2:
        return probs[:, 1], targets[:, 1]
    predicted, top = probs.max(-1)
    return predicted, targets.gather(1, top[:, None])[:, 0]


def auroc(probs: torch.Tensor, targets: torch.Tensor) -> float:
    """Area under the ROC curve; more than two classes: mean of one-vs-rest. NaN where only one
    class occurs.

    A row with soft label s counts as a positive of weight s and a negative of weight 1 - s.
    """
    columns = [1] if probs.shape[1] == 2 else range(probs.shape[1])
    return float(np.mean([_auroc(probs[:, c], targets[:, c]) for c in columns]))


def _auroc(score: torch.Tensor, s: torch.Tensor) -> float:
    """P(score of a positive > score of a negative) + P(equal) / 2, with row weights s and 1 - s."""
    positive, negative = s.sum(), (1 - s).sum()
    if positive <= 0 or negative <= 0:
        return float("nan")
    _, rank = torch.unique(score, return_inverse=True)
    size = int(rank.max()) + 1
    up = torch.zeros(size, dtype=torch.float64).index_add_(0, rank, s.double())
    down = torch.zeros(size, dtype=torch.float64).index_add_(0, rank, 1 - s.double())
    return float((up * (down.cumsum(0) - down / 2)).sum() / (positive * negative))


def confusion(probs: torch.Tensor, targets: torch.Tensor) -> list[list[int]]:
    """`[C][C]` counts: row = true class, column = predicted class (argmax)."""
    classes = probs.shape[1]
    flat = targets.argmax(-1) * classes + probs.argmax(-1)
    counts: list[list[int]] = (
        torch.bincount(flat, minlength=classes**2).view(classes, classes).tolist()
    )
    return counts
