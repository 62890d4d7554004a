import math

import pytest
import torch
from sklearn import metrics as reference

from predictors.metrics import auroc, brier, confusion, ece, kl, scores
from predictors.scoring import base_rate, confidence


def binary(f: list[float]) -> torch.Tensor:
    column = torch.tensor(f, dtype=torch.float64)
    return torch.stack([1 - column, column], dim=-1)


@pytest.fixture
def hard() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    f = (torch.rand(200, generator=generator) * 20).round() / 20  # with ties
    y = (torch.rand(200, generator=generator) < f).double()
    return binary(f.clamp(0.01, 0.99).tolist()), binary(y.tolist())


def test_binary_scores_agree_with_sklearn(hard: tuple[torch.Tensor, torch.Tensor]) -> None:
    probs, targets = hard
    f, y = probs[:, 1].numpy(), targets[:, 1].numpy()
    assert kl(probs, targets) == pytest.approx(reference.log_loss(y, f))
    assert brier(probs, targets) == pytest.approx(reference.brier_score_loss(y, f))
    assert auroc(probs, targets) == pytest.approx(reference.roc_auc_score(y, f))


def test_three_class_scores_agree_with_sklearn() -> None:
    probs = torch.softmax(
        torch.randn(100, 3, generator=torch.Generator().manual_seed(1)).double(), -1
    )
    label = torch.arange(100) % 3
    found = scores(probs, torch.eye(3, dtype=torch.float64)[label])
    assert found["kl"] == pytest.approx(reference.log_loss(label, probs))
    assert found["auroc"] == pytest.approx(reference.roc_auc_score(label, probs, multi_class="ovr"))
    assert found["accuracy"] == pytest.approx(reference.accuracy_score(label, probs.argmax(-1)))
    assert found["confusion"] == reference.confusion_matrix(label, probs.argmax(-1)).tolist()


def test_soft_labels() -> None:
    probs, targets = binary([0.5, 0.8]), binary([0.5, 0.0])
    assert kl(probs, targets) == pytest.approx(-math.log(0.2) / 2)
    assert kl(targets, targets) == pytest.approx(0.0, abs=1e-9)
    assert brier(probs, targets) == pytest.approx(0.32)


def test_auroc_of_soft_labels_is_that_of_weighted_rows() -> None:
    generator = torch.Generator().manual_seed(2)
    f, s = (
        torch.rand(50, generator=generator).double(),
        torch.rand(50, generator=generator).double(),
    )
    expected = reference.roc_auc_score(
        [1] * 50 + [0] * 50, torch.cat([f, f]), sample_weight=torch.cat([s, 1 - s])
    )
    assert auroc(binary(f.tolist()), binary(s.tolist())) == pytest.approx(expected)


def test_auroc_of_one_class_is_undefined() -> None:
    assert math.isnan(auroc(binary([0.2, 0.4]), binary([1.0, 1.0])))


def test_ece_by_hand() -> None:
    # two bins of 0.5: {.2, .4} with outcomes {0, 1}, {1.} with outcome {0}: (2 * |.3 - .5| + 1 * |1
    # - 0|) / 3
    assert ece(binary([0.2, 0.4, 1.0]), binary([0.0, 1.0, 0.0]), bins=2) == pytest.approx(1.4 / 3)
    top = torch.tensor(
        [[0.6, 0.3, 0.1], [0.1, 0.2, 0.7]], dtype=torch.float64
    )  # both in one bin: mean .65, one right
    assert ece(top, torch.eye(3, dtype=torch.float64)[[0, 1]], bins=2) == pytest.approx(0.15)


def test_confusion_rows_are_true_classes() -> None:
    assert confusion(torch.eye(3)[[1, 1, 2]], torch.eye(3)[[0, 1, 2]]) == [
        [0, 1, 0],
        [0, 1, 0],
        [0, 0, 1],
    ]


def test_base_rate() -> None:
    targets = binary([0.2, 0.6])
    assert torch.allclose(base_rate(targets, 2), binary([0.4, 0.4]))


def test_confidence_recovers_a_logistic_of_the_log_odds() -> None:
    q = torch.rand(500, generator=torch.Generator().manual_seed(3)) * 0.98 + 0.01
    s = torch.sigmoid(0.7 * torch.logit(q) - 0.4)
    assert torch.allclose(confidence(q, binary(s.tolist()), q)[:, 1], s.double(), atol=1e-3)


def test_confidence_in_the_only_class() -> None:
    targets = torch.tensor([[0.0, 1.0, 0.0]]).expand(3, -1)
    assert confidence(torch.rand(3), targets, torch.rand(2)).tolist() == [[0.0, 1.0, 0.0]] * 2


def test_confidence_leaves_unseen_classes_at_zero() -> None:
    targets = torch.eye(3)[[0, 2, 0, 2]]
    probs = confidence(torch.tensor([0.1, 0.9, 0.2, 0.8]), targets, torch.tensor([0.5]))
    assert probs[0, 1] == 0 and probs.sum() == pytest.approx(1.0)
