"""Where outputs of a harvest arrive."""

import pytest
import torch

from data_gen.harvest import outputs_on
from tests.helpers.models.tiny_pair import tiny_pair


def test_outputs_arrive_where_they_did_after_an_error() -> None:
    pair, host, other = tiny_pair(), torch.device("cpu"), torch.device("meta")
    with pytest.raises(ZeroDivisionError), outputs_on(pair, other):
        assert pair.target.output_device == pair.draft.output_device == other
        _ = 1 / 0
    assert pair.target.output_device == pair.draft.output_device == host
