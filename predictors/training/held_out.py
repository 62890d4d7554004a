"""Whether something fitted helps on prompts it was not fitted on."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

FOLDS = 5


def cross_fitted(predict: Callable[[Tensor], Tensor], group: Tensor) -> Tensor:
    """Values [n, ...] of all rows, each from a fit that has not seen the row's prompt, group [n].

    predict: mask [n] of the rows to fit on -> values of all rows. Prompts are dealt into `FOLDS`
    folds."""
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
    """Whether the mean of gain [n] exceeds its standard error, with prompts as the independent
    units."""
    _, prompt = torch.unique(group, return_inverse=True)
    prompts, mean = int(prompt.max()) + 1, gain.mean()
    excess = torch.zeros(prompts, dtype=gain.dtype).index_add_(0, prompt, gain - mean)
    error = excess.square().sum().sqrt() / len(gain) * math.sqrt(prompts / max(1, prompts - 1))
    return bool(mean > error)
