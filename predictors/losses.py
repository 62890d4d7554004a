"""Training losses. Each maps (logits, y) of one micro-batch to a scalar."""

import torch
import torch.nn.functional as F


def weighted_soft_bce(logits: torch.Tensor, s: torch.Tensor, w_rej: float, w_acc: float = 1.0) -> torch.Tensor:
    """Soft-label cross-entropy in which rejections weigh more (SpecDec++, arXiv 2405.19715, section 3.2).

    sum_i [w_rej (1 - s_i) (-log(1 - f_i)) + w_acc s_i (-log f_i)] / sum_i [w_rej (1 - s_i) + w_acc s_i] with
    f = softmax(logits)[:, 1]. The sums run over the whole micro-batch: it is not a mean of per-row losses.

    logits: [n, 2] (reject, accept). s: [n] soft labels min(1, p/q).
    """
    weights = torch.stack([w_rej * (1 - s), w_acc * s], dim=-1)
    return -(weights * F.log_softmax(logits, dim=-1)).sum() / weights.sum()


def smoothed_cross_entropy(logits: torch.Tensor, label: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Cross-entropy with uniform label smoothing. logits: [n, C], label: [n] int64."""
    return F.cross_entropy(logits, label, label_smoothing=smoothing)


def balanced_cross_entropy(logits: torch.Tensor, label: torch.Tensor, smoothing: float) -> torch.Tensor:
    """`smoothed_cross_entropy` with every class that occurs weighing the same.

    The objective of training on class-balanced draws, measured on held-out rows that are not balanced.
    """
    rows = F.cross_entropy(logits, label, label_smoothing=smoothing, reduction="none")
    weight = 1.0 / torch.bincount(label, minlength=logits.shape[-1])[label]
    return (rows * weight).sum() / weight.sum()
