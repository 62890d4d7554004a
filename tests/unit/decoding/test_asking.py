"""A predictor asked on a device runs as a copy there; the user's own stays as and where it is."""

import pytest
import torch

from decoding.sampling import Sampler, Warp
from decoding.stopping.specdecpp import SpecDecPPStop
from tests.helpers.device.device_report import PROMPT, chain, head, pair_on
from tests.helpers.device.pretend_device import pretend


def predicted(stop: SpecDecPPStop, device: str) -> list[list[float]]:
    trace = chain(pair_on(device, device), Warp(), stop).decode(PROMPT, 12, Sampler.seeded(1))
    return [round_.predicted for round_ in trace.rounds]


@pytest.mark.slow
def test_engines_on_several_devices_share_a_predictor_that_changes() -> None:
    stop = head("paper")
    for factor in (1.0, -3.0):
        with torch.no_grad():
            for weights in stop.predictor.head.parameters():
                weights.mul_(factor)
        expected = predicted(stop, "cpu")
        with pretend():
            found = [predicted(stop, device) for device in ("cuda:0", "cuda:1", "cuda:0")]
        assert found == [expected] * 3
        assert {each.device.type for each in stop.predictor.head.parameters()} == {"cpu"}
