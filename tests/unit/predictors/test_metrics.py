import math

import pytest
import torch
from sklearn import metrics as reference

from predictors.metrics import auroc, brier, confusion, ece, kl, scores
from predictors.reliability import base_rate, confidence


def binary(f: list[float]) -> torch.Tensor:
    column = torch.tensor(f, dtype=torch.float64)
    return torch.stack([1 - column, column], dim=-1)


def test_binary_scores_agree_with_sklearn():
    generator = torch.Generator().manual_seed(0)
    f = (torch.rand(200, generator=generator) * 20).round() / 20
    y = (torch.rand(200, generator=generator) < f).double()
    probs, targets = binary(f.clamp(0.01, 0.99).tolist()), binary(y.tolist())
    f, y = probs[:, 1], targets[:, 1]
    assert kl(probs, targets) == pytest.approx(reference.log_loss(y, f))
    assert brier(probs, targets) == pytest.approx(reference.brier_score_loss(y, f))
    assert auroc(probs, targets) == pytest.approx(reference.roc_auc_score(y, f))
    s = torch.rand(200, generator=generator).double()
    label, weight = [1] * 200 + [0] * 200, torch.cat([s, 1 - s])
    expected = reference.roc_auc_score(label, torch.cat([f, f]), sample_weight=weight)
    assert auroc(probs, binary(s.tolist())) == pytest.approx(expected)
    assert math.isnan(auroc(binary([0.2, 0.4]), binary([1.0, 1.0])))


def test_three_class_scores_agree_with_sklearn():
    probs = torch.randn(100, 3, generator=torch.Generator().manual_seed(1)).double().softmax(-1)
    label, eye = torch.arange(100) % 3, torch.eye(3, dtype=torch.float64)
    result = scores(probs, eye[label])
    assert result["kl"] == pytest.approx(reference.log_loss(label, probs))
    auc = reference.roc_auc_score(label, probs, multi_class="ovr")
    assert result["auroc"] == pytest.approx(auc)
    assert result["accuracy"] == pytest.approx(reference.accuracy_score(label, probs.argmax(-1)))
    assert result["confusion"] == reference.confusion_matrix(label, probs.argmax(-1)).tolist()
    assert confusion(eye[[1, 1, 2]], eye) == [[0, 1, 0], [0, 1, 0], [0, 0, 1]]


def test_soft_labels_and_base_rate():
    probs, targets = binary([0.5, 0.8]), binary([0.5, 0.0])
    assert kl(probs, targets) == pytest.approx(-math.log(0.2) / 2)
    assert kl(targets, targets) == pytest.approx(0.0, abs=1e-9)
    assert brier(probs, targets) == pytest.approx(0.32)
    assert torch.allclose(base_rate(binary([0.2, 0.6]), 2), binary([0.4, 0.4]))


def test_ece_by_hand():
    # bins of 0.5: {.2, .4} with outcomes {0, 1}, {1.} with outcome {0}
    expected = (2 * abs(0.3 - 0.5) + 1 * abs(1 - 0)) / 3
    assert ece(binary([0.2, 0.4, 1.0]), binary([0.0, 1.0, 0.0]), bins=2) == pytest.approx(expected)
    # both in one bin: mean .65, one right
    top = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.2, 0.7]], dtype=torch.float64)
    assert ece(top, torch.eye(3, dtype=torch.float64)[[0, 1]], bins=2) == pytest.approx(0.15)


def test_confidence_is_a_logistic_of_the_log_odds():
    q = torch.rand(500, generator=torch.Generator().manual_seed(3)) * 0.98 + 0.01
    s = torch.sigmoid(0.7 * torch.logit(q) - 0.4)
    assert torch.allclose(confidence(q, binary(s.tolist()), q)[:, 1], s.double(), atol=1e-3)
    targets = torch.tensor([[0.0, 1.0, 0.0]]).expand(3, -1)
    assert confidence(torch.rand(3), targets, torch.rand(2)).tolist() == [[0.0, 1.0, 0.0]] * 2
    train_q, targets = torch.tensor([0.1, 0.9, 0.2, 0.8]), torch.eye(3)[[0, 2, 0, 2]]
    probs = confidence(train_q, targets, torch.tensor([0.5]))
    assert probs[0, 1] == 0 and probs.sum() == pytest.approx(1.0)
