import pytest

from decoding.value import FALLS, Said


def test_siblings_that_were_not_learned_fall_on() -> None:
    said = Said(0.5, 0.5, second=0.4, third=0.2)
    assert said.siblings(0) == [] and said.siblings(1) == [0.4]
    assert said.siblings(4) == pytest.approx([0.4, 0.2, 0.1, 0.05])
    assert Said(0.5, 0.5, 0.2, 0.4).siblings(3)[2] == pytest.approx(0.4 * FALLS)
    assert Said(1.0, 0.5, 0.0, 0.0).siblings(3) == [0.0, 0.0, 0.0]
