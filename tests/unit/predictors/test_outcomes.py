import pytest
import torch

from predictors.outcomes import FALLS, Chances


def test_there_and_back():
    chances = Chances(*torch.rand(4, 7, 3).unbind(0))
    found = Chances.of(chances.outcomes())
    torch.testing.assert_close(chances.outcomes().sum(-1), torch.ones(7, 3))
    for name in ("first", "following", "second", "third"):
        torch.testing.assert_close(getattr(found, name), getattr(chances, name))


def test_what_cannot_happen_has_no_chance():
    sure = Chances.of(torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]))
    assert (sure.first, sure.following, sure.second, sure.third) == (1, 1, 0, 0)
    never = Chances.of(torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0]))
    assert (never.first, never.following, never.second, never.third) == (0, 0, 0, 0)


def test_siblings_that_were_not_learned_fall_on():
    chances = Chances(0.5, 0.5, second=0.4, third=0.2)
    assert chances.younger(0) == [] and chances.younger(1) == [0.4]
    assert chances.younger(4) == pytest.approx([0.4, 0.2, 0.1, 0.05])
    assert Chances(0.5, 0.5, 0.2, 0.4).younger(3)[2] == pytest.approx(0.4 * FALLS)
    assert Chances(1.0, 0.5, 0.0, 0.0).younger(3) == [0.0, 0.0, 0.0]
