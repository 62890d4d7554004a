"""The predictors a learned one has to beat: no head, no hidden states."""

import numpy as np
import torch

CONFIDENCES = ("q", "q_max")
"""Columns with a draft probability: of the drawn token, and the largest of its distribution."""


def constant(targets: torch.Tensor, n: int) -> torch.Tensor:
    """[n, C]: every class equally likely. targets: [m, C], for C."""
    return torch.full((n, targets.shape[1]), 1 / targets.shape[1])


def base_rate(targets: torch.Tensor, n: int) -> torch.Tensor:
    """[n, C]: the mean of the training targets [m, C] for every row."""
    return targets.mean(0).expand(n, -1)


def confidence(train_q: torch.Tensor, targets: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[n, C]: logistic regression of the targets [m, C] on log-odds of one draft probability,
    train_q [m]; q: [n].

    A soft target is C weighted rows, one per class. Where only one class occurs, that one is
    certain."""
    from sklearn.linear_model import LogisticRegression

    m, classes = targets.shape
    x, y = np.repeat(_log_odds(train_q), classes, axis=0), np.tile(np.arange(classes), m)
    weight = targets.double().numpy().ravel()
    if len(np.unique(y[weight > 0])) < 2:
        return base_rate(targets, len(q))
    model = LogisticRegression(C=1e6).fit(
        x[weight > 0], y[weight > 0], sample_weight=weight[weight > 0]
    )
    probs = torch.zeros(len(q), classes, dtype=torch.float64)
    probs[:, model.classes_] = torch.from_numpy(model.predict_proba(_log_odds(q)))
    return probs


def _log_odds(q: torch.Tensor) -> np.ndarray:
    column: np.ndarray = torch.logit(q.double(), eps=1e-6)[:, None].numpy()
    return column
