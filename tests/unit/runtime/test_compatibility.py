import pytest

from decoding.sampling import Warp
from runtime.compatibility import Difference, differences, incompatible

PAIR = {"name": "a", "target": "1", "draft": "2", "tokenizer": "3"}
MADE = {"pair": PAIR, "warp": {"temperature": 0.0, "top_k": 0}, "gamma": 5, "seed": 1}


@pytest.mark.parametrize(
    ("here", "found"),
    [
        ({}, []),
        ({"pair": {**PAIR, "name": "b"}, "gamma": 5}, []),
        ({"pair": {**PAIR, "draft": "9"}}, [Difference("pair.draft", "2", "9")]),
        ({"warp": {"temperature": 1.0}}, [Difference("warp.temperature", 0.0, 1.0)]),
        ({"warp": Warp(0.5)}, [Difference("warp.temperature", 0.0, 0.5)]),
        ({"gamma": 4}, [Difference("gamma", 5, 4)]),
        ({"inputs": {"layers": (-1,)}}, [Difference("inputs.layers", None, [-1])]),
    ],
)
def test_only_what_is_named_here_is_compared_and_a_name_is_free(here, found):
    made = {**MADE, "warp": Warp(0.0).to_dict()}
    assert incompatible(made, here) == found


def test_what_was_made_for_no_gamma_fits_and_differences_are_one_line():
    assert incompatible({"gamma": None}, {"gamma": 4}) == incompatible({}, {"gamma": 4}) == []
    assert differences({"a": {"b": (1, 2)}}, {"a": {"b": [1, 2]}}) == ""
    assert differences({"a": 1, "b": 2}, {"a": 3}) == "a=1, here 3, b=2, here None"
