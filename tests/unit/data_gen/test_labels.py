import pytest
import torch
from torch.nn.functional import one_hot

from data_gen.labels import acceptance, accepted_length, drafted_length, overlap
from predictors.features.draft_statistics import entropy
from predictors.hrad import class_chances, class_of_length, length_chances, round_length


def test_acceptance_is_capped_at_one() -> None:
    p, q = torch.tensor([0.1, 0.6, 0.0]), torch.tensor([0.4, 0.2, 0.5])
    assert acceptance(p, q).tolist() == [0.25, 1.0, 0.0]


def test_overlap_is_the_mean_acceptance_of_a_draw() -> None:
    p, q = torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([[0.2, 0.3, 0.5]])
    assert overlap(p, q).item() == pytest.approx((q * acceptance(p, q)).sum().item())
    assert overlap(p, q).item() == pytest.approx(0.5)


def test_entropy_of_a_distribution_with_zeros() -> None:
    distributions = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(entropy(distributions), torch.tensor([0.6931472, 0.0]))


def test_drafting_ends_with_the_first_end_token() -> None:
    rollouts = torch.tensor([[1, 2, 3], [1, 0, 3], [0, 0, 0], [1, 2, 9]])
    assert drafted_length(rollouts, {0, 9}).tolist() == [3, 2, 1, 3]


def test_accepted_length_has_the_distribution_of_token_wise_verification() -> None:
    accept = torch.tensor([0.9, 0.5, 0.8], dtype=torch.float64).repeat(200_000, 1)
    uniform = torch.rand(
        accept.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    drafted = torch.full((len(accept),), 3)
    found = torch.bincount(accepted_length(accept, uniform, drafted), minlength=4) / len(accept)
    expected = torch.tensor([0.1, 0.45, 0.09, 0.36])
    torch.testing.assert_close(found, expected, atol=4e-3, rtol=0)


def test_nothing_is_accepted_after_the_draft_ended() -> None:
    ones = torch.ones(2, 4)
    assert accepted_length(ones, torch.zeros(2, 4), torch.tensor([4, 2])).tolist() == [4, 2]
    assert accepted_length(torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([2])).tolist() == [0]


def test_round_lengths_and_classes() -> None:
    accepted, drafted = torch.tensor([0, 1, 3, 2, 0]), torch.tensor([3, 3, 3, 2, 1])
    lengths = {3: [0, 1, 3, 3, 0], 1: [0, 1, 1, 1, 0]}
    classes = {3: [0, 1, 2, 2, 0], 1: [0, 2, 2, 2, 0]}
    for gamma in (1, 3):
        found = round_length(accepted, drafted, gamma)
        assert found.tolist() == lengths[gamma]
        assert class_of_length(found, gamma).tolist() == classes[gamma]
    found = round_length(torch.tensor([2, 5]), torch.tensor([20, 5]), 7)
    assert found.tolist() == [2, 7] and class_of_length(found, 7).tolist() == [1, 2]


def test_chances_of_lengths_and_classes_are_how_often_coins_give_them() -> None:
    generator = torch.Generator().manual_seed(0)
    accept = torch.tensor([[0.9, 0.5, 0.8], [0.6, 0.7, 0.0]])
    drafted = torch.tensor([3, 2])  # the second ends with its second token
    coins = torch.rand(200_000, 2, 3, generator=generator)
    for gamma in (1, 2, 3):
        found = length_chances(accept, drafted, gamma)
        for row in (0, 1):
            several = accept[row].expand(200_000, 3)
            accepted = accepted_length(several, coins[:, row], drafted[row].expand(200_000))
            lengths = round_length(accepted, drafted[row].expand(200_000), gamma)
            share = torch.bincount(lengths, minlength=gamma + 1) / 200_000
            torch.testing.assert_close(found[row], share, atol=4e-3, rtol=0)
            share = torch.bincount(class_of_length(lengths, gamma), minlength=3) / 200_000
            torch.testing.assert_close(class_chances(found)[row], share, atol=4e-3, rtol=0)


def test_a_greedy_target_has_no_coins() -> None:
    accept = torch.tensor([[1.0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]])
    drafted = torch.tensor([3, 3, 3, 2])
    accepted = accepted_length(accept, torch.full((4, 3), 0.5), drafted)
    for gamma in (1, 2, 3):
        lengths, chances = (
            round_length(accepted, drafted, gamma),
            length_chances(accept, drafted, gamma),
        )
        assert torch.equal(chances, one_hot(lengths, gamma + 1).float())
        classes = one_hot(class_of_length(lengths, gamma), 3)
        assert torch.equal(class_chances(chances), classes.float())
