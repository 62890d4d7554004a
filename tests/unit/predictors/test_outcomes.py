import torch

from predictors.outcomes import Chances


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
