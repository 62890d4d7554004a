"""Training losses, as sums and counts.

Each maps (logits, y) of some rows to (sums, counts), both [K]. The loss of a micro-batch is the
mean over k of sums / counts, both added up over all of its rows (`mean_loss`): parts of it, on
several processes, add up to the whole."""

import torch
import torch.nn.functional as F

Pairs = tuple[torch.Tensor, torch.Tensor]


def mean_loss(sums: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the mean of sums / counts [K] over positive counts, a scalar; where counts are 0, the
    sums are 0."""
    counted = counts > 0  # a mask instead of an index, for which a GPU's host would wait
    return (sums / counts.where(counted, 1)).sum() / counted.sum()


def weighted_soft_bce(
    logits: torch.Tensor, s: torch.Tensor, w_rej: float, w_acc: float = 1.0
) -> Pairs:
    """Return the soft-label cross-entropy in which rejections weigh more (SpecDec++, arXiv
    2405.19715, section 3.2).

    sum_i [w_rej (1 - s_i) (-log(1 - f_i)) + w_acc s_i (-log f_i)] / sum_i [w_rej (1 - s_i) + w_acc
    s_i] with f = softmax(logits)[:, 1]. The sums run over the whole micro-batch: it is not a mean
    of per-row losses.

    logits: [n, 2] (reject, accept). s: [n] soft labels min(1, p/q). K = 1.
    """
    weights = torch.stack([w_rej * (1 - s), w_acc * s], dim=-1)
    return -(weights * F.log_softmax(logits, dim=-1)).sum()[None], weights.sum()[None]


def weighted_cross_entropy(logits: torch.Tensor, y: torch.Tensor) -> Pairs:
    """Return the cross-entropy with soft targets. logits: [n, C]; y: [n, C], distributions times
    the weights of their rows. K = 1."""
    return -(y * F.log_softmax(logits, dim=-1)).sum()[None], y.sum()[None]


def smoothed_cross_entropy(logits: torch.Tensor, label: torch.Tensor, smoothing: float) -> Pairs:
    """Return the cross-entropy with uniform label smoothing. logits: [n, C], label: [n] int64, or
    distributions [n, C]. K = 1."""
    total = F.cross_entropy(logits, label, label_smoothing=smoothing, reduction="sum")
    return total[None], total.new_full((1,), len(label))


def balanced_cross_entropy(logits: torch.Tensor, label: torch.Tensor, smoothing: float) -> Pairs:
    """Return `smoothed_cross_entropy` with equal weight for every class that occurs. K = C.

    It is the objective of training on class-balanced draws, measured on rows that are not
    balanced."""
    rows = F.cross_entropy(logits, label, label_smoothing=smoothing, reduction="none")
    counts = torch.bincount(label, minlength=logits.shape[-1]).to(rows)
    return torch.zeros_like(counts).index_add(0, label, rows), counts
